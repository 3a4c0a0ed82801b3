"""From parallel text to mini-batches: corpora, vocabulary, prepared records, mixing, packing.

Nothing here depends on the network.
"""
