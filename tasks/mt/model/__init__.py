"""The translation network: its layers, and the list of them.

How it decodes is in `decoding`.
"""
