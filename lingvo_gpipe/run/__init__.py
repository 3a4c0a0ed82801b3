"""A run from its start to its end: loop, evaluation, checkpoints, export, TensorBoard.

Flags and messages for the command line belong to `lingvo_gpipe.trainer`; one update's mathematics
to `lingvo_gpipe.optim`.
"""
