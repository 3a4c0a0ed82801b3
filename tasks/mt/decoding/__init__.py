"""Translating with a trained network: search, incremental decoding, serving, scores.

The trainer's modes `decode` and `score` are here too; training is not.
"""
