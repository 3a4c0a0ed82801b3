from __future__ import annotations

import itertools
from typing import Any

import keras
import pytest
import tensorflow as tf

from benchmarks import activations
from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.execution import cell_calls, cell_programs
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.plan import memory_timeline, profiling, step_plan


def pipe(*own: Any, **fields: Any) -> Any:
    return pipelining.PipeliningLayer.Params(layers=list(own), **fields)


def floats(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


class FakeClock:
    """A clock that is read twice per run; a run takes the next of the seconds given."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.readings = 0
        self.seconds = itertools.cycle(seconds)

    def __call__(self) -> float:
        self.readings += 1
        if self.readings % 2 == 0:
            self.now += next(self.seconds)
        return self.now


def regression(*own: Any) -> tuple[Any, dict[str, tf.TensorSpec]]:
    spec = floats(512, 128)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


def images() -> tuple[Any, dict[str, tf.TensorSpec]]:
    own = []
    for _ in range(4):
        own += [
            layers.Conv2D.Params(filters=16, use_bias=False),
            layers.BatchNorm.Params(),
            layers.Activation.Params(activation="relu"),
        ]
    spec = floats(8, 32, 32, 16)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


def sequences() -> tuple[Any, dict[str, tf.TensorSpec]]:
    own = [layers.TransformerLayer.Params(units=64, heads=4, hidden=256) for _ in range(4)]
    spec = floats(16, 64, 64)
    return pipe(*own, layers.MeanSquaredError.Params()), {"x": spec, "target": spec}


CASES = {
    "dense": regression(*(layers.Dense.Params(units=128, activation="relu") for _ in range(8))),
    "gelu": regression(
        *(
            layers.Residual.Params(body=[layers.Dense.Params(units=128, activation="gelu")])
            for _ in range(8)
        )
    ),
    "images": images(),
    "sequences": sequences(),
}


@pytest.mark.parametrize("name", CASES)
def test_a_backward_holds_what_is_asked_of_the_allocator(name: str) -> None:
    params, fields = CASES[name]
    analysis = network.analyze(params, fields)
    net = memory_timeline.Network(params, analysis)
    made = [info.params.instantiate() for info in analysis.layers]
    programs = cell_programs.CellPrograms(0, analysis, made, jit=False)
    (cell,) = analysis.cells
    given = profiling._values(analysis, cell)
    totals = [tf.zeros(analysis.variables[path].shape) for path in cell.weights]

    upstream = cell_calls.BackwardInputs({}, [tf.ones([])], totals)

    def backward() -> Any:
        return programs.backward(cell, given, upstream)

    (told,) = profiling.cell_bytes(net)
    assert not told.is_estimate
    backward()
    # Which operations run beside each other is the machine's: a busy one may hold a tensor or two
    # more in most of its runs, none holds fewer. What is asked of the allocator counts, not what it
    # gives: where memory lies in pieces, a piece of up to twice the size.
    held = min(activations.traced_peak_bytes(backward) for _ in range(5))
    assert told.backward == pytest.approx(held, rel=0.1)


def test_traced_activations_are_in_the_plan_and_said_to_be() -> None:
    params, fields = CASES["gelu"]
    (by_formula,) = step_plan.make(params, fields).partitions
    profiled = step_plan.make(params, fields, profile=True)
    (needs,) = profiling.cell_bytes(
        memory_timeline.Network(params, network.analyze(params, fields))
    )
    imports = 2 * 512 * 128 * 4
    (cell,) = profiled.partitions
    assert profiled.profiled
    # The last cell's only micro-batch runs as one program.
    assert cell.activation_bytes == needs.fused + imports
    # The formula knows two tensors per gelu; its gradient keeps more.
    assert by_formula.activation_bytes < cell.activation_bytes


def test_a_kept_forward_leaves_what_tensorflow_keeps_of_it() -> None:
    block = layers.Residual.Params(body=[layers.Dense.Params(units=128, activation="gelu")])
    params, fields = regression(block)
    params.set(recompute="never", num_micro_batches=4)
    (needs,) = profiling.cell_bytes(
        memory_timeline.Network(params, network.analyze(params, fields))
    )
    one = 512 // 4 * 128 * 4
    # Of gelu the sum, its half, its negative, that by √2 and erfc of it; the error's difference.
    assert needs.residual == pytest.approx(6 * one, rel=1e-3)
    (cell,) = step_plan.make(params, fields, profile=True).partitions
    working = max(needs.kept_backward, needs.kept_forward - needs.residual)
    # x and target of all four, and what each keeps.
    assert cell.activation_bytes == 4 * (2 * one + needs.residual) + working


def test_a_loop_holds_what_its_formula_tells_and_is_an_estimate() -> None:
    lstm = adapter.from_keras(keras.layers.LSTM(64))
    params = pipe(lstm, layers.MeanSquaredError.Params(), num_partitions=2, cuts=(1, 1))
    fields = {"x": floats(32, 50, 64), "target": floats(32, 64)}
    net = memory_timeline.Network(params, network.analyze(params, fields))
    looped, plain = profiling.cell_bytes(net)
    told = memory_timeline.estimate(net, 0)
    assert looped.is_estimate
    assert looped.forward >= told.forward > 50 * 32 * 64 * 4
    assert (looped.backward, looped.residual) == (told.backward, told.residual)
    assert not plain.is_estimate


def test_more_threads_hold_more_at_once() -> None:
    params, fields = CASES["sequences"]
    net = memory_timeline.Network(params, network.analyze(params, fields))
    (one,), (four,) = profiling.cell_bytes(net, 1), profiling.cell_bytes(net, 4)
    assert (one.residual, one.backward) != (four.residual, four.backward)
    assert one.residual == four.residual


def test_a_layer_is_timed_by_forward_kept_and_recomputing_backward() -> None:
    clock = FakeClock(1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0)
    params = pipe(layers.Dense.Params(units=3), layers.MeanSquaredError.Params())
    times = profiling.layer_times(
        params, {"x": floats(4, 2), "target": floats(4, 3)}, runs=2, warm_up=1, clock=clock
    )
    assert times == (profiling.LayerTime(1.0, 3.0, 5.0),) * 2
    assert (times[0].inner_s, times[0].again_s) == (6.0, 2.0)


def test_the_median_of_the_runs_counts_and_none_of_the_warm_up() -> None:
    clock = FakeClock(100.0, 2.0, 50.0, 1.0)
    params = pipe(layers.Dense.Params(units=3, trainable=False))
    (told,) = profiling.layer_times(params, {"x": floats(4, 2)}, runs=3, warm_up=1, clock=clock)
    # A layer without anything to train has no backward.
    assert told == profiling.LayerTime(2.0, 0.0, 0.0)


def test_equal_layers_are_measured_once_and_others_each() -> None:
    own = [layers.Dense.Params(units=4) for _ in range(5)] + [layers.Dense.Params(units=3)]
    clock = FakeClock(*(float(n) for n in range(1, 100)))
    costs = profiling.balance_by_time(
        pipe(*own), {"x": floats(4, 4)}, runs=1, warm_up=0, clock=clock
    )
    # The first has no gradient to hand on, and the last one's outputs leave the network.
    first, *equal, last = costs
    assert len(set(equal)) == 1
    assert len({first, equal[0], last}) == 3


def test_skips_ties_and_integers_are_timed_like_any_layer() -> None:
    params = pipe(
        layers.Embedding.Params(vocabulary=9, units=4, reads=("ids",), writes=("x",)),
        layers.Dense.Params(units=4, writes=("skip",)),
        layers.BatchNorm.Params(),
        layers.Add.Params(reads=("x", "skip")),
        layers.SequenceSoftmax.Params(
            vocabulary=9, reads=("x", "label"), tie={"kernel": "embedding/table"}
        ),
        num_partitions=2,
        num_micro_batches=2,
    )
    fields = {"ids": tf.TensorSpec([4, 3], tf.int32), "label": tf.TensorSpec([4, 3], tf.int32)}
    costs = profiling.balance_by_time(params, fields, runs=1, warm_up=0, clock=FakeClock(1.0))
    assert costs == (2.0,) * 5
    cut = params.copy().set(costs=costs)
    assert network.analyze(cut, fields).cuts == (2, 3)


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({"recompute": "full", "fuse": False}, 6.0),
        ({"recompute": "never"}, 4.0),
        ({"recompute": "never,never"}, 4.0),
        ({"recompute": "full,never"}, 5.0),
        # One micro-batch of the four is kept.
        ({"recompute": "except_last", "fuse": False}, 5.5),
        # The last cell is fused with every backward.
        ({"recompute": "full", "schedule": "1f1b"}, 5.0),
    ],
)
def test_recomputation_counts_as_often_as_the_mean_cell_does_it(
    fields: dict[str, Any], cost: float
) -> None:
    params = pipe(
        layers.Dense.Params(units=3),
        layers.MeanSquaredError.Params(),
        num_partitions=2,
        num_micro_batches=4,
        **fields,
    )
    batch = {"x": tf.ones([4, 2]), "target": tf.ones([4, 3])}
    clock = FakeClock(1.0, 3.0, 5.0)
    costs = profiling.balance_by_time(params, batch, runs=1, warm_up=0, clock=clock)
    assert costs == (cost, cost)
