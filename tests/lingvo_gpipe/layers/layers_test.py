"""Laws for every layer, tested over all rows of `layer_cases`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import hyperparams, layers, precision
from lingvo_gpipe.hyperparams.params import undefined_methods
from lingvo_gpipe.layers import composite
from lingvo_gpipe.tasks.image.model import amoebanet, heads, operations
from lingvo_gpipe.tasks.mt.model import block, decoder, embedding, encoder, mixture, softmax
from tests.cases import amoeba_layer_cases, layer_cases, mt_layer_cases
from tests.cases.layer_cases import CASES, Case
from tests.support import device_kernels

POLICIES = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
RANDOM = {
    "amoeba_cell",
    "classifier",
    "drop_path",
    "embedding_positions",
    "attention",
    "decoder_layer",
    "dropout",
    "encoder_layer",
    "feed_forward_end",
    "feed_forward_slice",
    "mixture",
    "mixture_end",
    "residual",
    "sequential",
    "token_embedding",
    "transformer",
    "transparent_first",
}
# Their outputs depend on the whole micro-batch: batch norms in a row, masks by example.
NOT_BY_EXAMPLE = {
    "amoeba_cell",
    "amoeba_cell_first",
    "auxiliary_head",
    "classifier",
    "operation_crossed",
    "operation_separable",
    # Shares have no batch dimension, and this law cuts along it.
    "mixture_end",
    "transparent_at_norm",
    "transparent_last",
    "transparent_middle",
}
EVERY = (*CASES, *amoeba_layer_cases.CASES, *mt_layer_cases.CASES)

every_case = pytest.mark.parametrize("case", EVERY, ids=str)


# Layers of layers that have cases of their own; a trace takes a second or more.
COMPOSITIONS = {"amoeba_cell", "decoder_layer"}


def _first_of_each_class() -> list[Any]:
    """Return all cases; in the whole set only are compositions, and further ones of a class."""
    classes: set[type] = set()
    found = []
    for case in EVERY:
        kind = type(case.params())
        whole_only = kind in classes or case.name in COMPOSITIONS
        marks = [pytest.mark.sameness_grid] if whole_only else []
        found.append(pytest.param(case, marks=marks, id=str(case)))
        classes.add(kind)
    return found


# For laws that trace or compile each case once more, which takes up to seconds.
each_class = pytest.mark.parametrize("case", _first_of_each_class())


class Run:
    """The layer of a case, with variables and inputs."""

    def __init__(self, case: Case, policy: str = "float64", **fields: Any) -> None:
        self.params = case.params().set(dtype=policy, **fields)
        self.specs = case.specs(policy)
        self.meta = layer_cases.meta_of(self.params, *self.specs)
        self.layer = self.params.instantiate()
        compute = precision.policy(policy).compute
        self.theta, self.state = layer_cases.create_variables(self.meta, 1, compute)
        self.inputs = layer_cases.draw(self.specs)

    def forward(
        self, theta: Any, inputs: tuple[Any, ...], *, training: bool = True, seed: int = 0
    ) -> tuple[Any, dict[str, Any]]:
        """Return outputs and what was collected."""
        ctx = layer_cases.context(self.state, training=training, seed=seed)
        outputs = self.layer.run(theta, layer_cases.as_read(inputs), ctx)
        return outputs, ctx.collected.as_nest()

    def everything(self, theta: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
        """Return outputs, what was collected, and gradients of a scalar of all floating outputs."""
        sources = [theta, [x for x in tf.nest.flatten(inputs) if x.dtype.is_floating]]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs, collected = self.forward(theta, inputs)
            target = scalar([outputs, collected["losses"]])
        gradients = tape.gradient(target, sources, unconnected_gradients="zero")
        # An embedding's gradient is sparse.
        gradients = tf.nest.map_structure(tf.convert_to_tensor, gradients)
        return {"outputs": outputs, "collected": collected, "gradients": gradients}


def scalar(nest: Any) -> tf.Tensor:
    """Return a sum of all floating tensors in which each element counts differently."""
    parts = []
    for number, value in enumerate(tf.nest.flatten(nest)):
        if value.dtype.is_floating:
            flat = tf.reshape(value, (-1,))
            shares = tf.cos(tf.cast(tf.range(tf.size(flat)), tf.float64) + number)
            parts.append(tf.reduce_sum(flat * tf.cast(shares, flat.dtype)))
    return tf.add_n([tf.cast(part, tf.float64) for part in parts])


def assert_equal_nests(ours: Any, expected: Any, tolerance: float = 0.0) -> None:
    tf.nest.assert_same_structure(ours, expected)
    for a, b in zip(tf.nest.flatten(ours), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def traced(run: Run, function: Any, *, known_batch: bool = True) -> Any:
    """Return function(theta, inputs) as a concrete function."""
    specs = run.specs
    if not known_batch:
        specs = tf.nest.map_structure(lambda s: tf.TensorSpec((None, *s.shape[1:]), s.dtype), specs)
    theta = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), run.theta)
    return tf.function(function, autograph=False).get_concrete_function(theta, specs)


@pytest.fixture(scope="module")
def everything_of() -> Iterator[Callable[[Case], tuple[Run, Any]]]:
    """Return each case's float32 layer and its `everything`, traced once for several laws."""

    traced_by_name: dict[str, tuple[Run, Any]] = {}

    def found(case: Case) -> tuple[Run, Any]:
        if case.name not in traced_by_name:
            run = Run(case, "float32")
            traced_by_name[case.name] = run, traced(run, run.everything)
        return traced_by_name[case.name]

    yield found
    traced_by_name.clear()


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({case.name for case in EVERY}) == len(EVERY)  # the traced programs are kept by name


def test_every_exported_layer_has_a_row() -> None:
    exported = {
        value
        for value in vars(layers).values()
        if inspect.isclass(value) and issubclass(value, layers.Layer)
    } - {layers.Layer, layers.Composite}  # bases
    assert exported == {case.params().owner for case in CASES}
    assert {owner.__name__ for owner in exported} <= set(layers.__all__)


@pytest.mark.parametrize(
    ("modules", "cases"),
    [
        ((amoebanet, heads, operations), amoeba_layer_cases.CASES),
        ((block, decoder, embedding, encoder, mixture, softmax), mt_layer_cases.CASES),
    ],
    ids=("image", "translation"),
)
def test_every_layer_of_a_task_s_networks_has_a_row(modules: Any, cases: Any) -> None:
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, layers.Layer)
        and not undefined_methods(cast(type, value))
        and value.__module__ == module.__name__
    }
    assert defined == {case.params().owner for case in cases}


@every_case
@pytest.mark.parametrize("policy", POLICIES)
def test_meta_is_what_comes_out(case: Case, policy: str) -> None:
    run = Run(case, policy)
    for training in (True, False):
        outputs, collected = run.forward(run.theta, run.inputs, training=training)
        tf.nest.assert_same_structure(outputs, run.meta.outputs)
        for value, spec in zip(
            tf.nest.flatten(outputs), tf.nest.flatten(run.meta.outputs), strict=True
        ):
            assert (value.shape, value.dtype) == (spec.shape, spec.dtype)
        assert set(collected["losses"]) == {
            loss.name for loss in run.meta.losses if training or not loss.training_only
        }
        assert set(collected["sums"]) == {metric.name for metric in run.meta.metrics}
        variable = precision.policy(policy).variable
        assert {loss.dtype for loss in collected["losses"].values()} <= {variable}
        if not training:
            assert not collected["moments"]
    assert {v.dtype for v in run.meta.variables} <= {variable}


@every_case
def test_every_weight_has_a_gradient(case: Case) -> None:
    run = Run(case)
    with tf.GradientTape() as tape:
        tape.watch(run.theta)
        outputs, collected = run.forward(run.theta, run.inputs)
        target = scalar([outputs, collected["losses"]])
    gradients = tf.nest.flatten(tape.gradient(target, run.theta))
    assert len(gradients) == sum(not v.is_state for v in run.meta.variables)
    assert all(g is not None and np.any(tf.convert_to_tensor(g) != 0) for g in gradients)


@every_case
def test_variables_stay_below_the_layer_and_differ(case: Case) -> None:
    run = Run(case)
    paths = [v.path for v in run.meta.variables]
    assert len(set(paths)) == len(paths)
    assert all(v.group in ("kernel", "bias", "norm") for v in run.meta.variables)
    frozen = Run(case, trainable=False)
    assert not any(v.trainable for v in frozen.meta.variables)
    assert [v.path for v in frozen.meta.variables] == paths


@every_case
def test_text_round_trip(case: Case) -> None:
    params = case.params()
    assert hyperparams.from_text(params.to_text()) == params


@each_class
def test_recomputed_equals_kept(case: Case, everything_of: Any) -> None:
    # The gradients of a value with several consumers may be summed in another order.
    if case.name.startswith("amoeba_cell"):
        runs = Run(case), Run(case, recompute=True)
        kept, again = (traced(run, run.everything)(run.theta, run.inputs) for run in runs)
        assert_equal_nests(again, kept, 1e-12)
    else:
        run, everything = everything_of(case)
        other = Run(case, "float32", recompute=True)
        again = traced(other, other.everything)(other.theta, other.inputs)
        assert_equal_nests(again, everything(run.theta, run.inputs))


def assert_pure(graph: tf.Graph) -> None:
    graphs = [graph, *(f.graph for f in graph._functions.values())]
    operations = [op for g in graphs for op in g.get_operations()]
    assert not {op.type for op in operations if op.op_def.is_stateful}
    # A cell passes the state; here it is captured, as plain tensors.
    assert tf.resource not in {captured.dtype for captured, _ in graph.captures}


@every_case
def test_programs_are_pure_and_have_kernels_for_gpus_and_of_xla(
    case: Case, everything_of: Any
) -> None:
    _, everything = everything_of(case)
    assert_pure(everything.graph)
    for kinds in (device_kernels.GPU, device_kernels.XLA):
        assert device_kernels.without_kernel([everything.graph.as_graph_def()], None, kinds) == {}


@each_class
def test_programs_for_any_number_of_examples_are_pure(case: Case) -> None:
    run = Run(case, "float32")
    assert_pure(traced(run, run.everything, known_batch=False).graph)


@each_class
def test_xla_compiles_every_layer_to_the_same(case: Case, everything_of: Any) -> None:
    run, everything = everything_of(case)
    compiled = tf.function(everything, autograph=False, jit_compile=True)
    found = compiled(run.theta, run.inputs)
    # XLA on a CPU draws other numbers from the same seed.
    if case.name not in RANDOM:
        assert_equal_nests(found, run.everything(run.theta, run.inputs), 5e-5)


@every_case
def test_draws_depend_only_on_seed_and_path(case: Case) -> None:
    run = Run(case)

    def output(seed: int, path: str = "net", *, training: bool = True) -> list[np.ndarray]:
        ctx = layer_cases.context(run.state, seed=seed, path=path, training=training)
        outputs = run.layer.run(run.theta, layer_cases.as_read(run.inputs), ctx)
        return [np.asarray(value) for value in tf.nest.flatten(outputs)]

    def differ(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
        return any(np.any(x != y) for x, y in zip(a, b, strict=True))

    assert not differ(output(1), output(1))
    assert differ(output(1), output(2)) == (case.name in RANDOM)
    assert differ(output(1), output(1, "other")) == (case.name in RANDOM)
    assert not differ(output(1, training=False), output(2, training=False))


@pytest.mark.parametrize("case", [c for c in EVERY if c.name not in NOT_BY_EXAMPLE], ids=str)
def test_what_is_collected_adds_up_over_unequal_micro_batches(case: Case) -> None:
    run = Run(case)
    whole = run.forward(run.theta, run.inputs)[1]
    first = [
        tf.nest.map_structure(lambda x, rows=rows: x[rows], run.inputs)
        for rows in (slice(1), slice(1, None))
    ]
    parts = [run.forward(run.theta, part)[1] for part in first]
    added = tf.nest.map_structure(lambda *values: tf.add_n(values), *parts)
    assert_equal_nests(added, whole, 1e-12)


@every_case
def test_merged_moments_are_new_values_of_the_statistics(case: Case) -> None:
    run = Run(case, "float32")
    statistics = {f"net/{v.path}": v for v in run.meta.variables if v.is_state}
    moments = run.forward(run.theta, run.inputs)[1]["moments"]
    if run.params.trainable:
        assert set(moments) == {path.rpartition("/")[0] for path in statistics}
    for path, added in moments.items():
        inside = path.removeprefix("net").removeprefix("/")
        parts = {p: p.rpartition("/") for p in statistics}
        state = {name: statistics[p] for p, (at, _, name) in parts.items() if at == path}
        values = {name: tf.zeros(v.shape, v.dtype) for name, v in state.items()}
        merged = run.layer.find(inside).merge_moments(values, added)
        assert set(merged) <= set(state)
        for name, value in merged.items():
            assert (tuple(value.shape), value.dtype) == (state[name].shape, state[name].dtype)
    frozen = Run(case, "float32", trainable=False)
    assert not frozen.forward(frozen.theta, frozen.inputs)[1]["moments"]


def product_flops(op: tf.Operation) -> int:
    """Return 2 × the multiply-adds of an operation; 0 for other operations."""
    given = [tuple(x.shape) for x in op.inputs]
    output = math.prod(tuple(op.outputs[0].shape)) if op.outputs else 0
    if op.type == "MatMul":
        return 2 * output * given[0][-2 if op.get_attr("transpose_a") else -1]
    if op.type == "BatchMatMulV2":
        return 2 * output * given[0][-2 if op.get_attr("adj_x") else -1]
    if op.type == "Conv2D":
        return 2 * output * math.prod(given[1][:3])
    if op.type == "DepthwiseConv2dNative":
        return 2 * output * math.prod(given[1][:2])
    # Gradients: each multiply-add of the forward once, for the gradient of the output.
    if op.type == "Conv2DBackpropInput":
        return 2 * math.prod(given[2]) * math.prod(given[1][:3])
    if op.type == "Conv2DBackpropFilter":
        return 2 * math.prod(given[2]) * math.prod(tuple(op.outputs[0].shape)[:3])
    if op.type == "DepthwiseConv2dNativeBackpropInput":
        return 2 * math.prod(given[2]) * math.prod(given[1][:2])
    if op.type == "DepthwiseConv2dNativeBackpropFilter":
        return 2 * math.prod(given[2]) * math.prod(tuple(op.outputs[0].shape)[:2])
    return 0


def graph_flops(graph: tf.Graph) -> int:
    graphs = [graph, *(f.graph for f in graph._functions.values())]
    return sum(product_flops(op) for g in graphs for op in g.get_operations())


@every_case
def test_flops_are_what_the_graph_multiplies(case: Case, everything_of: Any) -> None:
    run, everything = everything_of(case)
    forward = graph_flops(traced(run, run.forward).graph)
    assert run.meta.flops_forward == forward
    counted = graph_flops(everything.graph) - forward
    frozen = bool(run.meta.variables) and not any(v.trainable for v in run.meta.variables)
    # Here gradients of frozen weights are requested too; a cell does not request them.
    assert run.meta.flops_backward == counted // (2 if frozen else 1)


def test_flops_of_dense_and_convolutions_by_hand() -> None:
    told = {
        name: Run(case).meta.flops_forward
        for case in CASES
        if (name := case.name) in ("dense", "conv", "conv_strided", "separable_conv")
    }
    assert told == {
        "dense": 2 * 5 * 6 * 3,
        "conv": 2 * (4 * 7 * 6) * (3 * 3 * 4) * 5,
        "conv_strided": 2 * (4 * 7 * 2) * (1 * 3 * 4) * 5,
        "separable_conv": 2 * (4 * 7 * 6) * (5 * 5 * 4 + 4 * 3),
    }


def test_kept_bytes_by_hand() -> None:
    names = ("dense", "conv", "activation", "batch_norm", "dropout", "flatten")
    told = {
        policy: {c.name: Run(c, policy).meta.activation_bytes for c in CASES if c.name in names}
        for policy in ("float32", "mixed_bfloat16")
    }
    # Outputs; the input of an activation if its gradient needs it; the mask of dropout; the
    # centred input of a norm, which is always float32.
    assert told["float32"] == {
        "activation": 2 * 4 * 30,
        "batch_norm": 4 * 672,
        "conv": 4 * 840,
        "dense": 4 * 15,
        "dropout": (4 + 1) * 120,
        "flatten": 0,
    }
    assert told["mixed_bfloat16"] == {
        "activation": 2 * 2 * 30,
        "batch_norm": 4 * 672,
        "conv": 2 * 840,
        "dense": 2 * 15,
        "dropout": (2 + 1) * 120,
        "flatten": 0,
    }


def test_children_are_named_by_class_and_number() -> None:
    children = [
        layers.MaxPool2D.Params(),
        layers.Dense.Params(units=1),
        layers.Dense.Params(units=1, name="dense_1"),
        layers.Dense.Params(units=1),
        layers.MultiHeadAttention.Params(units=1, heads=1),
    ]
    names = [layer.name for layer in composite.named(children)]
    assert names == ["max_pool2d", "dense", "dense_1", "dense_2", "multi_head_attention"]
