"""Values of layers, compared with Keras layers with copied weights, and by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers
from lingvo_gpipe.layers.heads import weight_by
from tests.cases import layer_cases
from tests.cases.layer_cases import IDS, IMAGE, SEQUENCE

DTYPE = "float64"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A layer of ours and the equal Keras layer.

    Attributes:
        ours: params.
        keras: a layer, or a function of several inputs.
        inputs: specs.
        names: Keras' names of our weights where they differ.
    """

    name: str
    ours: Callable[[], Any]
    keras: Callable[[], Any]
    inputs: tuple[tf.TensorSpec, ...]
    names: dict[str, str] = dataclasses.field(default_factory=dict)


K = keras.layers
PAIRS = (
    Pair(
        "dense",
        lambda: layers.Dense.Params(units=3, activation="gelu"),
        lambda: K.Dense(3, activation="gelu", dtype=DTYPE),
        (SEQUENCE,),
    ),
    Pair(
        "conv",
        lambda: layers.Conv2D.Params(
            filters=5, kernel_size=(3, 2), strides=2, padding="valid", activation="relu"
        ),
        lambda: K.Conv2D(5, (3, 2), strides=2, padding="valid", activation="relu", dtype=DTYPE),
        (IMAGE,),
    ),
    Pair(
        "separable_conv",
        lambda: layers.SeparableConv2D.Params(filters=5, kernel_size=5, activation="relu"),
        lambda: K.SeparableConv2D(5, 5, padding="same", activation="relu", dtype=DTYPE),
        (IMAGE,),
    ),
    *(
        Pair(
            f"{kind}_pool_{padding}",
            functools.partial(ours.Params, pool_size=(3, 2), strides=2, padding=padding),
            functools.partial(theirs, (3, 2), strides=2, padding=padding, dtype=DTYPE),
            (IMAGE,),
        )
        for kind, ours, theirs in (
            ("max", layers.MaxPool2D, K.MaxPooling2D),
            ("avg", layers.AvgPool2D, K.AveragePooling2D),
        )
        for padding in ("same", "valid")
    ),
    Pair(
        "global_avg_pool",
        lambda: layers.GlobalPool2D.Params(),
        lambda: K.GlobalAveragePooling2D(dtype=DTYPE),
        (IMAGE,),
    ),
    Pair(
        "layer_norm",
        lambda: layers.LayerNorm.Params(epsilon=1e-3),
        lambda: K.LayerNormalization(epsilon=1e-3, dtype=DTYPE),
        (SEQUENCE,),
    ),
    Pair(
        "embedding",
        lambda: layers.Embedding.Params(vocabulary=9, units=4),
        lambda: K.Embedding(9, 4, dtype=DTYPE),
        (IDS,),
        {"table": "embeddings"},
    ),
    Pair(
        "activation",
        lambda: layers.Activation.Params(activation="silu"),
        lambda: K.Activation("silu", dtype=DTYPE),
        (SEQUENCE,),
    ),
    Pair(
        "batch_norm",
        lambda: layers.BatchNorm.Params(momentum=0.8),
        lambda: _Training(K.BatchNormalization(momentum=0.8, dtype=DTYPE)),
        (IMAGE,),
    ),
)


class _Training(keras.Layer):
    """A Keras layer called with training=True."""

    def __init__(self, inner: Any) -> None:
        super().__init__(dtype=DTYPE)
        self.inner = inner

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.inner(x, training=True)


def flat_weights(theta: Any) -> dict[str, tf.Tensor]:
    """Return nested theta by path."""
    found: dict[str, tf.Tensor] = {}
    for name, value in theta.items():
        inner = flat_weights(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}/{path}".rstrip("/"): leaf for path, leaf in inner.items()}
    return found


def randomized(theta: Any) -> Any:
    """Return theta with all elements different, so that ones and zeros cannot hide a swap."""
    rng = np.random.default_rng(3)
    return tf.nest.map_structure(
        lambda t: t + tf.constant(rng.normal(size=t.shape, scale=0.3), t.dtype), theta
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_outputs_and_gradients_are_keras_own(pair: Pair) -> None:
    params = pair.ours().set(dtype=DTYPE)
    specs = layer_cases.Case(pair.name, pair.ours(), pair.inputs).specs(DTYPE)
    meta = layer_cases.meta_of(params, *specs)
    theta, state = layer_cases.create_variables(meta)
    theta = randomized(theta)
    inputs = layer_cases.draw(specs)
    floating = [x for x in inputs if x.dtype.is_floating]
    layer = params.instantiate()
    with tf.GradientTape() as tape:
        tape.watch([theta, floating])
        ours = layer.run(theta, layer_cases.as_read(inputs), layer_cases.context(state))
        target = tf.reduce_sum(ours * tf.cos(tf.cast(tf.range(ours.shape[-1]), ours.dtype)))
    by_weight, by_input = tape.gradient(target, (theta, floating))

    theirs = pair.keras()
    theirs(*inputs)
    weights = flat_weights(theta)
    variables = {
        path: next(
            v for v in theirs.trainable_variables if v.path.endswith(pair.names.get(path, path))
        )
        for path in weights
    }
    assert len({v.path for v in variables.values()}) == len(theirs.trainable_variables)
    for path, value in weights.items():
        variables[path].assign(tf.reshape(value, variables[path].shape))
    with tf.GradientTape() as tape:
        tape.watch(floating)
        expected = theirs(*inputs)
        target = tf.reduce_sum(expected * tf.cos(tf.cast(tf.range(ours.shape[-1]), ours.dtype)))
    sources = {path: v.value for path, v in variables.items()}
    their_weight, their_input = tape.gradient(target, (sources, floating))

    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
    for path, gradient in flat_weights(by_weight).items():
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient),
            tf.reshape(tf.convert_to_tensor(their_weight[path]), gradient.shape),
            rtol=1e-12,
            atol=1e-12,
            err_msg=path,
        )
    for gradient, their in zip(by_input, their_input, strict=True):
        np.testing.assert_allclose(gradient, their, rtol=1e-12, atol=1e-12)


def batch_norm(**fields: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Return params, layer, theta and state of a batch norm of four channels."""
    params = layers.BatchNorm.Params(**fields)
    meta = layer_cases.meta_of(params, tf.TensorSpec((4, 7, 6, 4)))
    return params, params.instantiate(), *layer_cases.create_variables(meta)


def test_moving_statistics_are_keras_own() -> None:
    _, layer, theta, state = batch_norm(momentum=0.8, dtype=DTYPE)
    theirs = K.BatchNormalization(momentum=0.8, dtype=DTYPE)
    for seed in range(3):
        x = layer_cases.draw([tf.TensorSpec((4, 7, 6, 4), tf.float64)], seed)[0] * 3.0 + 2.0
        ctx = layer_cases.context(state)
        layer.run(theta, x, ctx)
        state = layer.merge_moments(state, ctx.collected.moments["net"])
        theirs(x, training=True)
        np.testing.assert_allclose(state["moving_mean"], theirs.moving_mean, rtol=1e-13)
        np.testing.assert_allclose(state["moving_variance"], theirs.moving_variance, rtol=1e-13)
    ours = layer.run(theta, x, layer_cases.context(state, training=False))
    np.testing.assert_allclose(ours, theirs(x, training=False), rtol=1e-12)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_moments_over_ragged_micro_batches_are_the_whole_batchs(warm: bool) -> None:
    _, layer, theta, state = batch_norm(momentum=0.0)
    if warm:
        state["moving_mean"] = tf.constant([29.9, 30.2, 30.0, 29.7])
    x = 30.0 + 0.5 * layer_cases.draw([tf.TensorSpec((64, 7, 6, 4))])[0]
    parts = []
    for part in tf.split(x, [30, 1, 20, 13]):
        ctx = layer_cases.context(state)
        layer.run(theta, part, ctx)
        parts.append(ctx.collected.moments["net"])
    merged = layer.merge_moments(state, tf.nest.map_structure(lambda *v: tf.add_n(v), *parts))
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(merged["moving_mean"], exact.mean((0, 1, 2)), rtol=1e-7)
    np.testing.assert_allclose(merged["moving_variance"], exact.var((0, 1, 2)), rtol=3e-7)


def test_a_batch_norm_that_counted_nothing_moves_nothing() -> None:
    _, layer, _, state = batch_norm()
    nothing = {"count": tf.zeros([], tf.float64)}
    nothing |= {name: tf.zeros([4], tf.float64) for name in ("sum", "sum_of_squares")}
    new = layer.merge_moments(state, nothing)
    np.testing.assert_array_equal(new["moving_mean"], state["moving_mean"])
    np.testing.assert_array_equal(new["moving_variance"], state["moving_variance"])


def test_a_frozen_batch_norm_uses_its_moving_statistics() -> None:
    x = layer_cases.draw([tf.TensorSpec((4, 7, 6, 4))])[0]
    _, layer, theta, state = batch_norm()
    expected = layer.run(theta, x, layer_cases.context(state, training=False))
    _, frozen, _, _ = batch_norm(trainable=False)
    by_params = layer_cases.context(state)
    by_pattern = layer_cases.context(state).replace(path="block/net", frozen=frozenset(["block"]))
    for own, ctx in ((frozen, by_params), (layer, by_pattern)):
        np.testing.assert_array_equal(own.run(theta, x, ctx), expected)
        assert not ctx.collected.moments


def run_double(params: Any, *inputs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return output, layer and theta of a layer under float64."""
    params.set(dtype=DTYPE)
    meta = layer_cases.meta_of(params, *(tf.TensorSpec(x.shape, x.dtype) for x in inputs))
    theta = randomized(layer_cases.create_variables(meta)[0])
    layer = params.instantiate()
    output = layer.run(theta, layer_cases.as_read(inputs), layer_cases.context())
    return output, layer, theta


def dense(theta: Any, x: Any) -> Any:
    return x @ theta["kernel"] + theta["bias"]


def test_compositions_by_hand() -> None:
    x = layer_cases.draw([tf.TensorSpec((4, 6), tf.float64)])[0]
    wide, back = layers.Dense.Params(units=5, activation="relu"), layers.Dense.Params(units=6)

    output, _, theta = run_double(layers.Sequential.Params(layers=[wide, back]), x)
    np.testing.assert_allclose(
        output, dense(theta["dense_1"], tf.nn.relu(dense(theta["dense"], x)))
    )
    output, _, theta = run_double(layers.Residual.Params(body=[back]), x)
    np.testing.assert_allclose(output, x + dense(theta["body"]["dense"], x))


def test_a_transformer_layer_is_two_pre_norm_branches() -> None:
    x = layer_cases.draw([tf.TensorSpec(SEQUENCE.shape, tf.float64)])[0]
    params = layers.TransformerLayer.Params(units=8, heads=2, hidden=12, activation="gelu")
    output, layer, theta = run_double(params, x)
    ctx = layer_cases.context()

    def norm(part: str, value: Any) -> Any:
        return layer.child(f"{part}_norm", theta, value, ctx)

    middle = x + layer.child("attention", theta, norm("attention", x), ctx)
    inner = theta["feed_forward"]
    hidden = keras.activations.gelu(dense(inner["dense"], norm("feed_forward", middle)))
    np.testing.assert_allclose(output, middle + dense(inner["dense_1"], hidden), rtol=1e-12)


def test_joins_keep_the_order_of_names() -> None:
    a, b = layer_cases.draw([tf.TensorSpec((2, 3), tf.float64)] * 2)
    joined, _, _ = run_double(layers.Concat.Params(reads=("a", "b")), a, b)
    np.testing.assert_array_equal(joined, tf.concat([a, b], 1))
    total, _, _ = run_double(layers.Add.Params(reads=("a", "b")), a, b)
    np.testing.assert_array_equal(total, a + b)
    renamed, _, _ = run_double(layers.Identity.Params(reads=("a", "b"), writes=("c", "d")), a, b)
    assert renamed[0] is a
    assert renamed[1] is b


def test_a_dropout_without_a_rate_keeps_nothing() -> None:
    x = tf.TensorSpec((4, 6))
    kept = [layers.Dropout.Params(rate=r).fprop_meta(x).activation_bytes for r in (0.0, 0.1)]
    assert kept == [0, 4 * 6 * (4 + 1)]


def test_dropout_keeps_the_mean_and_the_rest_scaled() -> None:
    layer = layers.Dropout.Params(rate=0.3).instantiate()
    ones = tf.ones((200, 300))
    dropped = layer.run({}, ones, layer_cases.context()).numpy()
    np.testing.assert_allclose(np.unique(dropped), [0.0, 1.0 / 0.7], rtol=1e-6)
    assert abs((dropped == 0).mean() - 0.3) < 0.01
    assert layer.run({}, ones, layer_cases.context(training=False)) is ones


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (layers.Dense.Params(units=3), (1024, 2)),
        (layers.Conv2D.Params(filters=3), (1, 32, 32, 2)),
    ],
)
def test_a_bias_has_its_gradient_added_up_in_float32(kind: Any, shape: tuple[int, ...]) -> None:
    params = kind.copy().set(dtype="mixed_bfloat16")
    x = tf.ones(shape, tf.bfloat16)
    meta = layer_cases.meta_of(params, tf.TensorSpec(shape, tf.bfloat16))
    theta, _ = layer_cases.create_variables(meta, compute=tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(theta["bias"])
        y = params.instantiate().run(theta, x, layer_cases.context())
    gradient = tape.gradient(y, theta["bias"], tf.fill(y.shape, tf.constant(0.01, y.dtype)))
    # Summed in bfloat16, whose numbers from 4 on are 0.03 apart, it would stay at 4.
    np.testing.assert_allclose(tf.cast(gradient, tf.float32), 10.24, rtol=0.01)


def test_dropout_is_even_in_bfloat16_too() -> None:
    layer = layers.Dropout.Params(rate=0.1, dtype="mixed_bfloat16").instantiate()
    dropped = layer.run({}, tf.ones((400, 500), tf.bfloat16), layer_cases.context())
    # Drawn in bfloat16, 13 of 128 numbers lie below 0.1.
    assert abs(np.mean(np.asarray(dropped, np.float32) == 0) - 0.1) < 0.001


def test_positional_encoding_by_hand() -> None:
    layer = layers.PositionalEncoding.Params(dtype=DTYPE).instantiate()
    found = layer.run({}, tf.zeros((2, 6, 5), tf.float64), layer_cases.context())
    for t in range(6):
        expected = [np.sin(t), np.sin(t / 1e4), np.cos(t), np.cos(t / 1e4), 0.0]
        np.testing.assert_allclose(found[1, t], expected, atol=1e-14)
    given = layers.PositionalEncoding.Params(dtype=DTYPE, reads=("x", "position")).instantiate()
    position = tf.constant([[0, 1, 2, 0, 1, 5], [3, 0, 1, 2, 0, 0]])
    moved = given.run({}, (tf.zeros((2, 6, 5), tf.float64), position), layer_cases.context())
    np.testing.assert_array_equal(moved, tf.gather(found[0], position))


def test_embedding_scales_by_the_root_of_its_width() -> None:
    params = layers.Embedding.Params(vocabulary=7, units=9, scale=True)
    theta, _ = layer_cases.create_variables(layer_cases.meta_of(params, IDS))
    ids = layer_cases.draw([IDS])[0]
    found = params.instantiate().run(theta, ids, layer_cases.context())
    np.testing.assert_allclose(found, 3.0 * tf.gather(theta["table"], ids), rtol=1e-6)


def softmax_run(params: Any, *inputs: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return logits, what was collected and the Meta of a softmax head."""
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    meta = layer_cases.meta_of(params, *specs)
    theta, _ = layer_cases.create_variables(meta)
    ctx = layer_cases.context()
    logits = params.instantiate().run(theta, layer_cases.as_read(inputs), ctx)
    return logits, ctx.collected.as_nest(), meta


def test_softmax_loss_and_metrics_are_keras_own() -> None:
    rng = np.random.default_rng(0)
    x, label = tf.constant(rng.normal(size=(40, 6))), tf.constant(rng.integers(0, 5, 40))
    params = layers.Softmax.Params(classes=5, label_smoothing=0.2, top_k=3, dtype=DTYPE)
    logits, collected, meta = softmax_run(params, x, label)
    loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.2, reduction="sum")
    np.testing.assert_allclose(
        collected["losses"]["loss"], loss(tf.one_hot(label, 5, dtype=tf.float64), logits), rtol=1e-7
    )
    results = {m.name: m.finish(collected["sums"][m.name]) for m in meta.metrics}
    hits = keras.metrics.sparse_categorical_accuracy(label, logits)
    top3 = keras.metrics.sparse_top_k_categorical_accuracy(label, tf.cast(logits, tf.float32), 3)
    np.testing.assert_allclose(results["accuracy"], np.mean(hits))
    np.testing.assert_allclose(results["top3"], np.mean(top3))
    assert 0 < results["accuracy"] < results["top3"] < 1


def test_softmax_counts_weighted_labels_alone() -> None:
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(3, 4, 6)), rng.integers(0, 5, (3, 4))
    weights = np.array([[1.0, 1, 0.5, 0], [1, 0, 0, 0], [2, 1, 1, 1]])
    # Where the weight is 0 the label may be anything.
    label[weights == 0] = 99
    params = layers.SequenceSoftmax.Params(
        vocabulary=5, reads=("x", "label", "weights"), metric_prefix="aux/", dtype=DTYPE
    )
    given = tf.constant(x), tf.constant(label), tf.constant(weights)
    logits, collected, meta = softmax_run(params, *given)
    each = [
        (
            weights[place],
            -tf.nn.log_softmax(logits)[place][label[place]].numpy(),
            np.argmax(logits[place]) == label[place],
        )
        for place in zip(*np.nonzero(weights), strict=True)
    ]
    np.testing.assert_allclose(collected["losses"]["loss"], sum(w * nll for w, nll, _ in each))
    results = {m.name: m.finish(collected["sums"][m.name]) for m in meta.metrics}
    total = weights.sum()
    np.testing.assert_allclose(results["aux/accuracy"], sum(w * hit for w, _, hit in each) / total)
    np.testing.assert_allclose(
        results["aux/log_perplexity"], sum(w * nll for w, nll, _ in each) / total
    )
    fields = {"label": given[1], "weights": given[2]}
    np.testing.assert_allclose(meta.losses[0].weight(fields), total)


def test_nan_logits_are_no_hits() -> None:
    params = layers.Softmax.Params(classes=5, top_k=2)
    label = tf.constant([0, 1, 0])
    _, collected, _ = softmax_run(params, tf.fill((3, 4), float("nan")), label)
    assert collected["sums"]["top2"]["total"] == 0


def test_mean_squared_error_is_keras_own() -> None:
    rng = np.random.default_rng(0)
    x, target = tf.constant(rng.normal(size=(6, 3, 2))), tf.constant(rng.normal(size=(6, 3, 2)))
    _, collected, meta = softmax_run(layers.MeanSquaredError.Params(dtype=DTYPE), x, target)
    weight = meta.losses[0].weight({"target": target})
    assert weight == 6
    expected = keras.losses.MeanSquaredError()(target, x)
    np.testing.assert_allclose(collected["losses"]["loss"] / weight, expected, rtol=1e-7)


def test_an_auxiliary_loss_by_hand() -> None:
    x = tf.constant([[1.0, -3.0], [0.0, 2.0], [1.0, 1.0]])
    params = layers.AuxiliaryLoss.Params(loss_name="small", coefficient=0.5)
    same, collected, meta = softmax_run(params, x)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(collected["losses"]["small"], (10 + 4 + 2) / 2)
    assert meta.losses[0].coefficient == 0.5
    assert meta.losses[0].weight({"label": tf.zeros((3, 9))}) == 3


def test_a_loss_weighted_by_no_field_says_so() -> None:
    weight = weight_by("lable", tf.float32)
    with pytest.raises(
        errors.LayerError, match=r"'lable', which is not a field .* nearest 'label'"
    ):
        weight({"label": tf.zeros(3), "image": tf.zeros(3)})
