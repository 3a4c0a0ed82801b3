"""Under the caller's own tape: gradients of the plain network, contexts, outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from tests.networks import pipelines


class Both(base.Layer):
    """x → {"low": x[..., :2], "rest": (x[..., 2:], rounded int32)}."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            size, depth = inputs[0].shape
            dtype = inputs[0].dtype
            rest = (tf.TensorSpec([size, depth - 2], dtype), tf.TensorSpec([size], tf.int32))
            return base.Meta({"low": tf.TensorSpec([size, 2], dtype), "rest": rest})

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta, ctx
        rounded = tf.cast(tf.reduce_sum(inputs, -1) * 100, tf.int32)
        return {"low": inputs[..., :2], "rest": (inputs[..., 2:], rounded)}


@pytest.mark.parametrize(
    ("recompute", "traced"), [("full", True), ("except_last", False), ("never", True)]
)
def test_gradients_by_weights_and_inputs_are_the_plain_ones(recompute: str, traced: bool) -> None:
    own = pipelines.three(recompute=recompute)
    own.build(pipelines.batch())
    x, target = pipelines.batch()["x"], pipelines.batch()["target"]

    def gradients(compute: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            # The caller's loss, not the network's; the input is also used outside the pipeline.
            loss = tf.reduce_sum(tf.square(compute() - target) * 3.0) + tf.reduce_sum(x * x)
        return tape.gradient(loss, {**own.weights, "input": x})

    def run() -> Any:
        return gradients(lambda: own({"x": x, "target": target}, training=True))

    got = tf.function(run)() if traced else run()
    pipelines.close(got, gradients(lambda: pipelines.plain(own.by_path, x)))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("recompute", "traced"), [("full", True), ("never", False)])
def test_a_persistent_tape_and_several_losses_of_one_forward(
    recompute: str, traced: bool, num_replicas: int
) -> None:
    """The micro-batches have 3, 3 and 2 examples."""
    own = pipelines.three(recompute=recompute, num_micro_batches=3, num_replicas=num_replicas)
    own.build(pipelines.batch())
    x, target = pipelines.batch()["x"], pipelines.batch()["target"]
    wanted_by = {**own.weights, "input": x, "target": target}

    def gradients(compute: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, target])
            outputs, error = compute()
            losses = [error, tf.reduce_sum(outputs * outputs), error * tf.reduce_sum(outputs)]
        zero = tf.UnconnectedGradients.ZERO
        found = [tape.gradient(loss, wanted_by, unconnected_gradients=zero) for loss in losses]
        return [*found, tape.gradient(losses[0], wanted_by, unconnected_gradients=zero)]

    def pipelined() -> Any:
        ctx = own.context(training=True)
        return own({"x": x, "target": target}, ctx=ctx), ctx.collected.losses["loss"]

    def plain() -> Any:
        loss = pipelines.N * pipelines.plain_loss(own.by_path, {"x": x, "target": target})
        return pipelines.plain(own.by_path, x), loss

    got = tf.function(gradients, autograph=False)(pipelined) if traced else gradients(pipelined)
    for found, wanted in zip(got, gradients(plain), strict=True):
        pipelines.close(found, wanted)


def test_a_tape_around_a_function_that_calls_the_pipeline() -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    weights = list(own.weights.values())
    forward = tf.function(lambda fields: tf.reduce_sum(own(fields, training=True)))
    with tf.GradientTape() as tape:
        loss = forward(pipelines.batch())
    got = tape.gradient(loss, weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(pipelines.plain(own.by_path, pipelines.batch()["x"]))
    for found, wanted in zip(got, tape.gradient(loss, weights), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("by", ["weights", "factor"])
def test_second_derivatives_are_refused(traced: bool, by: str) -> None:
    own, factor = pipelines.three(), tf.constant(2.0, tf.float64)
    own.build(pipelines.batch())
    weights = list(own.weights.values())

    def second() -> Any:
        with tf.GradientTape() as outer:
            outer.watch(factor)
            with tf.GradientTape() as inner:
                loss = factor * tf.reduce_sum(own(pipelines.batch(), training=True))
            first = inner.gradient(loss, weights)
            total = tf.add_n([tf.reduce_sum(tf.square(g)) for g in first])
        return outer.gradient(total, weights if by == "weights" else factor)

    with pytest.raises(errors.LayerError, match="a pipeline has no second derivatives"):
        (tf.function(second, autograph=False) if traced else second)()


@pytest.mark.parametrize("traced", [False, True])
def test_a_penalty_on_the_gradient_by_the_input_is_refused(traced: bool) -> None:
    own, batch = pipelines.three(), pipelines.batch()
    own.build(batch)

    def second() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(batch["x"])
                loss = tf.reduce_sum(own(batch, training=True))
            total = loss + tf.reduce_sum(tf.square(inner.gradient(loss, batch["x"])))
        return outer.gradient(total, own.weights)

    with pytest.raises(errors.LayerError, match="a pipeline has no second derivatives"):
        (tf.function(second, autograph=False) if traced else second)()


def test_an_input_of_integers_alone_before_a_frozen_cell() -> None:
    own = pipelines.pipe(
        [
            layers.Embedding.Params(name="emb", vocabulary=7, units=3, reads=("ids",)),
            pipelines.dense("d", 2),
        ],
        num_partitions=2,
        cuts=(1, 1),
        frozen=("emb/*",),
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own({"ids": tf.constant([3, 1])}, training=True))
    gradients = tape.gradient(loss, own.by_path)
    assert gradients["emb/table"] is None
    assert float(tf.reduce_sum(tf.abs(gradients["d/kernel"]))) > 0


def test_gradients_flow_in_evaluation_mode_too() -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own(pipelines.batch(), training=False))
    got = tape.gradient(loss, own.weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(pipelines.plain(own.by_path, pipelines.batch()["x"]))
    pipelines.close(got, tape.gradient(loss, own.weights))


def test_several_and_nested_outputs() -> None:
    given = [
        pipelines.dense("a", 4, writes=("a",)),
        pipelines.dense("b", 6, reads=("a",)),
        layers.Activation.Params(name="bent", activation="tanh", reads=("gain",), writes=("bent",)),
        Both.Params(writes=("y",)),
    ]
    fields = {"x": pipelines.batch()["x"], "gain": pipelines.data(pipelines.N, 2, seed=5)}
    own = pipelines.pipe(
        given,
        num_partitions=3,
        num_micro_batches=3,
        outputs=("y", "a", "gain", "bent"),
    )
    own.build(fields)
    weights = own.by_path

    def compute() -> Any:
        a = tf.tanh(tf.matmul(fields["x"], weights["a/kernel"]) + weights["a/bias"])
        return a, tf.tanh(tf.matmul(a, weights["b/kernel"]) + weights["b/bias"])

    with tf.GradientTape(persistent=True) as tape:
        got = own(fields, training=True)
        a, b = compute()
        ours = tf.reduce_sum(got["y"]["rest"][0]) + tf.reduce_sum(tf.square(got["a"]))
        theirs = tf.reduce_sum(b[:, 2:]) + tf.reduce_sum(tf.square(a))
    assert list(got) == ["y", "a", "gain", "bent"]
    np.testing.assert_allclose(got["a"], a, rtol=1e-12)
    np.testing.assert_allclose(got["y"]["low"], b[:, :2], rtol=1e-12)
    assert got["y"]["rest"][1].shape == [pipelines.N]
    np.testing.assert_array_equal(got["gain"], fields["gain"])
    np.testing.assert_allclose(got["bent"], tf.tanh(fields["gain"]), rtol=1e-12)
    pipelines.close(tape.gradient(ours, own.weights), tape.gradient(theirs, own.weights))


def test_numpy_and_a_value_alone_are_taken() -> None:
    own = pipelines.pipe(
        [pipelines.dense("a", 4), pipelines.dense("b", 3)], num_partitions=2, num_micro_batches=2
    )
    x = pipelines.batch()["x"]
    wanted = own(x)
    np.testing.assert_array_equal(own(x.numpy()), wanted)
    np.testing.assert_array_equal(own({"x": x.numpy()}), wanted)


@pytest.mark.parametrize(
    "last",
    [layers.MeanSquaredError.Params(name="error"), layers.BatchNorm.Params(name="norm")],
)
def test_a_context_used_twice_is_refused(last: Any) -> None:
    own, fields = pipelines.pipe([pipelines.dense("a", 3), last]), pipelines.batch()
    own.build(fields)
    ctx = own.context(training=True)
    own(fields, ctx=ctx)
    with pytest.raises(errors.LayerError, match="this context has collected losses, metrics or "):
        own(fields, ctx=ctx)


def test_both_code_paths_work_in_a_callers_function_that_builds() -> None:
    one, other = pipelines.three(), pipelines.three()
    loss = tf.function(lambda fields: one.value_and_gradients(fields).loss)(pipelines.batch())
    outputs = tf.function(lambda fields: other(fields, training=True))(pipelines.batch())
    np.testing.assert_allclose(
        loss, pipelines.plain_loss(one.by_path, pipelines.batch()), rtol=1e-12
    )
    np.testing.assert_allclose(
        outputs, pipelines.plain(one.by_path, pipelines.batch()["x"]), rtol=1e-12
    )
