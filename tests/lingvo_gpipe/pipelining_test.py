"""PipeliningLayer: evaluation, traces, precision, randomness, errors, params."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, pipelining
from lingvo_gpipe.layers import base
from lingvo_gpipe.plan import describe, step_plan
from tests.networks import pipelines

TWO_CELLS_ON_A_DEVICE = "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0"


@pytest.mark.parametrize(
    "fields",
    [{"num_partitions": 3}, {"num_partitions": 2, "schedule": TWO_CELLS_ON_A_DEVICE}],
)
def test_evaluation_is_a_plain_forward_before_between_and_after_training(fields: Any) -> None:
    own = pipelines.pipe(num_micro_batches=2, **fields)
    sizes: Iterable[int] = (8, 3, 5, 1, 8)
    for step, examples in enumerate(sizes):
        fields = pipelines.batch(examples)
        result = own.evaluate(fields, outputs=True)
        outputs = pipelines.plain(own.by_path, fields["x"])
        np.testing.assert_allclose(result.outputs["x"], outputs, rtol=1e-12)
        np.testing.assert_allclose(
            result.loss, pipelines.plain_loss(own.by_path, fields), rtol=1e-12
        )
        np.testing.assert_allclose(own(fields), outputs, rtol=1e-12)
        for path, gradient in own.value_and_gradients(
            pipelines.batch(), step=step
        ).gradients.items():
            weight = own.weights[path]
            weight.assign(weight.read_value() - 0.1 * gradient)


def test_evaluation_has_no_randomness_and_uses_moving_statistics() -> None:
    own = pipelines.three(
        layers=pipelines.mlp(layers.BatchNorm.Params(), layers.Dropout.Params(rate=0.5)), cuts=None
    )
    first = own.evaluate(pipelines.batch(), step=1, outputs=True).outputs["x"]
    other = own.evaluate(pipelines.batch(), step=2, outputs=True)
    np.testing.assert_array_equal(first, other.outputs["x"])
    (mean,) = (v for path, v in own.by_path.items() if path.endswith("moving_mean"))
    mean.assign(mean.read_value() + 1.0)
    moved = own.evaluate(pipelines.batch(), step=2, outputs=True).outputs["x"]
    assert np.abs(moved - first).max() > 0.01
    assert not other.moments
    assert not other.gradients


def test_a_tables_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("0F0,0F1,0B1,0B0")
    own = pipelines.pipe(num_micro_batches=2, schedule=f"@{file}")
    own.build(pipelines.batch())
    file.unlink()
    for examples in (8, 6):
        own.value_and_gradients(pipelines.batch(examples))


def test_equal_shapes_are_traced_once_and_new_ones_once_each() -> None:
    own = pipelines.three()
    own.value_and_gradients(pipelines.batch(), step=0)
    first = pipelines.trace_counts(own)
    # Forward and backward in each cell, and the last one's fused program; one outer function.
    assert first == {"programs": 7, "functions": 1}
    for step in range(1, 4):
        own.value_and_gradients(pipelines.batch(), step=step)
    assert pipelines.trace_counts(own) == first
    own.value_and_gradients(pipelines.batch(4))  # micro-batches of one example
    other = pipelines.trace_counts(own)
    assert other == {"programs": 14, "functions": 2}
    own.value_and_gradients(pipelines.batch(6), step=9)  # of two and of one: both known
    assert pipelines.trace_counts(own) == {"programs": 14, "functions": 3}
    own.evaluate(pipelines.batch())
    assert pipelines.trace_counts(own) == {"programs": 17, "functions": 4}
    own.evaluate(pipelines.batch())
    own.value_and_gradients(pipelines.batch(4), step=tf.constant(7))
    assert pipelines.trace_counts(own) == {"programs": 17, "functions": 4}


def test_fewer_examples_than_micro_batches_lower_their_number_and_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    with caplog.at_level(logging.WARNING):
        result = own.value_and_gradients(pipelines.batch(3))
    assert result.num_micro_batches == 3
    np.testing.assert_allclose(
        result.loss, pipelines.plain_loss(own.by_path, pipelines.batch(3)), rtol=1e-12
    )
    assert caplog.messages == [
        "a mini-batch of 3 examples lowers the number of micro-batches from 4 to 3"
    ]


def test_initial_weights_are_bit_equal_at_any_k() -> None:
    made = [pipelines.pipe(num_partitions=k) for k in (1, 2, 4)]
    for own in made:
        own.build(pipelines.batch())
        assert list(own.by_path) == list(made[0].by_path)
        for path, variable in own.by_path.items():
            np.testing.assert_array_equal(variable, made[0].by_path[path])
    kernels = [made[0].by_path[f"d{n}/kernel"].numpy() for n in range(6)]
    assert len({kernel.flat[0] for kernel in kernels}) == 6
    other = pipelines.pipe(seed=4)
    other.build(pipelines.batch())
    assert np.all(other.by_path["d0/kernel"] != made[0].by_path["d0/kernel"])


def test_compiled_is_plain() -> None:
    own, compiled = pipelines.three(), pipelines.three(jit_compile=True)
    wanted, got = (
        own.value_and_gradients(pipelines.batch()),
        compiled.value_and_gradients(pipelines.batch()),
    )
    np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-10)
    pipelines.close(got.gradients, wanted.gradients)
    with tf.GradientTape(persistent=True) as tape:
        losses = [
            tf.reduce_sum(tf.square(p(pipelines.batch(), training=True))) for p in (own, compiled)
        ]
    pipelines.close(
        tape.gradient(losses[1], compiled.weights), tape.gradient(losses[0], own.weights)
    )


@functools.cache
def _in_float32() -> Any:
    own = pipelines.three(dtype="float32", recompute="full,never,full")
    return own.value_and_gradients(pipelines.batch(dtype=tf.float32))


@pytest.mark.parametrize(
    ("policy", "scale", "tolerance"),
    [("mixed_bfloat16", None, 0.06), ("mixed_float16", 1024.0, 0.01)],
)
def test_mixed_precision_keeps_float32_gradients(
    policy: str, scale: float | None, tolerance: float
) -> None:
    """Tolerance: some roundings (2^-9 and 2^-12 of a value each) through six layers and back."""
    own = pipelines.three(dtype=policy, recompute="full,never,full")
    result = own.value_and_gradients(pipelines.batch(dtype=tf.float32), loss_scale=scale)
    assert result.loss.dtype == tf.float32
    assert {g.dtype for g in result.gradients.values()} == {tf.float32}
    assert {v.dtype for v in own.weights.values()} == {tf.float32}
    np.testing.assert_allclose(result.loss, _in_float32().loss, rtol=tolerance)
    gradients = {path: g / (scale or 1.0) for path, g in result.gradients.items()}
    pipelines.close(gradients, _in_float32().gradients, tolerance)
    boundary = own.executor.programs[0].graphs["F"].structured_outputs[0]
    assert boundary.dtype == tf.as_dtype(policy.removeprefix("mixed_"))


def test_a_layers_own_precision_holds_on_both_code_paths_for_ties_and_children() -> None:
    """Float32 layers in a bfloat16 network: their weights are not rounded in transit."""
    inner = layers.Sequential.Params(
        name="seq", layers=[pipelines.dense("in", 6, dtype="float32")], writes=("h",)
    )
    tied = pipelines.dense("b", 6, dtype="float32", tie={"kernel": "a/kernel"}, use_bias=False)
    last = layers.MeanSquaredError.Params()
    given = [inner, pipelines.dense("a", 6, reads=("h",), use_bias=False), tied, last]
    fields = {
        "x": pipelines.data(pipelines.N, 5, seed=1),
        "target": pipelines.data(pipelines.N, 6, seed=2),
    }
    own = pipelines.pipe(given, num_partitions=4, dtype="mixed_bfloat16", outputs=("h", "x"))
    own.build(fields)

    def low(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)

    with tf.GradientTape() as tape:
        h = tf.tanh(tf.matmul(low(fields["x"]), own.by_path["seq/in/kernel"]))
        x = low(tf.tanh(tf.matmul(low(h), low(own.by_path["a/kernel"]))))
        x = tf.tanh(tf.matmul(x, low(own.by_path["a/kernel"])))
        loss = tf.reduce_mean(tf.square(x - tf.cast(fields["target"], tf.float32)))
    wanted = tape.gradient(loss, own.weights, unconnected_gradients="zero")
    for outputs in (own(fields, training=True), own.evaluate(fields, outputs=True).outputs):
        assert (outputs["h"].dtype, outputs["x"].dtype) == (tf.float32, tf.float32)
        np.testing.assert_allclose(outputs["h"], h, atol=1e-6)  # rounded weights: 1e-3
        np.testing.assert_allclose(outputs["x"], x, atol=0.02)
    gradients = own.value_and_gradients(fields).gradients
    pipelines.close(
        {path: gradients[path] for path in ("a/kernel",)}, {"a/kernel": wanted["a/kernel"]}, 0.02
    )
    assert set(own.weights) == {"seq/in/kernel", "seq/in/bias", "a/kernel"}


def test_targets_and_weights_are_compared_as_they_come() -> None:
    given = [pipelines.dense("a", 3), layers.MeanSquaredError.Params(reads=("x", "target", "w"))]
    fields = {
        "x": pipelines.data(pipelines.N, 5, seed=1),
        "target": 1001 + pipelines.data(pipelines.N, 3, seed=2),  # bfloat16 has 1000 and 1004
        "w": tf.constant([0.3, 0.1] * (pipelines.N // 2)),
    }
    own = pipelines.pipe(
        given, num_partitions=2, num_micro_batches=2, dtype="mixed_bfloat16", outputs=("x",)
    )
    found = own.evaluate(fields, outputs=True)
    target = tf.cast(fields["target"], tf.float32)
    each = tf.reduce_mean(tf.square(found.outputs["x"] - target), 1)
    wanted = tf.reduce_sum(each * fields["w"]) / tf.reduce_sum(fields["w"])
    np.testing.assert_allclose(found.loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(own.value_and_gradients(fields).loss, wanted, rtol=1e-6)
    with tf.GradientTape():
        ctx = own.context(training=True)
        own(fields, ctx=ctx)
    total = ctx.collected.losses["loss"] / tf.reduce_sum(fields["w"])
    np.testing.assert_allclose(total, wanted, rtol=1e-6)


@pytest.mark.parametrize("owner", ["embedding/table", "head/kernel"])
@pytest.mark.parametrize("recompute", ["full", "never"])
def test_a_row_that_is_read_often_has_an_exact_sum(owner: str, recompute: str) -> None:
    given = [
        layers.Embedding.Params(name="embedding", vocabulary=7, units=4),
        layers.SequenceSoftmax.Params(name="head", vocabulary=7),
    ]
    if owner == "head/kernel":
        given[0].tie = {"table": owner}
    else:
        given[1].tie = {"kernel": owner}
    ids = {"x": tf.ones([8, 128], tf.int32), "label": tf.fill([8, 128], 2)}
    found = {}
    for dtype in ("float32", "mixed_bfloat16"):
        own = pipelines.pipe(given, dtype=dtype, recompute=recompute)
        found[dtype] = own.value_and_gradients(ids).gradients[owner][1]
    # 1,024 equal rows: summed in bfloat16, the result would be half.
    np.testing.assert_allclose(found["mixed_bfloat16"], found["float32"], rtol=0.03, atol=0.01)


def test_training_without_a_loss_is_refused() -> None:
    own = pipelines.pipe(pipelines.mlp()[:-1])
    with pytest.raises(errors.LayerError) as error:
        own.value_and_gradients({"x": pipelines.batch()["x"]})
    assert str(error.value) == (
        "the network has no loss, so nothing would be trained. End it with a layer that adds a "
        "loss (Softmax, MeanSquaredError), or use fprop under your own tape"
    )
    assert own.evaluate({"x": pipelines.batch()["x"]}, outputs=True).outputs["x"].shape == [
        pipelines.N,
        3,
    ]


def test_training_by_a_forward_only_table_is_refused() -> None:
    rows = (",".join(f"{k}F{m}" for m in range(4)) for k in range(3))
    own = pipelines.three(schedule="\n".join(rows))
    with pytest.raises(errors.ScheduleError) as error:
        own.value_and_gradients(pipelines.batch())
    assert str(error.value) == (
        "the schedule has only forward slots, so nothing would be trained. Use a name such as "
        "1f1b; evaluate() makes its own schedule"
    )


@pytest.mark.parametrize("name", ["weights", "state", "by_path", "analysis", "executor"])
def test_asking_before_building_is_refused(name: str) -> None:
    with pytest.raises(errors.LayerError) as error:
        getattr(pipelines.three(), name)
    assert str(error.value) == (
        "the pipeline has no variables yet. Call build(fields) first, or run a mini-batch"
    )


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: None, "None"),
        (lambda: (tf.ones([4, 2]), None), "None inside"),
        (object, "a value of type object"),
        (lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]), "a value of type RaggedTensor"),
        (lambda: np.array([None, 1]), "a value of type ndarray"),
        (lambda: {"a": {1.0}}, "a value of type set inside"),
    ],
    ids=range(6),
)
def test_a_field_that_is_not_a_tensor_is_named(make: Callable[[], Any], found: str) -> None:
    own = [layers.Dense.Params(units=2), layers.MeanSquaredError.Params()]
    pipe = pipelining.PipeliningLayer.Params(layers=own).instantiate()
    fields = {"x": tf.ones([4, 2]), "target": tf.ones([4, 2])}
    for built in (False, True):
        for call in (pipe.value_and_gradients, pipe.evaluate, pipe):
            with pytest.raises(errors.InputError) as caught:
                call({**fields, "x": make()})
            expected = f"field 'x' has {found}, expected a tensor or a nest of tensors. Convert"
            assert str(caught.value).startswith(expected)
        if not built:
            pipe.build(fields)


class WithNone(layers.Layer):
    """Writes (x, None); its Meta may declare two tensors."""

    class Params(layers.Layer.Params):
        declared: bool = hyperparams.field(True, "Whether the Meta has None too.")

        def _meta(self, x: tf.TensorSpec) -> base.Meta:
            return base.Meta((x, None if self.declared else x))

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        del theta, ctx
        return inputs, None


class OfFirst(layers.Layer):
    class Params(layers.Layer.Params):
        def _meta(self, x: Any) -> base.Meta:
            return base.Meta(x[0])

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        del theta, ctx
        return inputs[0]


@pytest.mark.parametrize("declared", [True, False])
def test_none_in_a_value_that_crosses_a_cut_names_its_layer(declared: bool) -> None:
    own = [
        WithNone.Params(name="pair", declared=declared),
        OfFirst.Params(),
        layers.MeanSquaredError.Params(),
    ]
    fields = {"x": tf.ones([4, 2]), "target": tf.zeros([4, 2])}
    inside = pipelining.PipeliningLayer.Params(layers=own, num_partitions=2, cuts=(2, 1))
    assert float(inside.instantiate().value_and_gradients(fields).loss) == 1.0
    cut = inside.copy().set(cuts=(1, 2)).instantiate()
    # What the Meta declares is known before a program is traced.
    call = cut.build if declared else cut.value_and_gradients
    with pytest.raises(errors.LayerError, match=r"^layer pair has None in its output 'x', which"):
        call(fields)


def test_none_in_a_value_of_a_cell_is_planned_and_described() -> None:
    """It counts no bytes, and has no shape."""
    own = [
        WithNone.Params(name="pair"),
        OfFirst.Params(),
        layers.MeanSquaredError.Params(),
    ]
    params = pipelining.PipeliningLayer.Params(layers=own, num_partitions=2, cuts=(2, 1))
    fields = {"x": tf.TensorSpec([4, 2]), "target": tf.TensorSpec([4, 2])}
    assert step_plan.make(params, fields).heaviest_bytes > 0
    assert "[4, 2]" in describe.describe_network(params, fields)


def test_a_missing_field_is_refused_by_every_call() -> None:
    own = pipelines.three()
    own.build(pipelines.batch())
    fields = {"x": pipelines.batch()["x"]}
    for call in (
        own,
        own.value_and_gradients,
        own.evaluate,
        own.loss_weights,
        own.first_nonfinite,
        lambda given: own.fprop(own.theta(), given, own.context(training=True)),
    ):
        with pytest.raises(errors.InputError) as error:
            call(fields)
        assert str(error.value) == (
            "the mini-batch has no field 'target', with which the pipeline was built; it has x. "
            "Include every field"
        )


def test_params_are_its_own_copy() -> None:
    given = pipelining.PipeliningLayer.Params(layers=pipelines.mlp(), dtype="float64")
    own = given.instantiate()
    given.num_micro_batches = 7
    given.layers[0].set(units=70)
    assert own.params.num_micro_batches == 1
    own.build(pipelines.batch())
    assert own.by_path["d0/kernel"].shape == [5, 7]


def small() -> Any:
    return pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(units=1), layers.MeanSquaredError.Params()]
    ).instantiate()


@pytest.mark.parametrize("is_built", [False, True])
def test_what_is_no_dictionary_is_refused_before_and_after_it_is_built(is_built: bool) -> None:
    x, y = tf.ones([4, 3]), tf.zeros([4, 1])
    pipe = small()
    if is_built:
        pipe.build({"x": x, "target": y})
    for batch, kind in (((x, y), "tuple"), ([x, y], "list"), (x, "EagerTensor")):
        with pytest.raises(errors.InputError, match=f"dictionary of fields, got {kind}. Write"):
            pipe.value_and_gradients(batch)
    with pytest.raises(errors.LayerError, match="has no variables yet"):
        small().evaluate(({"x": x, "target": y},))


def test_arguments_by_name_are_checked_and_numbers_are_taken() -> None:
    pipe, batch = small(), {"x": tf.ones([4, 3]), "target": tf.zeros([4, 1])}
    plain = pipe.value_and_gradients(batch)
    weighted = pipe.value_and_gradients(batch, loss_weights={"loss": 8.0})
    np.testing.assert_allclose(2.0 * weighted.loss, plain.loss, rtol=1e-6)
    for wrong, text in (
        ({"loss_weights": {}}, "loss_weights has no 'loss'"),
        (
            {"loss_weights": {"loss": 8.0, "los": 1.0}},
            "loss_weights names 'los', which the network does not have; nearest 'loss'",
        ),
        (
            {"accumulators": {"dense/kernel": tf.zeros([3, 1])}},
            "accumulators has no 'dense/bias'",
        ),
    ):
        with pytest.raises(errors.InputError, match=text):
            pipe.value_and_gradients(batch, **wrong)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        (
            "target",
            np.zeros([6], "float32"),
            r"'target' is float32 of shape \(6,\), .* shape \(4, 1\)",
        ),
        ("target", np.zeros([6, 1, 1], "float32"), r"'target' is float32 of shape \(6, 1, 1\)"),
        ("target", np.zeros([6, 1], "int32"), "'target' is int32 of shape"),
        ("x", np.ones([6, 3], "int64"), r"'x' is int64 of shape \(6, 3\), .* float32 of shape"),
        ("x", (np.ones([6, 3]), np.ones([6, 3])), "'x' is a nest of 2 tensors, .* with 1"),
    ],
)
def test_later_mini_batches_are_like_that_of_the_build(field: str, value: Any, found: str) -> None:
    """A target [N] beside predictions [N, 1] would be spread to [N, N]."""
    pipe = small()
    pipe.build({"x": tf.ones([4, 3]), "target": tf.zeros([4, 1])})
    batch = {"x": tf.ones([6, 3], tf.float64), "target": tf.zeros([6, 1])}
    assert pipe.value_and_gradients(batch).num_micro_batches == 1
    with pytest.raises(errors.InputError, match=found):
        pipe.value_and_gradients({**batch, field: value})
