"""A single Keras layer in a pipeline: values, variables, randomness and losses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors, hyperparams, pipelining
from lingvo_gpipe.keras_layers import adapter, trace, variables
from lingvo_gpipe.keras_layers.live import Live
from tests.lingvo_gpipe.keras_layers import keras_runs

hyperparams.register_package(__name__)

IMAGE, ROWS, VECTORS = (2, 9, 9, 4), (2, 5, 4), (6, 4)
CASES: list[tuple[str, Any, tuple[int, ...]]] = [
    ("dense", lambda: layers.Dense(5, activation="gelu"), VECTORS),
    ("convolution", lambda: layers.Conv2D(5, 3, strides=2, padding="same"), IMAGE),
    ("transposed", lambda: layers.Conv2DTranspose(3, 3, strides=2), IMAGE),
    ("separable", lambda: layers.SeparableConv2D(5, 3), IMAGE),
    ("layer norm", lambda: layers.LayerNormalization(), VECTORS),
    ("group norm", lambda: layers.GroupNormalization(2), IMAGE),
    ("batch norm", lambda: layers.BatchNormalization(), IMAGE),
    ("gru", lambda: layers.GRU(3, return_sequences=True), ROWS),
    ("both ways", lambda: layers.Bidirectional(layers.LSTM(3)), ROWS),
    ("each step", lambda: layers.TimeDistributed(layers.Dense(3)), ROWS),
    ("pooling", lambda: layers.MaxPooling2D(), IMAGE),
    ("prelu", lambda: layers.PReLU(alpha_initializer="ones"), VECTORS),
    ("normalization", lambda: layers.Normalization(mean=1.0, variance=4.0), VECTORS),
]


@pytest.mark.parametrize(("make", "shape"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_layer_keeps_its_weights_and_outputs(make: Any, shape: tuple[int, ...]) -> None:
    live = make()
    x = keras_runs.random(*shape)
    live(x)
    for number, variable in enumerate(live.weights):
        variable.assign(tf.abs(keras_runs.random(*variable.shape, seed=number)) * 0.3)
    outputs, ctx, meta = keras_runs.run(adapter.from_keras(live), x)
    np.testing.assert_allclose(outputs, live(x), rtol=1e-6, atol=1e-6)
    assert outputs.shape == meta.outputs.shape
    assert sum(v.size for v in meta.variables) == live.count_params()
    assert not ctx.collected.moments


@pytest.mark.parametrize(("make", "shape"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_params_go_to_text_and_back(make: Any, shape: tuple[int, ...]) -> None:
    params: Any = adapter.from_keras(make())
    again: Any = hyperparams.from_text(params.to_text())
    assert again == params
    one = params.fprop_meta(keras_runs.spec(*shape))
    other = again.fprop_meta(keras_runs.spec(*shape))
    assert [v.path for v in one.variables] == [v.path for v in other.variables]
    x = keras_runs.random(*shape)
    assert np.array_equal(keras_runs.run(params, x)[0], keras_runs.run(again, x)[0])


def test_a_layer_is_traced_for_batches_of_unknown_size() -> None:
    """An export may be the first in its process to trace the layer, with an unknown batch size."""
    params = adapter.from_keras(layers.Dense(7, name="traced_here_alone"))
    traced = trace.known(params, [tf.TensorSpec([None, 4])])
    assert traced.outputs.shape == [1, 7]
    with pytest.raises(errors.LayerError, match=r"an input of shape \(1, None\)"):
        trace.known(params, [tf.TensorSpec([None, None])])


def test_float64_policy_replaces_the_layers_own() -> None:
    live = layers.Dense(3)
    live(keras_runs.random(2, 4))
    params = adapter.from_keras(live).set(dtype="float64")
    x = keras_runs.random(2, 4, dtype="float64")
    outputs, _, meta = keras_runs.run(params, x)
    assert {v.dtype for v in meta.variables} == {tf.float64}
    expected = x.numpy() @ live.kernel.numpy().astype("float64") + live.bias.numpy()
    np.testing.assert_allclose(outputs, expected, rtol=1e-14, atol=1e-15)


def test_mixed_policy_computes_in_bfloat16_and_declares_float32() -> None:
    params = adapter.from_keras(layers.Dense(3)).set(dtype="mixed_bfloat16")
    meta = params.fprop_meta(keras_runs.spec(2, 4, dtype=tf.bfloat16))
    assert {v.dtype for v in meta.variables} == {tf.float32}
    assert meta.outputs.dtype == tf.bfloat16


def test_a_layer_with_a_policy_of_its_own_keeps_it() -> None:
    assert adapter.from_keras(layers.Dense(3)).dtype is None
    assert adapter.from_keras(layers.Dense(3, dtype="float64")).dtype == "float64"


class Wide(layers.Layer):
    def __init__(self, width: int) -> None:
        def doubled(x: Any) -> Any:
            return x * 2

        super().__init__()
        self.inner = layers.Dense(width, activation=doubled)
        self.norm = layers.LayerNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(self.inner(x))


def test_equal_layers_of_a_user_have_one_structure() -> None:
    found = []
    for width in (4, 4, 5):
        live = Wide(width)
        live(keras_runs.random(*VECTORS))
        found.append(Live(live, "block").structure)
    assert found[0] == found[1] is not None
    assert found[0] != found[2]


class Scale(layers.Layer):
    """Does not record its name."""

    def __init__(self, factor: float, dtype: Any = None) -> None:
        super().__init__(dtype=dtype)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {"factor": self.factor, "dtype": super().get_config()["dtype"]}


def test_a_model_as_one_layer_takes_its_policy() -> None:
    live = keras.Sequential([keras.Input((3,)), layers.Dense(2), Scale(2.0), Scale(3.0)])
    params = adapter.from_keras(live).set(dtype="float64")
    assert params.from_text(params.to_text()) == params
    x = keras_runs.random(2, 3, dtype="float64")
    outputs = keras_runs.run(params, x)[0]
    assert outputs.dtype == tf.float64
    np.testing.assert_allclose(outputs, live(x), rtol=1e-5, atol=1e-5)


def test_a_layer_that_does_not_record_its_name_has_it_in_the_params() -> None:
    params = adapter.from_keras(Scale(2.0), name="mine")
    assert params.name == "mine"
    np.testing.assert_array_equal(keras_runs.run(params, tf.ones([1, 2]))[0], [[2, 2]])


def test_an_operation_without_a_gradient_has_no_backward() -> None:
    params = adapter.from_keras(layers.Lambda(lambda x: tf.image.adjust_contrast(x, 2.0)))
    meta = params.fprop_meta(keras_runs.spec(2, 4, 4, 3))
    assert meta.flops_forward > 0
    assert meta.flops_backward == 0


def test_attention_takes_two_names() -> None:
    live = layers.MultiHeadAttention(2, 3)
    query, value = keras_runs.random(2, 5, 4), keras_runs.random(2, 6, 4, seed=1)
    live(query, value)
    params = adapter.from_keras(live, reads=("query", "value"))
    outputs, _, meta = keras_runs.run(params, query, value)
    np.testing.assert_allclose(outputs, live(query, value), atol=1e-6)
    assert [v.path for v in meta.variables][:3] == ["query/kernel", "query/bias", "key/kernel"]
    assert [v.group for v in meta.variables][:2] == ["kernel", "bias"]


def test_merging_layers_take_names_in_one_list() -> None:
    params = adapter.from_keras(layers.Concatenate(), reads=("a", "b"))
    outputs, _, _ = keras_runs.run(params, keras_runs.random(2, 3), keras_runs.random(2, 4))
    assert outputs.shape == (2, 7)


def test_several_outputs_go_to_several_names_or_to_one() -> None:
    live = layers.LSTM(3, return_state=True)
    x = keras_runs.random(2, 5, 4)
    expected = live(x)
    outputs, _, _ = keras_runs.run(adapter.from_keras(live, writes=("y", "h", "c")), x)
    assert isinstance(outputs, tuple)
    tf.nest.map_structure(np.testing.assert_array_equal, list(outputs), list(expected))
    whole, _, _ = keras_runs.run(adapter.from_keras(live), x)
    assert len(tf.nest.flatten(whole)) == 3
    picked = adapter.from_keras(live, writes=("c",)).set(picks=(2,))
    np.testing.assert_array_equal(keras_runs.run(picked, x)[0], expected[2])
    assert "returns 3 tensors, but writes 2 names (y, h). Name one for each" in keras_runs.refused(
        adapter.from_keras(live, writes=("y", "h")), keras_runs.spec(2, 5, 4)
    )


class Block(layers.Layer):
    """Has sublayers in attributes and lists, without names."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units)
        self.rest = [layers.Dense(units), layers.Dense(units)]
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.drop = layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        for dense in (self.first, *self.rest):
            x = dense(x)
        return self.drop(self.norm(x))


def test_variables_are_named_by_attributes_whatever_keras_counted() -> None:
    keras.backend.clear_session()  # the first names have no number
    for _ in range(2):
        params = adapter.from_keras(Block(4), name="block")
        meta = params.fprop_meta(keras_runs.spec(2, 3))
        assert [v.path for v in meta.variables] == [
            "first/kernel",
            "first/bias",
            "rest_0/kernel",
            "rest_0/bias",
            "rest_1/kernel",
            "rest_1/bias",
            "norm/gamma",
            "norm/beta",
            "norm/moving_mean",
            "norm/moving_variance",
        ]
        assert [v.is_state for v in meta.variables] == [False] * 8 + [True] * 2
        assert params.from_text(params.to_text()) == params


def test_a_layer_of_the_first_of_their_kind_keeps_its_weights() -> None:
    keras.backend.clear_session()
    for make in (lambda: Block(4), lambda: layers.Bidirectional(layers.LSTM(2))):
        live = make()
        live(tf.ones([2, 3, 5]))
        params = adapter.from_keras(live)
        meta = params.fprop_meta(keras_runs.spec(2, 3, 5))
        assert sorted(v.path for v in meta.variables) == sorted(variables.find(live).weights)
        again = adapter.from_keras(make(), name=params.name)
        found = again.fprop_meta(keras_runs.spec(2, 3, 5))
        assert [v.path for v in found.variables] == [v.path for v in meta.variables]


class Unnamed(layers.Layer):
    """Makes a variable of an array, some without a name, and two of one name; shares a sublayer."""

    def build(self, shape: Any) -> None:
        self.offset = keras.Variable(np.array([1.0, 2.0, 3.0], "float32"))
        self.scale = self.add_weight(shape=shape[-1:])
        self.one = self.add_weight(shape=shape[-1:], name="same")
        self.other = self.add_weight(shape=shape[-1:], name="same")
        self.dense = layers.Dense(3, use_bias=False)
        self.again = layers.TimeDistributed(self.dense)

    def call(self, x: Any) -> Any:
        mixed = self.again(self.dense(x)[:, None])[:, 0]
        return self.offset + 0.0 * mixed * self.scale * self.one * self.other


def test_variables_without_a_name_of_their_own_get_one() -> None:
    params = adapter.from_keras(Unnamed(), keep_weights=False)
    outputs, _, meta = keras_runs.run(params, tf.ones([1, 3]))
    paths = [variable.path for variable in meta.variables]
    assert paths == ["offset", "scale", "same", "same_1", "dense/kernel"]
    np.testing.assert_array_equal(outputs, [[1, 2, 3]])


def test_fresh_weights_depend_only_on_seed_and_path() -> None:
    params = adapter.from_keras(Block(4), name="block")
    meta = params.fprop_meta(keras_runs.spec(2, 4))
    first, again = keras_runs.nest(meta, is_state=False), keras_runs.nest(meta, is_state=False)
    tf.nest.map_structure(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["rest_0"]["kernel"], first["rest_1"]["kernel"])
    other = keras_runs.nest(meta, is_state=False, seed=2)
    assert not np.array_equal(first["first"]["kernel"], other["first"]["kernel"])
    limit = np.sqrt(6 / 8)
    assert 0.5 * limit < np.abs(first["first"]["kernel"]).max() <= limit


def test_describing_makes_no_variable_and_leaves_none_waiting() -> None:
    from keras.src.backend.common import global_state

    before = list(global_state.get_global_attribute("uninitialized_variables") or ())
    params = adapter.from_keras(layers.Dense(100_000))
    meta = params.fprop_meta(keras_runs.spec(1, 100_000))
    assert meta.variables[0].size_bytes == 40_000_000_000
    assert list(global_state.get_global_attribute("uninitialized_variables") or ()) == before


def test_flops_of_products_are_counted() -> None:
    params = adapter.from_keras(layers.Conv2D(5, 3, use_bias=False))
    meta = params.fprop_meta(keras_runs.spec(2, 9, 9, 4))
    assert meta.flops_forward == 2 * (2 * 7 * 7 * 5) * (3 * 3 * 4)
    assert meta.flops_backward == 2 * meta.flops_forward
    lstm = adapter.from_keras(layers.LSTM(3, use_bias=False))
    products = 5 * 2 * 2 * (4 * 12 + 3 * 12)
    flops = lstm.fprop_meta(keras_runs.spec(2, 5, 4)).flops_forward
    assert products < flops < 2 * products


# --- Randomness -------------------------------------------------------------------------------


def test_dropout_draws_by_seed_step_and_path() -> None:
    params = adapter.from_keras(layers.Dropout(0.5))
    x = tf.ones([64, 64])
    one = keras_runs.run(params, x, training=True, step=3)[0]
    assert 0.4 < np.mean(one == 0) < 0.6
    assert np.array_equal(one, keras_runs.run(params, x, training=True, step=3)[0])
    assert not np.array_equal(one, keras_runs.run(params, x, training=True, step=4)[0])
    assert not np.array_equal(
        one, keras_runs.run(params, x, training=True, step=3, path="other")[0]
    )
    assert np.array_equal(keras_runs.run(params, x, training=False, step=3)[0], x)


class TwoDropouts(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.one = layers.Dropout(0.5, seed=1)
        self.two = layers.Dropout(0.5, seed=1)

    def call(self, x: Any) -> Any:
        return keras.ops.stack([self.one(x), self.two(x)])


def test_two_dropouts_of_one_layer_draw_apart() -> None:
    one, two = keras_runs.run(adapter.from_keras(TwoDropouts()), tf.ones([64, 64]), training=True)[
        0
    ]
    assert np.mean(one == two) < 0.6


# --- Batch norm -------------------------------------------------------------------------------


def test_unequal_masked_micro_batches_merge_to_the_whole() -> None:
    x = keras_runs.random(7, 5, 4, dtype="float64") + 30.0
    mask = keras_runs.random(7, 5, seed=5) > 0
    params = adapter.from_keras(
        layers.BatchNormalization(momentum=0.9), reads=("x", "mask"), masks={"x": "mask"}
    ).set(dtype="float64")
    meta = params.fprop_meta(
        keras_runs.spec(7, 5, 4, dtype=tf.float64), keras_runs.spec(7, 5, dtype=tf.bool)
    )
    state, layer = keras_runs.nest(meta, is_state=True), params.instantiate()
    parts = []
    for start, end in ((0, 4), (4, 6), (6, 7)):
        ctx = keras_runs.context(state, training=True)
        inputs = (x[start:end], mask[start:end])
        layer.fprop(keras_runs.nest(meta, is_state=False), inputs, ctx)
        parts.append(ctx.collected.moments["layer"])
    added = tf.nest.map_structure(lambda *sums: tf.add_n(sums), *parts)
    new = layer.merge_moments(state, added)
    rows = x.numpy()[mask.numpy()]
    np.testing.assert_allclose(new["moving_mean"], 0.1 * rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(new["moving_variance"], 0.9 + 0.1 * rows.var(0), rtol=1e-6)


def test_a_wholly_masked_batch_moves_nothing() -> None:
    params = adapter.from_keras(
        layers.BatchNormalization(), reads=("x", "mask"), masks={"x": "mask"}
    )
    _, ctx, meta = keras_runs.run(
        params, keras_runs.random(2, 5, 4), tf.fill([2, 5], False), training=True
    )
    state = keras_runs.nest(meta, is_state=True)
    layer = params.instantiate()
    layer.fprop(
        keras_runs.nest(meta, is_state=False),
        (keras_runs.random(2, 5, 4), tf.fill([2, 5], False)),
        keras_runs.context(state, training=True),
    )
    new = layer.merge_moments(state, ctx.collected.moments["layer"])
    tf.nest.map_structure(np.testing.assert_array_equal, new, state)


def test_nested_batch_norm_gives_moments_by_its_path() -> None:
    params = adapter.from_keras(Block(4), name="block")
    meta = params.fprop_meta(keras_runs.spec(8, 3))
    state, layer = keras_runs.nest(meta, is_state=True), params.instantiate()
    ctx = keras_runs.context(state, training=True)
    layer.fprop(keras_runs.nest(meta, is_state=False), keras_runs.random(8, 3), ctx)
    assert list(ctx.collected.moments) == ["layer/norm"]
    moments = ctx.collected.moments["layer/norm"]
    new = layer.find("norm").merge_moments(state["norm"], moments)
    mean = moments["sum"] / moments["count"]
    np.testing.assert_allclose(new["moving_mean"], 0.2 * mean, rtol=1e-6)


@pytest.mark.parametrize("how", ["params", "context", "keras", "sublayer"])
def test_a_frozen_batch_norm_uses_its_moving_statistics(how: str) -> None:
    live = Block(4)
    live(keras_runs.random(2, 3))
    live.norm.moving_mean.assign(keras_runs.random(4))
    live.drop.rate = 0.0
    if how == "keras":
        live.trainable = False
    if how == "sublayer":
        live.norm.trainable = False
    params = adapter.from_keras(live)
    if how == "params":
        params.trainable = False
    frozen = frozenset({"layer/norm"}) if how == "context" else frozenset()
    x = keras_runs.random(6, 3)
    outputs, ctx, meta = keras_runs.run(params, x, training=True, frozen=frozen)
    assert not ctx.collected.moments
    np.testing.assert_allclose(outputs, live(x, training=False), rtol=1e-5)
    trained = [v.path for v in meta.variables if v.trainable]
    assert len(trained) == {"params": 0, "context": 8, "keras": 0, "sublayer": 6}[how]


# --- Losses -----------------------------------------------------------------------------------


def test_losses_of_keras_count_once_over_unequal_micro_batches() -> None:
    live = layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer="l1",
        bias_regularizer="l1",
        bias_initializer="ones",
    )
    x = keras_runs.random(7, 4)
    live(x)
    expected = {
        "d/regularization": 0.1 * np.sum(live.kernel.numpy() ** 2) + 0.01 * 3,
        "d/activity": 0.01 * np.abs(live(x)).sum() / 7,
    }
    params = adapter.from_keras(live, name="d")
    params.examples = "x"
    sums: dict[str, float] = {}
    for part in (x[:4], x[4:]):
        _, ctx, meta = keras_runs.run(params, part, training=True)
        for name, total in ctx.collected.losses.items():
            sums[name] = sums.get(name, 0.0) + float(total)
    assert [loss.name for loss in meta.losses] == list(expected)
    for loss in meta.losses:
        weight = float(loss.weight({"label": tf.zeros([3]), "x": x}))
        assert weight == 7
        assert sums[loss.name] / weight * loss.coefficient == pytest.approx(expected[loss.name])


def test_a_tied_or_frozen_weight_has_no_penalty_of_its_own() -> None:
    for change in ({"tie": {"kernel": "other/kernel"}}, {"trainable": False}):
        params = adapter.from_keras(layers.Dense(3, kernel_regularizer="l2"))
        params.set(**change)
        assert not params.fprop_meta(keras_runs.spec(2, 4)).losses


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_penalty_counts_once(num_micro_batches: int) -> None:
    live = layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1))
    x = keras_runs.random(6, 4, 3)
    live(x)
    pipe = pipelining.PipeliningLayer.Params(
        layers=[adapter.from_keras(live, name="d")],
        num_micro_batches=num_micro_batches,
    ).instantiate()
    found = pipe.evaluate({"x": x}).losses["d/regularization"]
    np.testing.assert_allclose(found, 0.1 * np.sum(live.kernel.numpy() ** 2), rtol=1e-6)


class OwnLoss(layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(keras.ops.mean(x))
        return x


def test_a_training_only_loss_is_zero_in_evaluation() -> None:
    params = adapter.from_keras(OwnLoss(), name="own")
    x = keras_runs.random(5, 3)
    _, ctx, meta = keras_runs.run(params, x, training=True)
    np.testing.assert_allclose(ctx.collected.losses["own/activity"], 5 * np.mean(x), rtol=1e-5)
    assert [loss.name for loss in meta.losses] == ["own/activity"]
    assert keras_runs.run(params, x)[1].collected.losses["own/activity"] == 0


# --- Masks ------------------------------------------------------------------------------------


def test_a_mask_travels_by_its_own_name() -> None:
    words = tf.constant([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]])
    embedding, lstm = layers.Embedding(5, 4, mask_zero=True), layers.LSTM(3)
    expected = lstm(embedding(words))
    first = adapter.from_keras(
        embedding, reads=("words",), writes=("x", "mask"), masks={"x": "mask"}
    )
    second = adapter.from_keras(lstm, reads=("x", "mask"), masks={"x": "mask"})
    (x, mask), _, meta = keras_runs.run(first, words)
    assert mask.dtype == tf.bool
    assert meta.outputs[1] == keras_runs.spec(3, 4, dtype=tf.bool)
    outputs, _, _ = keras_runs.run(second, x, mask)
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    without, _, _ = keras_runs.run(adapter.from_keras(lstm), x)
    assert np.abs(without - expected).max() > 1e-3
    assert not hasattr(x, "_keras_mask")


def test_a_mask_that_is_not_there_is_named() -> None:
    params = adapter.from_keras(layers.Dense(3), writes=("x", "m"), masks={"x": "m"})
    assert "returns no Keras mask with 'x', but writes one as 'm'" in keras_runs.refused(
        params, keras_runs.spec(2, 4)
    )
