"""Normalization without some of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers
from tests.lingvo_gpipe.keras_layers import keras_runs


def test_a_norm_that_is_not_centred_has_no_beta() -> None:
    x = tf.constant([[1.0, 3.0], [2.0, 8.0]])
    y, _, meta = keras_runs.run(layers.LayerNorm.Params(center=False, epsilon=0.0), x)
    assert [variable.path for variable in meta.variables] == ["gamma"]
    np.testing.assert_allclose(y, [[-1.0, 1.0], [-1.0, 1.0]], rtol=1e-6)


def _gradients(y_of: Any, values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Return y and the gradients of x, gamma and beta of an uneven sum of y."""
    with tf.GradientTape() as tape:
        tape.watch(values)
        y = y_of(**values)
        places = tf.reshape(tf.range(tf.size(y), dtype=y.dtype), y.shape)
        total = tf.tensordot(tf.sin(y), places, y.shape.rank)
    return {"y": y, **tape.gradient(total, values)}


def _plain(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
    # Not tf.nn.moments, which stops gradients: its second derivative is wrong.
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(centred * centred, -1, keepdims=True)
    return centred / tf.sqrt(variance + 1e-6) * gamma + beta


def _ours(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
    norm = layers.LayerNorm.Params(dtype=x.dtype.name).instantiate()
    context = keras_runs.context(state={}, training=True)
    return norm.fprop({"gamma": gamma, "beta": beta}, x, context)


def _values(shape: tuple[int, ...], dtype: tf.DType) -> dict[str, tf.Tensor]:
    drawn = np.random.default_rng(0)
    return {
        "x": tf.constant(drawn.normal(3.0, 2.0, shape), dtype),
        "gamma": tf.constant(drawn.normal(1.0, 0.5, shape[-1:]), dtype),
        "beta": tf.constant(drawn.normal(0.0, 1.0, shape[-1:]), dtype),
    }


def _assert_near(found: dict[str, tf.Tensor], expected: dict[str, tf.Tensor], most: float) -> None:
    for name, value in expected.items():
        allowed = most * float(tf.reduce_max(tf.abs(value)))
        np.testing.assert_allclose(found[name], value, rtol=0.0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (2, 3, 2, 6)])
def test_layer_norm_has_the_gradients_of_plain_tensorflow(shape: tuple[int, ...]) -> None:
    values = _values(shape, tf.float64)
    _assert_near(_gradients(_ours, values), _gradients(_plain, values), 1e-12)


def test_layer_norm_has_the_second_derivative_of_plain_tensorflow() -> None:
    def slope(y_of: Any) -> Any:
        def squares(**values: tf.Tensor) -> tf.Tensor:
            found = _gradients(y_of, values)
            return tf.square(found["x"]) + found["gamma"] * found["beta"]

        return squares

    values = _values((3, 4, 5), tf.float64)
    _assert_near(_gradients(slope(_ours), values), _gradients(slope(_plain), values), 1e-10)
