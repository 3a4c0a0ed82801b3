"""What benchmarks share: processes in rounds, networks, waiting cells, curves, the machine."""
