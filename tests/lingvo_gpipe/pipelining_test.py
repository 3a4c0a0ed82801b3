"""PipeliningLayer: what its graphs hold, where they run, when they are traced, what it refuses."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, pipelining, placement
from lingvo_gpipe.layers import base

N = 8
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def data(*shape: int, seed: int, dtype: tf.DType = tf.float64) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 91], dtype=dtype)


def batch(count: int = N, dtype: tf.DType = tf.float64) -> dict[str, tf.Tensor]:
    return {"x": data(N, 5, seed=1, dtype=dtype)[:count], "target": data(N, 3, seed=2)[:count]}


def dense(name: str, units: int, **fields: Any) -> Any:
    return layers.Dense.Params(name=name, units=units, activation="tanh", **fields)


def mlp(*between: Any) -> list[Any]:
    """Six dense layers of different widths and a loss; what is given stands in the middle."""
    widths = (7, 6, 8, 4, 9, 3)
    stack = [dense(f"d{n}", units) for n, units in enumerate(widths)]
    return [*stack[:3], *between, *stack[3:], layers.MeanSquaredError.Params(name="error")]


def pipe(given: list[Any] | None = None, **fields: Any) -> pipelining.PipeliningLayer:
    settings: dict[str, Any] = {"layers": given or mlp(), "dtype": "float64", "seed": 3}
    made: pipelining.PipeliningLayer = pipelining.PipeliningLayer.Params(
        **(settings | fields)
    ).instantiate()
    return made


def three(**fields: Any) -> pipelining.PipeliningLayer:
    """K=3 of two dense layers each, M=4."""
    settings: dict[str, Any] = {
        "num_partitions": 3,
        "num_micro_batches": 4,
        "cuts": (2, 2, 3),
    }
    return pipe(**(settings | fields))


def plain(weights: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
    for n in range(6):
        x = tf.tanh(tf.matmul(x, weights[f"d{n}/kernel"]) + weights[f"d{n}/bias"])
    return x


def plain_loss(weights: dict[str, Any], fields: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.reduce_mean(tf.square(plain(weights, fields["x"]) - fields["target"]))


def graph_of(run: Any) -> Any:
    """Return the graph of a caller's own function around `run`."""
    return tf.function(run, autograph=False).get_concrete_function().graph


def step_graph(own: pipelining.PipeliningLayer, fields: dict[str, Any] | None = None) -> Any:
    given = batch() if fields is None else fields
    own.build(given)

    def step() -> Any:
        result = own.value_and_gradients(given)
        return result.loss, result.gradients

    return graph_of(step)


def calls(graph: Any) -> list[tf.Operation]:
    """Return the calls of programs, in the order of issue."""
    return [op for op in graph.get_operations() if op.type in CALLS]


def called(op: tf.Operation) -> str:
    """Return the kind of the program that a call runs."""
    name = op.get_attr("f").name
    return next(kind for kind in ("forward", "backward", "fused") if f"_{kind}_" in name)


def count(graph: Any) -> collections.Counter[str]:
    return collections.Counter(op.type for op in graph.get_operations())


def close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert set(got) == set(wanted)
    for path, value in wanted.items():
        largest = float(np.abs(value).max())
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance * largest, err_msg=path)


# --- layers that tests are made of ----------------------------------------------------------------


class Odd(base.Layer):
    """x → x; does what no layer of a pipeline may, or gives other losses than it declares."""

    class Params(base.Layer.Params):
        kind: str = hyperparams.field("", "What it does.")
        declares: tuple[str, ...] = hyperparams.field((), "Names of losses in its Meta.")
        gives: tuple[str, ...] = hyperparams.field((), "Names of losses that it adds.")
        metrics: tuple[str, ...] = hyperparams.field((), "Names of metrics in its Meta.")

    variable: tf.Variable | None = None

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        def weight(fields: dict[str, Any]) -> tf.Tensor:
            return tf.cast(tf.shape(fields["x"])[0], tf.float64)

        return base.Meta(
            inputs[0],
            losses=tuple(base.LossSpec(name, 1.0, weight) for name in params.declares),
            metrics=tuple(base.MetricSpec(name, lambda sums: sums) for name in params.metrics),
        )

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta
        for name in self.params.gives:
            ctx.add_loss(name, tf.reduce_sum(tf.square(inputs)))
        if self.params.kind == "random":
            return inputs + tf.random.normal([1], dtype=inputs.dtype)
        if self.params.kind == "assign":
            if Odd.variable is None:
                with tf.init_scope():
                    Odd.variable = tf.Variable(0.0)
            Odd.variable.assign_add(1.0)
        if self.params.kind == "print":
            tf.print(inputs)
        if self.params.kind == "print inside a condition":
            tf.cond(ctx.step > 3, lambda: tf.print(inputs), tf.no_op)
        return inputs


class Poison(base.Layer):
    """x → x; spoils a value in the forward pass, or the gradient alone."""

    class Params(base.Layer.Params):
        where: Literal["forward", "gradient"] = hyperparams.field("forward", "Which pass.")

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        del params
        return base.Meta(inputs[0])

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta, ctx
        # log 0 is -inf; √0 is 0, its derivative times 0 is NaN.
        zero = inputs * 0
        return inputs + (tf.math.log(zero) if self.params.where == "forward" else tf.sqrt(zero))


class Both(base.Layer):
    """x → {"low": x[..., :2], "rest": (x[..., 2:], rounded int32)}."""

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        del params
        size, depth = inputs[0].shape
        dtype = inputs[0].dtype
        rest = (tf.TensorSpec([size, depth - 2], dtype), tf.TensorSpec([size], tf.int32))
        return base.Meta({"low": tf.TensorSpec([size, 2], dtype), "rest": rest})

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta, ctx
        rounded = tf.cast(tf.reduce_sum(inputs, -1) * 100, tf.int32)
        return {"low": inputs[..., :2], "rest": (inputs[..., 2:], rounded)}


class Tag(base.Layer):
    """Strings → strings."""

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> base.Meta:
        del params
        return base.Meta(inputs[0])

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: base.Context) -> Any:
        del theta, ctx
        return tf.strings.join([inputs, "!"])


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_is_a_plain_forward_before_between_and_after_training() -> None:
    own = three()
    sizes: Iterable[int] = (8, 3, 5, 1, 8)
    for step, examples in enumerate(sizes):
        fields = batch(examples)
        result = own.evaluate(fields, outputs=True)
        outputs = plain(own.by_path, fields["x"])
        np.testing.assert_allclose(result.outputs["x"], outputs, rtol=1e-12)
        np.testing.assert_allclose(result.loss, plain_loss(own.by_path, fields), rtol=1e-12)
        np.testing.assert_allclose(own(fields), outputs, rtol=1e-12)
        for path, gradient in own.value_and_gradients(batch(), step=step).gradients.items():
            own.weights[path].assign_sub(0.1 * gradient)


def test_evaluation_has_no_randomness_and_uses_moving_statistics() -> None:
    own = three(layers=mlp(layers.BatchNorm.Params(), layers.Dropout.Params(rate=0.5)), cuts=None)
    first = own.evaluate(batch(), step=1, outputs=True).outputs["x"]
    other = own.evaluate(batch(), step=2, outputs=True)
    np.testing.assert_array_equal(first, other.outputs["x"])
    assert not other.moments
    assert not other.gradients


def test_evaluation_of_several_cells_on_a_device() -> None:
    """A table by hand, two cells on each of two devices, in both doors."""
    text = "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0"
    own = pipe(num_partitions=2, num_micro_batches=2, schedule=text)
    own.build(batch())
    assert len(own.analysis.cuts) == 4
    devices = [own.device_of(f"d{n}/kernel")[-5:] for n in range(6)]
    assert set(devices) == {"CPU:0", "CPU:1"}
    assert devices != sorted(devices)
    wanted = plain_loss(own.by_path, batch())
    np.testing.assert_allclose(own.evaluate(batch()).loss, wanted, rtol=1e-12)
    np.testing.assert_allclose(own.value_and_gradients(batch()).loss, wanted, rtol=1e-12)
    for training in (False, True):
        outputs = own(batch(), training=training)
        np.testing.assert_allclose(outputs, plain(own.by_path, batch()["x"]), rtol=1e-12)


# --- traces ---------------------------------------------------------------------------------------


def test_equal_shapes_are_traced_once_and_new_ones_once_each() -> None:
    own = three()
    own.value_and_gradients(batch(), step=0)
    first = own.trace_counts()
    # Forward and backward in each cell, and the last one's fused program; one outer function.
    assert first == {"programs": 7, "functions": 1}
    for step in range(1, 4):
        own.value_and_gradients(batch(), step=step)
    assert own.trace_counts() == first
    own.value_and_gradients(batch(4))  # micro-batches of one example
    other = own.trace_counts()
    assert other == {"programs": 14, "functions": 2}
    own.value_and_gradients(batch(6), step=9)  # of two and of one: both known
    assert own.trace_counts() == {"programs": 14, "functions": 3}
    own.evaluate(batch())
    assert own.trace_counts() == {"programs": 17, "functions": 4}
    own.evaluate(batch())
    own.value_and_gradients(batch(4), step=tf.constant(7))
    assert own.trace_counts() == {"programs": 17, "functions": 4}


def test_fewer_examples_than_micro_batches_lower_their_number_and_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = three()
    own.build(batch())
    with caplog.at_level(logging.WARNING):
        result = own.value_and_gradients(batch(3))
    assert result.num_micro_batches == 3
    np.testing.assert_allclose(result.loss, plain_loss(own.by_path, batch(3)), rtol=1e-12)
    assert caplog.messages == [
        "a mini-batch of 3 examples lowers the number of micro-batches from 4 to 3"
    ]


# --- what the graphs hold -------------------------------------------------------------------------


def test_outer_graph_is_calls_of_programs_alone() -> None:
    graph = step_graph(three())
    assert len(calls(graph)) == 2 * 3 * 4 - 1  # the last cell's last F and first B are one
    assert collections.Counter(map(called, calls(graph))) == {
        "forward": 11,
        "backward": 11,
        "fused": 1,
    }
    assert not {"MatMul", "Tanh", "TanhGrad", "BiasAdd"} & set(count(graph))


def test_calls_do_not_grow_with_layers() -> None:
    stack = [dense(f"d{n}", 5) for n in range(24)]
    deep = [*stack, layers.MeanSquaredError.Params(name="error")]
    fields = {"x": data(N, 5, seed=1), "target": data(N, 5, seed=2)}
    own = pipe(deep, num_partitions=3, num_micro_batches=4)
    assert len(calls(step_graph(own, fields))) == 23


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "1f1b"}, 2 * 3 * 4 - 4),
        ({"schedule": "1f1b", "fuse": False}, 2 * 3 * 4),
        ({"recompute": "full,full,never"}, 2 * 3 * 4),
    ],
)
def test_fused_slots_are_one_call(fields: dict[str, Any], expected: int) -> None:
    assert len(calls(step_graph(three(**fields)))) == expected


@pytest.mark.parametrize("recompute", ["full", "except_last", "never"])
def test_no_program_is_ever_inlined_or_stateful(recompute: str) -> None:
    own = three(
        layers=mlp(layers.BatchNorm.Params(), layers.Dropout.Params(rate=0.5)),
        cuts=None,
        recompute=recompute,
    )
    graph = step_graph(own)
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}
    functions = {op.get_attr("f").name for op in calls(graph)}
    assert len(functions) >= 5
    for name in functions:
        assert library[name].attr["_noinline"].b, name
        assert not library[name].signature.is_stateful, name
    assert {op.type for op in calls(graph)} == {"PartitionedCall"}
    for cell in own.executor.cells:
        for program in cell.graphs.values():
            assert not [op.name for op in program.get_operations() if op.op_def.is_stateful]


def test_backward_programs_compute_their_forward_again() -> None:
    own = three()
    step_graph(own)
    matmuls = [
        {phase: count(program)["MatMul"] for phase, program in cell.graphs.items()}
        for cell in own.executor.cells
    ]
    # Two layers: 2 forward, 2 by weights, 2 by inputs (not by the mini-batch's own field).
    assert matmuls[0] == {"F": 2, "B": 5}
    assert matmuls[1] == {"F": 2, "B": 6}
    assert matmuls[2] == {"F": 2, "B": 6, "FB": 6}


def test_never_computes_nothing_again() -> None:
    graph = step_graph(three(recompute="never"))
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}

    def matmuls(op: tf.Operation) -> int:
        return sum(node.op == "MatMul" for node in library[op.get_attr("f").name].node_def)

    found = collections.Counter(matmuls(op) for op in calls(graph))
    assert found == {2: 12, 4: 12}  # per cell and micro-batch a forward and a backward


def test_gathered_rows_are_scattered_into_the_accumulator() -> None:
    own = pipe(
        [
            layers.Embedding.Params(name="emb", vocabulary=50, units=4, reads=("ids",)),
            dense("d", 3),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=2,
        cuts=(1, 2),
    )
    fields = {"ids": tf.constant([[1, 2], [2, 2], [0, 49]]), "target": data(3, 2, 3, seed=2)}
    result = own.value_and_gradients(fields)
    found = count(own.executor.cells[0].graphs["B"])
    assert found["TensorScatterAdd"] == 1
    assert not {"UnsortedSegmentSum", "IndexedSlicesToDense"} & set(found)
    with tf.GradientTape() as tape:
        rows = tf.gather(own.by_path["emb/table"], fields["ids"])
        y = tf.tanh(tf.einsum("btd,du->btu", rows, own.by_path["d/kernel"]))
        loss = tf.reduce_mean(tf.square(y - fields["target"]))
    wanted = tf.convert_to_tensor(tape.gradient(loss, own.by_path["emb/table"]))
    np.testing.assert_allclose(result.gradients["emb/table"], wanted, atol=1e-14)


# --- order and place ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_tables_order_is_the_only_one(schedule: str) -> None:
    own = three(schedule=schedule, fuse=False)
    graph = step_graph(own)
    by_device: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    for op in calls(graph):
        by_device[op.device].append(op)
    assert len(by_device) == 3
    table = own.analysis.table
    seeds = {name: m for m, name in enumerate(_seeds(graph))}
    for k, row in enumerate(table.devices):
        ops = by_device[f"/device:CPU:{k}"]
        wanted = [(slot.phase, slot.micro_batch) for slot in row if slot is not None]
        assert [("FB"[called(op) == "backward"], _micro_batch(op, seeds)) for op in ops] == wanted
        assert not ops[0].control_inputs
        for before, op in itertools.pairwise(ops):
            # TensorFlow leaves out an edge that an input of the call implies.
            near = {*op.control_inputs, *(t.op for t in op.inputs)}
            assert before in near | {c for other in near for c in other.control_inputs}
            assert set(op.control_inputs) <= {before}


def _seeds(graph: Any) -> list[str]:
    """Return the names of the micro-batches' seeds, in the order in which they were made."""
    own = {t.name for op in calls(graph) for t in op.inputs if t.dtype == tf.int32}
    return [
        t.name
        for op in graph.get_operations()
        for t in op.outputs
        if t.name in own and t.shape == [2]
    ]


def _micro_batch(op: tf.Operation, seeds: dict[str, int]) -> int:
    return next(seeds[t.name] for t in op.inputs if t.name in seeds)


def test_a_wholly_frozen_first_cell_has_empty_backward_slots() -> None:
    own = three(frozen=("d0/*", "d1/*"))
    graph = step_graph(own)
    assert len(calls(graph)) == 2 * 3 * 4 - 1 - 4
    assert not [op for op in calls(graph) if called(op) == "backward" and "CPU:0" in op.device]
    assert set(own.frozen_weights) == {"d0/kernel", "d0/bias", "d1/kernel", "d1/bias"}
    assert set(own.value_and_gradients(batch()).gradients) == set(own.weights)
    assert "B" not in own.executor.cells[0].graphs


def test_variables_and_calls_live_on_their_cells_devices() -> None:
    own = three(devices=("/device:CPU:5", "/device:CPU:1", "/device:CPU:3"))
    graph = step_graph(own)
    for n in range(6):
        device = ("/device:CPU:5", "/device:CPU:1", "/device:CPU:3")[n // 2]
        assert own.device_of(f"d{n}/kernel") == device
        assert own.by_path[f"d{n}/kernel"].device.endswith(device)
    assert [op.device[-1] for op in calls(graph)][:1] == ["5"]
    assert {op.device for op in calls(graph)} == set(own.executor.devices)
    placed: dict[str, str] = {}

    def gradients() -> None:
        for path, gradient in own.value_and_gradients(batch()).gradients.items():
            placed[path] = gradient.device

    graph_of(gradients)
    assert placed == {path: own.device_of(path) for path in own.weights}


def test_initial_weights_are_bit_equal_at_any_k() -> None:
    made = [pipe(num_partitions=k) for k in (1, 2, 4)]
    for own in made:
        own.build(batch())
        assert list(own.by_path) == list(made[0].by_path)
        for path, variable in own.by_path.items():
            np.testing.assert_array_equal(variable, made[0].by_path[path])
    kernels = [made[0].by_path[f"d{n}/kernel"].numpy() for n in range(6)]
    assert len({kernel.flat[0] for kernel in kernels}) == 6
    other = pipe(seed=4)
    other.build(batch())
    assert np.all(other.by_path["d0/kernel"] != made[0].by_path["d0/kernel"])


# --- compiled, and in other precisions ------------------------------------------------------------


def test_compiled_is_plain() -> None:
    own, compiled = three(), three(jit_compile=True)
    wanted, got = own.value_and_gradients(batch()), compiled.value_and_gradients(batch())
    np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-10)
    close(got.gradients, wanted.gradients)
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_sum(tf.square(p(batch(), training=True))) for p in (own, compiled)]
    close(tape.gradient(losses[1], compiled.weights), tape.gradient(losses[0], own.weights))


@functools.cache
def _in_float32() -> Any:
    own = three(dtype="float32", recompute="full,never,full")
    return own.value_and_gradients(batch(dtype=tf.float32))


@pytest.mark.parametrize(
    ("policy", "scale", "tolerance"),
    [("mixed_bfloat16", None, 0.06), ("mixed_float16", 1024.0, 0.01)],
)
def test_mixed_precision_keeps_float32_gradients(
    policy: str, scale: float | None, tolerance: float
) -> None:
    """Tolerance: some roundings (2^-9 and 2^-12 of a value each) through six layers and back."""
    own = three(dtype=policy, recompute="full,never,full")
    result = own.value_and_gradients(batch(dtype=tf.float32), loss_scale=scale)
    assert result.loss.dtype == tf.float32
    assert {g.dtype for g in result.gradients.values()} == {tf.float32}
    assert {v.dtype for v in own.weights.values()} == {tf.float32}
    np.testing.assert_allclose(result.loss, _in_float32().loss, rtol=tolerance)
    gradients = {path: g / (scale or 1.0) for path, g in result.gradients.items()}
    close(gradients, _in_float32().gradients, tolerance)
    boundary = own.executor.cells[0].graphs["F"].structured_outputs[0]
    assert boundary.dtype == tf.as_dtype(policy.removeprefix("mixed_"))


def test_a_layers_own_precision_holds_at_both_doors_for_ties_and_children() -> None:
    """Float32 islands in a bfloat16 network: their own weights are not rounded on their way."""
    inner = layers.Sequential.Params(
        name="seq", layers=[dense("in", 6, dtype="float32")], writes=("h",)
    )
    tied = dense("b", 6, dtype="float32", tie={"kernel": "a/kernel"}, use_bias=False)
    last = layers.MeanSquaredError.Params()
    given = [inner, dense("a", 6, reads=("h",), use_bias=False), tied, last]
    fields = {"x": data(N, 5, seed=1), "target": data(N, 6, seed=2)}
    own = pipe(given, num_partitions=4, dtype="mixed_bfloat16", outputs=("h", "x"))
    own.build(fields)

    def low(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)

    with tf.GradientTape() as tape:
        h = tf.tanh(tf.matmul(low(fields["x"]), own.by_path["seq/in/kernel"]))
        x = low(tf.tanh(tf.matmul(low(h), low(own.by_path["a/kernel"]))))
        x = tf.tanh(tf.matmul(x, low(own.by_path["a/kernel"])))
        loss = tf.reduce_mean(tf.square(x - low(fields["target"])))
    wanted = tape.gradient(loss, own.weights, unconnected_gradients="zero")
    for outputs in (own(fields, training=True), own.evaluate(fields, outputs=True).outputs):
        assert (outputs["h"].dtype, outputs["x"].dtype) == (tf.float32, tf.float32)
        np.testing.assert_allclose(outputs["h"], h, atol=1e-6)  # rounded weights: 1e-3
        np.testing.assert_allclose(outputs["x"], x, atol=0.02)
    gradients = own.value_and_gradients(fields).gradients
    close({path: gradients[path] for path in ("a/kernel",)}, {"a/kernel": wanted["a/kernel"]}, 0.02)
    assert set(own.weights) == {"seq/in/kernel", "seq/in/bias", "a/kernel"}


# --- randomness -----------------------------------------------------------------------------------


def test_draws_depend_on_seed_and_step_and_nothing_else() -> None:
    given = mlp(layers.Dropout.Params(name="drop", rate=0.5))

    def loss(step: int, **fields: Any) -> float:
        own = pipe(given, num_micro_batches=4, **fields)
        own.build(batch())
        for path, variable in own.by_path.items():
            variable.assign(reference.by_path[path])
        return float(own.value_and_gradients(batch(), step=step).loss)

    reference = pipe(given)
    reference.build(batch())
    first = loss(1)
    assert loss(1) == first
    assert loss(1, num_partitions=3) == pytest.approx(first, rel=1e-12)
    assert len({first, loss(2), loss(1, seed=4), loss(2, seed=4)}) == 4


# --- the door under one's own tape ----------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["full", "except_last", "never"])
@pytest.mark.parametrize("traced", [False, True])
def test_gradients_by_weights_and_inputs_are_the_plain_ones(recompute: str, traced: bool) -> None:
    own = three(recompute=recompute)
    own.build(batch())
    x, target = batch()["x"], batch()["target"]

    def gradients(compute: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            # A loss of one's own, not the network's; the input is used past the pipeline too.
            loss = tf.reduce_sum(tf.square(compute() - target) * 3.0) + tf.reduce_sum(x * x)
        return tape.gradient(loss, {**own.weights, "input": x})

    def run() -> Any:
        return gradients(lambda: own({"x": x, "target": target}, training=True))

    got = tf.function(run)() if traced else run()
    close(got, gradients(lambda: plain(own.by_path, x)))


def test_an_input_of_integers_alone_before_a_frozen_cell() -> None:
    own = pipe(
        [
            layers.Embedding.Params(name="emb", vocabulary=7, units=3, reads=("ids",)),
            dense("d", 2),
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
    own = three()
    own.build(batch())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(own(batch(), training=False))
    got = tape.gradient(loss, own.weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(plain(own.by_path, batch()["x"]))
    close(got, tape.gradient(loss, own.weights))


def test_several_and_nested_outputs() -> None:
    given = [dense("a", 4, writes=("a",)), dense("b", 6, reads=("a",)), Both.Params(writes=("y",))]
    fields = {"x": batch()["x"], "gain": data(2, seed=5)}
    own = pipe(
        given,
        num_partitions=3,
        num_micro_batches=3,
        outputs=("y", "a", "gain"),
        unbatched=("gain",),
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
    assert list(got) == ["y", "a", "gain"]
    np.testing.assert_allclose(got["a"], a, rtol=1e-12)
    np.testing.assert_allclose(got["y"]["low"], b[:, :2], rtol=1e-12)
    assert got["y"]["rest"][1].shape == [N]
    np.testing.assert_array_equal(got["gain"], fields["gain"])  # one, not one per micro-batch
    close(tape.gradient(ours, own.weights), tape.gradient(theirs, own.weights))


def test_numpy_and_a_value_alone_are_taken() -> None:
    own = pipe([dense("a", 4), dense("b", 3)], num_partitions=2, num_micro_batches=2)
    x = batch()["x"]
    wanted = own(x)
    np.testing.assert_array_equal(own(x.numpy()), wanted)
    np.testing.assert_array_equal(own({"x": x.numpy()}), wanted)


def test_a_context_used_twice_is_refused() -> None:
    own = three()
    own.build(batch())
    ctx = own.context(training=True)
    own(batch(), ctx=ctx)
    with pytest.raises(errors.LayerError) as error:
        own(batch(), ctx=ctx)
    assert str(error.value) == (
        "this context has collected the loss 'loss' before, which would be lost. Give each call a "
        "context of its own: context(training=...)"
    )


def test_both_doors_work_in_a_callers_function_that_builds() -> None:
    one, other = three(), three()
    loss = tf.function(lambda fields: one.value_and_gradients(fields).loss)(batch())
    outputs = tf.function(lambda fields: other(fields, training=True))(batch())
    np.testing.assert_allclose(loss, plain_loss(one.by_path, batch()), rtol=1e-12)
    np.testing.assert_allclose(outputs, plain(one.by_path, batch()["x"]), rtol=1e-12)


# --- what is refused ------------------------------------------------------------------------------

STATEFUL = (
    "is stateful, which would serialise the devices and break recomputation. Use stateless "
    "operations seeded by ctx.seed, and theta and ctx.state in place of variables"
)


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("random", "odd/random_normal/RandomStandardNormal (RandomStandardNormal)"),
        ("assign", "odd/AssignAddVariableOp (AssignAddVariableOp)"),
        ("print", "odd/PrintV2 (PrintV2)"),
        ("print inside a condition", "odd/cond (If)"),
    ],
)
def test_an_impure_layer_is_refused(kind: str, operation: str) -> None:
    own = three(layers=mlp(Odd.Params(name="odd", kind=kind)), cuts=(3, 1, 4))
    for call in (own.value_and_gradients, own.evaluate, own):
        with pytest.raises(errors.LayerError) as error:
            call(batch())
        assert str(error.value) == f"cell 1: {operation} {STATEFUL}"


@pytest.mark.parametrize("recompute", ["full", "never"])
@pytest.mark.parametrize("cuts", [(8,), (3, 5)])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"declares": ("lost",)},
            "odd: its Meta declares the loss 'lost', but its fprop gave none. Call ctx.add_loss",
        ),
        (
            {"metrics": ("hits",)},
            "odd: its Meta declares the metric 'hits', but its fprop gave none. Call ctx.add_sum",
        ),
        (
            {"declares": ("right",), "gives": ("right", "rigth")},
            "odd: its fprop gave the loss 'rigth', which its Meta does not declare; nearest right. "
            "Declare it, or it would count nowhere",
        ),
        (  # the last layer's: given twice, whether in one cell or in two
            {"gives": ("loss",)},
            "odd: its fprop gave the loss 'loss', which its Meta does not declare; nearest none. "
            "Declare it, or it would count nowhere",
        ),
    ],
)
def test_other_losses_than_declared_are_refused(
    recompute: str, cuts: tuple[int, ...], fields: dict[str, Any], text: str
) -> None:
    own = pipe(
        mlp(Odd.Params(name="odd", **fields)),
        num_partitions=len(cuts),
        cuts=cuts,
        recompute=recompute,
    )
    for call in (own.value_and_gradients, own.evaluate, functools.partial(own, training=True)):
        with pytest.raises(errors.LayerError) as error:
            call(batch())
        assert str(error.value) == text


def test_one_layer_giving_a_loss_twice_is_refused() -> None:
    own = pipe(mlp(Odd.Params(name="odd", declares=("l",), gives=("l", "l"))))
    with pytest.raises(errors.LayerError, match=r"^odd: loss 'l' is given twice in one micro-batc"):
        own.value_and_gradients(batch())


def test_training_without_a_loss_is_refused() -> None:
    own = pipe(mlp()[:-1])
    with pytest.raises(errors.LayerError) as error:
        own.value_and_gradients({"x": batch()["x"]})
    assert str(error.value) == (
        "the network gives no loss, so that nothing would be trained. End it in a layer that gives "
        "one (Softmax, MeanSquaredError), or use fprop under your own tape"
    )
    assert own.evaluate({"x": batch()["x"]}, outputs=True).outputs["x"].shape == [N, 3]


def test_training_by_a_forward_only_table_is_refused() -> None:
    own = three(schedule="forward_only")
    with pytest.raises(errors.ScheduleError) as error:
        own.value_and_gradients(batch())
    assert str(error.value) == (
        "the schedule has forward slots alone, so that nothing would be trained. Use gpipe or "
        "1f1b; evaluate() needs no schedule of its own"
    )


@pytest.mark.parametrize("name", ["weights", "state", "by_path", "specs", "metrics", "executor"])
def test_asking_before_building_is_refused(name: str) -> None:
    with pytest.raises(errors.LayerError) as error:
        getattr(three(), name)
    assert str(error.value) == (
        "the pipeline has no variables yet. Call build(fields) first, or give it a mini-batch"
    )


def test_a_missing_field_is_told_at_every_door() -> None:
    own = three()
    own.build(batch())
    fields = {"x": batch()["x"]}
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
            "Give every field"
        )


def test_too_few_devices_are_told_when_it_is_built() -> None:
    own = pipe(mlp(*[layers.Identity.Params() for _ in range(8)]), num_partitions=9)
    with pytest.raises(errors.PlacementError, match=r"^9 partitions need 9 CPU devices, but there"):
        own.build(batch())


def test_strings_travel_between_cells_that_are_not_compiled() -> None:
    fields = {**batch(), "name": tf.constant(list("abcdefgh"))}
    assert _tagged().evaluate(fields, outputs=True).outputs["name"].numpy()[1:3].tolist() == [
        b"b!!",
        b"c!!",
    ]
    np.testing.assert_allclose(
        _tagged().value_and_gradients(fields).loss, three().value_and_gradients(batch()).loss
    )


def test_strings_are_refused_where_cells_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**batch(), "name": tf.constant(list("abcdefgh"))}
    wanted = r"^'name' holds strings, which no compiled cell can receive"
    with pytest.raises(errors.PlacementError, match=wanted):
        _tagged(jit_compile=True).build(fields)
    tpu = placement.Placement(tuple(f"/device:CPU:{k}" for k in range(3)), compile_all=True)
    monkeypatch.setattr(placement, "place", lambda *_: tpu)
    with pytest.raises(errors.PlacementError, match=wanted):
        _tagged().build(fields)
    own = three()
    own.build(batch())
    assert own.value_and_gradients(batch()).num_micro_batches == 4


def _tagged(**fields: Any) -> pipelining.PipeliningLayer:
    tags = [Tag.Params(reads=("name",), writes=("name",)) for _ in range(2)]
    given = [*mlp(tags[0])[:-1], tags[1], layers.MeanSquaredError.Params(name="error")]
    return three(layers=given, cuts=(2, 3, 4), outputs=("x", "name"), **fields)


# --- where a value stops being finite -------------------------------------------------------------


def test_first_nonfinite_names_the_layer_in_the_middle() -> None:
    own = three(layers=mlp(Poison.Params(name="spoiled")), cuts=None)
    assert own.first_nonfinite(batch()) == "layer spoiled, output x, micro-batch 0"


def test_first_nonfinite_names_the_field_and_micro_batch() -> None:
    fields = batch()
    fields["target"] = tf.tensor_scatter_nd_update(fields["target"], [[5, 1]], [np.inf])
    found = three().first_nonfinite(fields)
    assert found == "field target of the mini-batch, micro-batch 2"


def test_first_nonfinite_names_the_layer_whose_gradient_it_is() -> None:
    own = three(layers=mlp(Poison.Params(name="spoiled", where="gradient")), cuts=None)
    assert np.isfinite(own.value_and_gradients(batch()).loss)
    found = own.first_nonfinite(batch())
    assert found.startswith("layer d2, gradient of d2/")  # the nearest weights before it


def test_first_nonfinite_names_a_weight() -> None:
    own = three()
    own.build(batch())
    kernel = own.by_path["d3/kernel"]
    kernel.assign(tf.tensor_scatter_nd_update(kernel, [[0, 0]], [np.nan]))
    assert own.first_nonfinite(batch()) == "layer d3, variable d3/kernel"


def test_first_nonfinite_finds_nothing_in_sound_values() -> None:
    assert three().first_nonfinite(batch()) == "nowhere"


# --- params ---------------------------------------------------------------------------------------


def test_params_text_round_trip() -> None:
    own = three(schedule="1f1b", recompute="full,never,full", jit_compile=True)
    text = own.params.to_text()
    again = hyperparams.from_text(text)
    assert again == own.params
    assert again.to_text() == text
    assert isinstance(again.instantiate(), pipelining.PipeliningLayer)


def test_params_are_its_own_copy() -> None:
    given = pipelining.PipeliningLayer.Params(layers=mlp(), dtype="float64")
    own = given.instantiate()
    given.num_micro_batches = 7
    given.layers[0].set(units=70)
    assert own.params.num_micro_batches == 1
    own.build(batch())
    assert own.by_path["d0/kernel"].shape == [5, 7]
