"""What the project's commands share: flags, exit codes, signals, progress, units of figures.

Nothing here knows a network, a run or TensorFlow.
"""
