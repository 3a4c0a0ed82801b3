"""A correction of Keras' addition, which takes a column for a bias where all sizes are known.

Keras 3.15 adds a second tensor by `tf.nn.bias_add` if one of its sizes alone is above 1 and is that
of the channels of the first, on whichever axis it is: [4, 4] + [4, 1] then adds the column as a
row. Plain `fit` does not meet it, since the number of examples is unknown there; a micro-batch of
four examples does, and so does Keras called on values.
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
        if isinstance(x1, _SPARSE) or not _is_column(x2):
            return original(x1, x2)
        if not isinstance(x1, int | float):
            x1 = keras.ops.convert_to_tensor(x1)
        dtype = keras.backend.result_type(getattr(x1, "dtype", type(x1)), x2.dtype)
        return tf.add(*(keras.ops.convert_to_tensor(x, dtype) for x in (x1, x2)))

    keras_numpy.add = add


def _is_column(x: Any) -> bool:
    """Whether it is a dense array or tensor of several axes whose last one has size 1."""
    if isinstance(x, _SPARSE) or not hasattr(x, "shape"):
        return False
    shape = tf.TensorShape(x.shape)
    return shape.rank is not None and shape.rank > 1 and shape[-1] == 1
