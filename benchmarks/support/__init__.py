"""What benchmarks share: networks, waiting cells, processes, figures of the paper, the machine."""
