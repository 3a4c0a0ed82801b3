"""What a training step will need before it runs: memory, time, links; and the texts that say so.

Nothing here trains. Measured costs come from running single layers (`profiling`).
"""
