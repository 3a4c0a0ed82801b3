"""Sums whose bits do not depend on timing."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import nests

# Two operations instead of one for each term, where copying the terms costs nothing.
_MANY = 5
_SMALL = 4096


def in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of tensors, added in their order; a single tensor is returned unchanged.

    `tf.add_n` begins with the first term whose memory nobody else holds at that moment, so that
    three or more floats may add up to other bits where timing differs. In a graph that TensorFlow
    optimises, it may make that of this sum again; outer functions are not optimised.
    """
    if len(tensors) > 2 and not nests.is_differentiable(tensors[0].dtype):
        return tf.add_n(tensors)
    elements = tensors[0].shape.num_elements()
    if len(tensors) >= _MANY and elements is not None and elements <= _SMALL:
        return tf.reduce_sum(tf.stack(tensors), axis=0)
    return functools.reduce(tf.add, tensors)
