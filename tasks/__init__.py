"""Networks, input and decoding by field: images, language models, translation.

Complete recipes with data and hyperparameters are in `lingvo_gpipe.params`.
"""
