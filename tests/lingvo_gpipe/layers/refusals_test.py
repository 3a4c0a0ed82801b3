"""What a layer cannot take is refused on one line, with layer, expected and found."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers
from tests.cases import layer_cases

X = tf.TensorSpec((4, 8, 8, 3))
FLAT = tf.TensorSpec((4, 6))
WORDS = tf.TensorSpec((4, 6), tf.int32)
TOKENS = tf.TensorSpec((4, 6, 8))


@pytest.mark.parametrize(
    ("params", "inputs", "text"),
    [
        (
            layers.Dense.Params(units=3, name="top"),
            [WORDS],
            "top (Dense): expected floating [B, ..., D], got int32 [4, 6]. Scale or embed it",
        ),
        (
            layers.Dense.Params(units=3),
            [tf.TensorSpec((4,))],
            "Dense: expected [B, ..., D] with known dimensions, got shape (4,). Put a Flatten "
            "before it",
        ),
        (
            layers.Dense.Params(units=3),
            [(FLAT, FLAT)],
            "Dense: expected one tensor [B, ..., D], got tuple. Put a Flatten before it",
        ),
        (
            layers.Dense.Params(units=0),
            [FLAT],
            "Dense: field units is 0, expected at least 1",
        ),
        (
            layers.Dense.Params(units=3),
            [FLAT, FLAT],
            "Dense: reads 2 names ('x',), expected (x). Set its field reads",
        ),
        (
            layers.Dense.Params(units=3, activation="rleu"),
            [FLAT],
            "Dense: no activation 'rleu'; nearest 'relu'",
        ),
        (
            layers.Activation.Params(activation="glu"),
            [FLAT],
            "Activation: no activation 'glu'; nearest 'gelu', 'elu'",
        ),
        (
            layers.Dense.Params(units=3, kernel_init="glorot"),
            [FLAT],
            "no Keras initializer 'glorot'",
        ),
        (
            layers.Dense.Params(units=3, dtype="float23"),
            [FLAT],
            "unknown precision policy 'float23'; nearest 'float32'",
        ),
        (
            layers.Dense.Params(units=3, tie={"kernle": "a/kernel"}),
            [FLAT],
            "Dense: tie: no variable 'kernle'; nearest 'kernel'",
        ),
        (
            layers.PositionalEncoding.Params(reads=("x", "position")),
            [TOKENS, FLAT],
            "PositionalEncoding: position is float32 [4, 6], expected integers [4, 6]. Set its",
        ),
        (
            layers.PositionalEncoding.Params(reads=("x", "position")),
            [TOKENS, tf.TensorSpec((4, 5), tf.int32)],
            "PositionalEncoding: position is int32 [4, 5], expected integers [4, 6]. Set its",
        ),
        (
            layers.Conv2D.Params(filters=3),
            [FLAT],
            "Conv2D: expected [B, H, W, C] with known dimensions, got shape (4, 6). Set its field",
        ),
        (
            layers.MaxPool2D.Params(pool_size=9),
            [X],
            "MaxPool2D: a window of 9x9 does not fit into [H, W] = [8, 8] with padding 'valid'. "
            "Use padding='same'",
        ),
        (
            layers.SeparableConv2D.Params(filters=3, strides=(1, 2)),
            [X],
            "SeparableConv2D: strides (1, 2), but TensorFlow's depthwise convolution steps equally",
        ),
        (
            layers.BatchNorm.Params(momentum=1.0),
            [X],
            "BatchNorm: field momentum is 1.0, expected 0 <= momentum < 1",
        ),
        (
            layers.Dropout.Params(rate=1.0),
            [FLAT],
            "Dropout: field rate is 1.0, expected 0 <= rate < 1",
        ),
        (
            layers.Embedding.Params(vocabulary=5, units=2),
            [FLAT],
            "Embedding: expected integer ids, got float32 [4, 6]. Read the field that holds the",
        ),
        (
            layers.Add.Params(reads=("a", "b")),
            [FLAT, X],
            "Add: shapes [[4, 6], [4, 8, 8, 3]] cannot be added. Project the others",
        ),
        (
            layers.Concat.Params(reads=("a", "b"), axis=1),
            [TOKENS, tf.TensorSpec((4, 3, 7))],
            "Concat: shapes [[4, 6, 8], [4, 3, 7]] cannot be concatenated along axis 1. All other",
        ),
        (
            layers.Concat.Params(reads=("a", "b"), axis=0),
            [FLAT, FLAT],
            "it may not be the first",
        ),
        (
            layers.Softmax.Params(classes=3),
            [FLAT, tf.TensorSpec((4, 1), tf.int32)],
            "Softmax: label of shape [4, 1], expected [4] for its x. Set its field reads",
        ),
        (
            layers.Softmax.Params(classes=3),
            [FLAT, tf.TensorSpec((4,))],
            "Softmax: label is float32, expected integer classes. Cast it in the input",
        ),
        (
            layers.MeanSquaredError.Params(),
            [FLAT, TOKENS],
            "MeanSquaredError: target or weights of shape [4, 6, 8], expected [4, 6]",
        ),
        (
            layers.MultiHeadAttention.Params(units=8, heads=3),
            [TOKENS],
            "MultiHeadAttention: 3 heads do not divide 8 units. Set its field head_dim",
        ),
        (
            layers.MultiHeadAttention.Params(units=6, heads=3),
            [TOKENS],
            "x of shape [4, 6, 8] and memory of [4, 6, 8], expected [4, T, 6]",
        ),
        (
            layers.MultiHeadAttention.Params(units=8, heads=2, reads=("x", "mask")),
            [TOKENS, tf.TensorSpec((4, 5), tf.bool)],
            "MultiHeadAttention: mask of shape [4, 5], expected [4, 6] or [4, 6, 6]",
        ),
        (
            layers.Sequential.Params(layers=[layers.Softmax.Params(classes=3)], name="block"),
            [FLAT],
            "block (Sequential): child softmax reads 2 values ('x', 'label'), but the layer itself "
            "reads 1. Inside, values are passed on by position",
        ),
        (
            layers.Sequential.Params(
                layers=[layers.Dense.Params(units=1, name="a"), layers.Flatten.Params(name="a")]
            ),
            [FLAT],
            "two layers are named 'a'. Rename one of them",
        ),
        (
            layers.Sequential.Params(layers=[layers.Identity.Params()], writes=("x", "y")),
            [FLAT],
            "Sequential: writes ('x', 'y'), but its last child returns 1 values",
        ),
        (
            layers.Residual.Params(body=[layers.Dense.Params(units=5)]),
            [FLAT],
            "Residual: shapes [[4, 6], [4, 5]] cannot be added. Project",
        ),
    ],
)
def test_what_does_not_fit_is_named(params: Any, inputs: list[tf.TensorSpec], text: str) -> None:
    with pytest.raises(errors.LayerError) as caught:
        layer_cases.meta_of(params, *inputs)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
