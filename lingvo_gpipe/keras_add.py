"""A correction of Keras' addition, which takes a column for a bias where all sizes are known.

Keras 3.15 adds a second tensor by `tf.nn.bias_add` if one of its sizes alone is above 1 and is that
of the channels of the first, on whichever axis it is: [4, 4] + [4, 1] then adds the column as a
row, and [1, 4, 1] + [1, 1, 4] has 4 sums in place of 16. Plain `fit` does not meet it, since the
number of examples is unknown there; a micro-batch does, and so does Keras called on values.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import numpy as keras_numpy

_SPARSE = tf.SparseTensor | tf.IndexedSlices


def correct() -> None:
    """Let Keras' addition, from now on, add a column as a column."""
    original = keras_numpy.add

    @functools.wraps(original)
    def add(x1: Any, x2: Any) -> Any:
        if isinstance(x1, _SPARSE) or not _is_no_row(x2, getattr(x1, "shape", ())):
            return original(x1, x2)
        if not isinstance(x1, int | float):
            x1 = keras.ops.convert_to_tensor(x1)
        dtype = keras.backend.result_type(getattr(x1, "dtype", type(x1)), x2.dtype)
        return tf.add(*(keras.ops.convert_to_tensor(x, dtype) for x in (x1, x2)))

    keras_numpy.add = add


def _is_no_row(x: Any, other: Any) -> bool:
    """Whether it is dense, of several axes, and its last one is 1 or not that of the other."""
    if isinstance(x, _SPARSE) or not hasattr(x, "shape"):
        return False
    shape, shape_of_other = tf.TensorShape(x.shape), tf.TensorShape(other)
    if shape.rank is None or shape.rank < 2:
        return False
    return shape[-1] == 1 or bool(shape_of_other.rank and shape[-1] != shape_of_other[-1])
