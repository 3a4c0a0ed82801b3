"""What the project's commands share: flags, exit codes, progress lines, units of figures.

Nothing here knows a network, a run or TensorFlow.
"""
