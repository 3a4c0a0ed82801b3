"""What the chief asks of a worker's process beside its devices: to read the mini-batches there."""
