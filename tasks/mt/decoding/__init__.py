"""Translating with a trained network: search, incremental decoding, serving, scores.

The modes `decode` and `score` of the trainer are here too; training is not.
"""
