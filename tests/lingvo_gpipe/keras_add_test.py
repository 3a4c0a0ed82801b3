"""Keras' addition of a column, as the library corrects it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import keras_add

COLUMN = np.arange(4.0, dtype="float32")[:, None]


@pytest.mark.parametrize("other", [np.ones([4, 4], "float32"), [1.0], [[1, 2]], 3, 0.5])
def test_a_column_is_added_as_a_column(other: Any) -> None:
    keras_add.correct()
    total = keras.ops.add(other, COLUMN)
    np.testing.assert_array_equal(total, np.asarray(other, "float32") + COLUMN)
    assert total.dtype == tf.float32


def test_a_sparse_tensor_and_a_column_are_left_to_keras() -> None:
    keras_add.correct()
    total = keras.ops.add(tf.sparse.from_dense(np.eye(4, 1, dtype="float32")), COLUMN)
    np.testing.assert_array_equal(total, np.eye(4, 1) + COLUMN)
