"""What a pass shows while it runs: how far each device is, when each slot runs, and a watchdog."""
