"""Functions that a traced graph calls, how often its loops run, and sizes of its tensors."""

from __future__ import annotations

import tensorflow as tf

LOOPS = frozenset(["While", "StatelessWhile"])


def num_elements(tensor: tf.Tensor) -> int:
    """Return the number of elements; dimensions of unknown size count as none."""
    return int(tensor.shape.num_elements() or 0) if tensor.shape.rank is not None else 0


def body(name: str, graph: tf.Graph) -> tf.Graph:
    """Return the graph of a function that an operation of `graph` calls."""
    return graph._functions[name].graph


def iterations(op: tf.Operation) -> int:
    """Return how often a loop runs: the length of unstacked tensors, or as its forward loop."""
    count = 1
    for tensor in op.inputs:
        source = tensor.op
        if source.type in LOOPS:
            count = max(count, iterations(source))
        elif source.type == "TensorListFromTensor":
            count = max(count, int(source.inputs[0].shape[0] or 1))
    return count
