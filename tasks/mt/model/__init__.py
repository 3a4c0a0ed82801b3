"""The translation network: its layers, and the list of them.

Decoding with it is in `decoding`.
"""
