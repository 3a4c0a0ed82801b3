"""Steps of PyTorch's pipelining beside ours: equal layers, weights, mini-batch.

One program each, since neither environment has the other library: `ours` and `pytorch` measure a
step, `reference` is what they exchange, `__main__` runs them in turn.
"""
