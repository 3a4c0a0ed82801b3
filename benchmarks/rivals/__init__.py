"""Steps of PyTorch's pipelining and of plain Keras beside ours: equal blocks, weights, batch."""
