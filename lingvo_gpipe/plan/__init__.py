"""What a training step will need, before it runs: memory, time, links, and the text of the plan.

Nothing here trains; `profiling` runs layers and cells to measure them.
"""
