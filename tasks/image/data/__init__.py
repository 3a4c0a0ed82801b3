"""Images and labels: where they come from, how they are read, augmented and preprocessed.

Nothing here knows the network, except `classes`, which checks its number of classes.
"""
