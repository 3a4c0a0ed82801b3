"""Single layers of ours beside PyTorch's: processor time of a thread, by operation."""
