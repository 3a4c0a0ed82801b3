"""Cells and their executor: content of the graphs, order, devices, and refusals."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, pipelining
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from tests.networks import pipelines

SPLIT = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1"

# --- what the graphs hold -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The last cell's last F and first B are one.
        ({}, {"forward": 11, "backward": 11, "fused": 1}),
        ({"schedule": "1f1b"}, {"forward": 8, "backward": 8, "fused": 4}),
        ({"schedule": "1f1b", "fuse": False}, {"forward": 12, "backward": 12}),
        ({"recompute": "full,full,never"}, {"forward": 12, "backward": 12}),
    ],
)
def test_outer_graph_is_calls_of_programs_alone(
    fields: dict[str, Any], expected: dict[str, int]
) -> None:
    graph = pipelines.step_graph(pipelines.three(**fields))
    assert collections.Counter(map(pipelines.called, pipelines.calls(graph))) == expected
    assert not {"MatMul", "Tanh", "TanhGrad", "BiasAdd"} & set(pipelines.count(graph))


@pytest.mark.parametrize("recompute", ["full", "never"])
def test_a_slot_that_computes_nothing_is_no_call(recompute: str) -> None:
    own = pipelines.pipe(
        pipelines.mlp(),
        num_partitions=2,
        num_micro_batches=2,
        schedule=SPLIT,
        recompute=recompute,
    )
    calls = pipelines.calls(pipelines.step_graph(own))
    found = [op.device[-5:] for op in calls if pipelines.called(op) == "backward"]
    # Cell 0 reads only fields: its I is empty.
    assert collections.Counter(found) == {"CPU:0": 2, "CPU:1": 4}


@pytest.mark.parametrize("recompute", ["full", "except_last", "never"])
def test_no_program_is_ever_inlined_or_stateful(recompute: str) -> None:
    own = pipelines.three(
        layers=pipelines.mlp(layers.BatchNorm.Params(), layers.Dropout.Params(rate=0.5)),
        cuts=None,
        recompute=recompute,
    )
    graph = pipelines.step_graph(own)
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}
    functions = {op.get_attr("f").name for op in pipelines.calls(graph)}
    assert len(functions) >= 5
    for name in functions:
        assert library[name].attr["_noinline"].b, name
        assert not library[name].signature.is_stateful, name
    assert {op.type for op in pipelines.calls(graph)} == {"PartitionedCall"}
    for cell in own.executor.programs:
        for program in cell.graphs.values():
            assert not [op.name for op in program.get_operations() if op.op_def.is_stateful]


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        # Four layers: 4 forward, 4 by weights, 4 by inputs, in the order of the slots.
        ({"schedule": "gpipe"}, {"F": 4, "B": 12, "FB": 12}),
        ({"schedule": "gpipe", "recompute": "never"}, {"K": 4, "BK": 8}),
        # I goes back by all inputs, W by all weights. I directly follows its forward.
        ({"schedule": SPLIT, "fuse": False}, {"F": 4, "I": 8, "W": 4}),
        ({"schedule": SPLIT}, {"K": 4, "IK": 4, "W": 4}),
        ({"schedule": SPLIT, "recompute": "never"}, {"K": 4, "IK": 4, "W": 4}),
    ],
)
def test_programs_compute_the_forward_again_by_their_policy_and_nothing_else_twice(
    fields: dict[str, Any], products: dict[str, int]
) -> None:
    own = pipelines.pipe(
        pipelines.mlp(), num_partitions=2, num_micro_batches=2, cuts=(2, 5), **fields
    )
    pipelines.step_graph(own)
    graphs = own.executor.programs[1].graphs
    assert {name: pipelines.count(graph)["MatMul"] for name, graph in graphs.items()} == products


def _under_ones_own_tape(own: pipelining.PipeliningLayer) -> Any:
    """Return the graph of a loss and its gradients under the caller's tape."""
    own.build(pipelines.batch())

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own(pipelines.batch(), training=True))
        return tape.gradient(loss, own.weights)

    return pipelines.graph_of(step)


def test_under_ones_own_tape_cells_recompute_on_their_devices_in_a_row() -> None:
    own = pipelines.three()
    found = pipelines.calls(_under_ones_own_tape(own))
    wanted = {(kind, f"/device:CPU:{k}"): 4 for kind in ("forward", "backward") for k in range(3)}
    assert collections.Counter((pipelines.called(op), op.device) for op in found) == wanted
    # The last cell's two layers: 2 forward, 2 by weights, 2 by inputs.
    assert pipelines.count(own.executor.programs[2].graphs["B"])["MatMul"] == 6
    for k in range(3):
        row = [op for op in found if pipelines.called(op) == "backward"]
        row = [op for op in row if op.device == f"/device:CPU:{k}"]
        for before, after in itertools.pairwise(row):
            assert before in {*after.control_inputs, *(given.op for given in after.inputs)}


def test_under_ones_own_tape_kept_forwards_and_their_gradients_stay_on_their_devices() -> None:
    graph = _under_ones_own_tape(pipelines.three(recompute="never"))
    handed = [op for op in graph.get_operations() if op.type in ("IdentityN", *pipelines.CALLS)]
    of_fields = [op for op in handed if not op.device]
    assert [len(op.inputs) for op in of_fields] == [1 + len(pipelines.batch())]
    assert {op.device for op in handed} == {"", *(f"/device:CPU:{k}" for k in range(3))}


@pytest.mark.parametrize("recompute", ["full", "except_last", "never"])
def test_ones_own_tape_keeps_nothing_of_what_is_inside(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pipelines.three(recompute=recompute)
    own.build(pipelines.batch())
    inside: list[tf.Tensor] = []

    def watch(cell: network.Cell, given: cell_programs.CellInputs) -> None:
        sums = [tf.reduce_sum(weight) for weight in given.weights]
        sums += [
            tf.reduce_sum(value)
            for version, value in given.imports.items()
            if version in cell.imports_with_gradient
        ]
        inside.append(tf.add_n(sums))

    plain = cell_programs.CellPrograms.run

    def spied(self: Any, cell: Any, name: str, given: Any, *rest: Any) -> Any:
        if name in ("F", "K"):
            watch(cell, given)
        return plain(self, cell, name, given, *rest)

    monkeypatch.setattr(cell_programs.CellPrograms, "run", spied)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(own(pipelines.batch(), training=True))
    weights = list(own.weights.values())
    assert len(inside) == 12
    assert all(found is None for each in inside for found in tape.gradient(each, weights))
    assert all(found is not None for found in tape.gradient(loss, weights))


@pytest.mark.parametrize(
    ("schedule", "recompute", "policy"),
    [
        ("gpipe", "full", "float64"),
        ("gpipe", "never", "mixed_bfloat16"),
        ("1f1b", "full", "mixed_bfloat16"),
        ("zb_h1", "never", "float64"),
    ],
)
def test_gradients_of_one_micro_batch_are_not_added_to_zeros(
    schedule: str, recompute: str, policy: str
) -> None:
    """The bits are those of the sum with zeros, and dtypes those of the master copies."""
    own = pipelines.three(schedule=schedule, recompute=recompute, dtype=policy, num_micro_batches=1)
    shapes = [
        tuple(op.outputs[0].shape)
        for op in pipelines.step_graph(own).get_operations()
        if op.type in ("Const", "Fill")
    ]
    assert not set(shapes) & {tuple(v.shape) for v in own.weights.values()}
    dtypes = {path: variable.dtype for path, variable in own.weights.items()}
    zeros = {path: tf.zeros(v.shape, v.dtype) for path, v in own.weights.items()}
    fields = pipelines.batch()
    alone = own.value_and_gradients(fields).gradients
    added = own.value_and_gradients(fields, accumulators=zeros).gradients
    assert {path: gradient.dtype for path, gradient in alone.items()} == dtypes
    for path, gradient in alone.items():
        np.testing.assert_array_equal(gradient, added[path])


def test_gathered_rows_are_scattered_into_the_accumulator() -> None:
    own = pipelines.pipe(
        [
            layers.Embedding.Params(name="emb", vocabulary=50, units=4, reads=("ids",)),
            pipelines.dense("d", 3),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=2,
        cuts=(1, 2),
        num_micro_batches=3,
    )
    fields = {
        "ids": tf.constant([[1, 2], [2, 2], [0, 49]]),
        "target": pipelines.data(3, 2, 3, seed=2),
    }
    result = own.value_and_gradients(fields)
    found = pipelines.count(own.executor.programs[0].graphs["B"])
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
    drops = [layers.Dropout.Params(name=f"drop{n}", rate=0.5) for n in range(3)]  # read the seed
    stack = pipelines.mlp()
    own = pipelines.three(
        layers=[*stack[:2], drops[0], *stack[2:4], drops[1], *stack[4:6], drops[2], stack[6]],
        cuts=(3, 3, 4),
        schedule=schedule,
        fuse=False,
    )
    graph = pipelines.step_graph(own)
    by_device: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    for op in pipelines.calls(graph):
        by_device[op.device].append(op)
    assert len(by_device) == 3
    table = own.analysis.table
    for k, row in enumerate(table.devices):
        ops = by_device[f"/device:CPU:{k}"]
        wanted = [(slot.phase, slot.micro_batch) for slot in row if slot is not None]
        assert [
            ("FB"[pipelines.called(op) == "backward"], _micro_batch(op)) for op in ops
        ] == wanted
        assert not ops[0].control_inputs
        for before, op in itertools.pairwise(ops):
            # TensorFlow leaves out an edge that an input of the call implies.
            near = {*op.control_inputs, *(t.op for t in op.inputs)}
            assert before in near | {c for other in near for c in other.control_inputs}
            assert set(op.control_inputs) <= {before}


def _micro_batch(op: tf.Operation) -> int:
    """Return the micro-batch of a call: the place of its seed among those of its device."""
    (seed,) = (t for t in op.inputs if t.op.type == "Unpack")
    assert seed.op.device == op.device
    return seed.value_index


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_fields_and_seeds_cross_to_a_device_in_one_piece(micro_batches: int) -> None:
    graph = pipelines.step_graph(pipelines.three(num_micro_batches=micro_batches))
    cut = collections.Counter(
        (op.type, op.device)
        for op in graph.get_operations()
        if op.type in ("SplitV", "Split", "Unpack")
    )
    assert cut == {
        ("SplitV", "/device:CPU:0"): 1,  # x
        ("SplitV", "/device:CPU:2"): 1,  # target
        **{("Unpack", f"/device:CPU:{k}"): 1 for k in range(3)},  # seeds
    }
    called = pipelines.calls(graph)
    received = {
        (op.device, t.name)
        for op in called
        for t in op.inputs
        if t.op.device != op.device and t.op not in called
    }
    assert len(received) == 12 + 1  # weights and the factor of the loss: what programs read


def test_a_wholly_frozen_first_cell_has_empty_backward_slots() -> None:
    own = pipelines.three(frozen=("d0/*", "d1/*"))
    graph = pipelines.step_graph(own)
    assert len(pipelines.calls(graph)) == 2 * 3 * 4 - 1 - 4
    assert not [
        op
        for op in pipelines.calls(graph)
        if pipelines.called(op) == "backward" and "CPU:0" in op.device
    ]
    assert set(own.value_and_gradients(pipelines.batch()).gradients) == set(own.weights)
    assert "B" not in own.executor.programs[0].graphs


def test_variables_and_calls_live_on_their_cells_devices() -> None:
    own = pipelines.three(devices=("/device:CPU:5", "/device:CPU:1", "/device:CPU:3"))
    graph = pipelines.step_graph(own)
    for n in range(6):
        device = ("/device:CPU:5", "/device:CPU:1", "/device:CPU:3")[n // 2]
        assert own.executor.device_of(f"d{n}/kernel") == device
        assert own.by_path[f"d{n}/kernel"].device.endswith(device)
    assert [op.device[-1] for op in pipelines.calls(graph)][:1] == ["5"]
    assert {op.device for op in pipelines.calls(graph)} == set(own.executor.devices[0])
    placed: dict[str, str] = {}

    def gradients() -> None:
        for path, gradient in own.value_and_gradients(pipelines.batch()).gradients.items():
            placed[path] = gradient.device

    pipelines.graph_of(gradients)
    assert placed == {path: own.executor.device_of(path) for path in own.weights}


# --- what a cell refuses --------------------------------------------------------------------------


class Odd(base.Layer):
    """x → x; does something forbidden, or adds other losses than it declares."""

    class Params(base.Layer.Params):
        kind: str = hyperparams.field("", "What it does.")
        declares: tuple[str, ...] = hyperparams.field((), "Names of losses in its Meta.")
        gives: tuple[str, ...] = hyperparams.field((), "Names of losses that it adds.")
        metrics: tuple[str, ...] = hyperparams.field((), "Names of metrics in its Meta.")

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            def weight(fields: dict[str, Any]) -> tf.Tensor:
                return tf.cast(tf.shape(fields["x"])[0], tf.float64)

            return base.Meta(
                inputs[0],
                losses=tuple(base.LossSpec(name, 1.0, weight) for name in self.declares),
                metrics=tuple(base.MetricSpec(name, lambda sums: sums) for name in self.metrics),
            )

    params: Params

    variable: tf.Variable | None = None

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta
        for name in self.params.gives:
            ctx.add_loss(name, tf.reduce_sum(tf.square(inputs)))
        if self.params.kind == "moments":
            ctx.add_moments({"sum": tf.reduce_sum(inputs, 0)})
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


class Tag(layers.Identity):
    """Strings → strings."""

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        del theta, ctx
        return tf.strings.join([inputs, "!"])


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
    own = pipelines.three(layers=pipelines.mlp(Odd.Params(name="odd", kind=kind)), cuts=(3, 1, 4))
    for call in (own.value_and_gradients, own.evaluate, own):
        with pytest.raises(errors.LayerError) as error:
            call(pipelines.batch())
        assert str(error.value) == f"cell 1: {operation} {STATEFUL}"


@pytest.mark.parametrize("recompute", ["full", "never"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"declares": ("lost",)},
            "odd: its Meta declares the loss 'lost', but its fprop did not add it. Call "
            "ctx.add_loss",
        ),
        (
            {"metrics": ("hits",)},
            "odd: its Meta declares the metric 'hits', but its fprop did not add it. Call "
            "ctx.add_sum",
        ),
        (
            {"declares": ("right",), "gives": ("right", "rigth")},
            "odd: its fprop added the loss 'rigth', which its Meta does not declare; nearest "
            "'right'. Declare it, or it would be ignored",
        ),
        (  # the last layer's loss: added twice
            {"gives": ("loss",)},
            "odd: its fprop added the loss 'loss', which its Meta does not declare; there are "
            "none. Declare it, or it would be ignored",
        ),
        (
            {"kind": "moments"},
            "odd: its fprop added moments, but its Meta declares no statistic, so they would "
            "change nothing. Declare a VariableSpec with is_state=True, or add a metric by "
            "ctx.add_sum",
        ),
    ],
)
def test_other_losses_than_declared_are_refused(
    recompute: str, fields: dict[str, Any], text: str
) -> None:
    own = pipelines.pipe(
        pipelines.mlp(Odd.Params(name="odd", **fields)),
        num_partitions=2,
        cuts=(3, 5),
        recompute=recompute,
    )
    for call in (own.value_and_gradients, own.evaluate, functools.partial(own, training=True)):
        with pytest.raises(errors.LayerError) as error:
            call(pipelines.batch())
        assert str(error.value) == text


def test_strings_travel_between_cells_that_are_not_compiled() -> None:
    fields = {**pipelines.batch(), "name": tf.constant(list("abcdefgh"))}
    assert _tagged().evaluate(fields, outputs=True).outputs["name"].numpy()[1:3].tolist() == [
        b"b!!",
        b"c!!",
    ]
    np.testing.assert_allclose(
        _tagged().value_and_gradients(fields).loss,
        pipelines.three().value_and_gradients(pipelines.batch()).loss,
    )


@pytest.mark.parametrize(
    "recompute", [pytest.param("full", marks=pytest.mark.sameness_grid), "never"]
)
def test_a_compiled_loop_is_kept_and_its_backward_split(recompute: str) -> None:
    def gradients(**fields: Any) -> dict[str, tf.Tensor]:
        lstm = adapter.from_keras(keras.layers.LSTM(3, return_sequences=True)).set(name="lstm")
        own = pipelines.pipe(
            [pipelines.dense("a", 3), lstm, layers.MeanSquaredError.Params()],
            num_partitions=2,
            cuts=(1, 2),
            num_micro_batches=2,
            **fields,
        )
        x = pipelines.data(4, 5, 3, seed=1)
        return own.value_and_gradients({"x": x, "target": x}).gradients

    table = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W1,1W0"
    found = gradients(schedule=table, recompute=recompute, jit_compile=True)
    for path, wanted in gradients().items():
        np.testing.assert_allclose(found[path], wanted, rtol=1e-9, atol=1e-12)


def _tagged(**fields: Any) -> pipelining.PipeliningLayer:
    tags = [Tag.Params(reads=("name",), writes=("name",)) for _ in range(2)]
    given = [*pipelines.mlp(tags[0])[:-1], tags[1], layers.MeanSquaredError.Params(name="error")]
    return pipelines.three(layers=given, cuts=(2, 3, 4), outputs=("x", "name"), **fields)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_cell_without_a_loss_after_the_loss_returns_no_gradient(schedule: str) -> None:
    own = pipelines.pipe(
        [
            *pipelines.mlp(),
            layers.Activation.Params(name="bent", activation="tanh", writes=("bent",)),
        ],
        num_partitions=2,
        num_micro_batches=4,
        cuts=(7, 1),
        schedule=schedule,
    )
    fields = pipelines.batch()
    own.build(fields)
    with tf.GradientTape() as tape:
        loss = pipelines.plain_loss(own.by_path, fields)
    result = own.value_and_gradients(fields)
    pipelines.close(result.gradients, tape.gradient(loss, own.weights))
    assert own.first_nonfinite(fields) == "nowhere"
    fault = tf.errors.UnavailableError(None, None, "lost")
    assert "but not when its slots" in str(own.explain(fault, fields))  # as run eagerly
