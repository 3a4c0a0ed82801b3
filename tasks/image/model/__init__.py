"""Image classifiers as flat lists of layers: AmoebaNet and small networks.

Where images come from is in `data`.
"""
