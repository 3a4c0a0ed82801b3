"""Keras' addition adds as TensorFlow's does, whichever sizes are known."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers as layers

SHAPES = [
    ((4, 4), (4, 1)),
    ((4, 4), (1, 4)),
    ((4, 4), (4,)),
    ((1, 4), (4, 1)),
    ((2, 4, 4), (4, 1)),
    ((4, 3, 3, 4), (4, 1, 1, 1)),
    ((2, 3), (2, 3)),
]


@pytest.mark.parametrize(("one", "other"), SHAPES)
@pytest.mark.parametrize("kind", [np.asarray, tf.constant, keras.Variable])
def test_sizes_of_one_are_where_they_are(
    one: tuple[int, ...], other: tuple[int, ...], kind: Any
) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=one), random.normal(size=other)
    added = keras.ops.convert_to_numpy(keras.ops.add(kind(x), kind(y)))
    np.testing.assert_allclose(added, x + y, rtol=1e-6, atol=1e-6)


def test_dtypes_are_those_of_keras() -> None:
    column = keras.ops.ones((2, 1), "int32")
    assert keras.ops.add(1, column).dtype == "int32"
    assert keras.ops.add(1.5, column).dtype == "float32"
    assert keras.ops.add(keras.ops.ones((2, 2), "bfloat16"), column).dtype == "bfloat16"


@pytest.mark.parametrize("other", [[1.0], [[1, 2]]])
def test_a_list_is_added_to_a_column(other: Any) -> None:
    column = np.arange(4.0, dtype="float32")[:, None]
    added = keras.ops.add(other, column)
    assert added.dtype == "float32"
    np.testing.assert_array_equal(added, np.asarray(other) + column)


def test_a_sparse_tensor_and_a_column_are_left_to_keras() -> None:
    column = np.ones([4, 1], "float32")
    added = keras.ops.add(tf.sparse.from_dense(np.eye(4, 1, dtype="float32")), column)
    np.testing.assert_array_equal(added, np.eye(4, 1) + column)
