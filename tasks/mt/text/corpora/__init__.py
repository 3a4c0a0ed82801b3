"""Sources of parallel text: files, TFDS datasets, message catalogues; faulty text is counted.

Nothing here depends on vocabularies or ids.
"""
