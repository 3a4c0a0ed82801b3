"""Sources of parallel text: files, TFDS datasets, message catalogues; faulty text is counted.

Nothing here knows vocabularies or ids.
"""
