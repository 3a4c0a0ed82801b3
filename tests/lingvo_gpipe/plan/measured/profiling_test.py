from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.execution import cell_programs, outer_function, placement
from lingvo_gpipe.plan.measured import cell_runner, profiling


def pipe(*own: Any, **fields: Any) -> Any:
    return pipelining.PipeliningLayer.Params(layers=list(own), **fields)


def floats(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


class FakeClock:
    """A clock that is read twice per run; each run takes the next of the given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.readings = 0
        self.seconds = itertools.cycle(seconds)

    def __call__(self) -> float:
        self.readings += 1
        if self.readings % 2 == 0:
            self.now += next(self.seconds)
        return self.now


@pytest.fixture(autouse=True)
def _calls_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure short programs by several calls, which other tests do not."""
    monkeypatch.setattr(cell_runner, "_LONG_S", 0.2)


def test_a_layer_is_timed_by_forward_kept_and_recomputing_backward() -> None:
    clock = FakeClock(*[1.0] * 3, *[3.0] * 3, *[5.0] * 3, *[4.0] * 3)
    params = pipe(layers.Dense.Params(units=3), layers.MeanSquaredError.Params())
    times = profiling.layer_times(
        params, {"x": floats(4, 2), "target": floats(4, 3)}, runs=2, warm_up=1, clock=clock
    )
    assert times == (profiling.LayerTime(1.0, 3.0, 5.0, 4.0),) * 2
    assert (times[0].recomputed_s, times[0].again_s, times[0].fused_s) == (6.0, 2.0, 4.0)
    assert profiling.LayerTime(1.0, 3.0, 5.0).fused_s == 4.0


def test_the_median_of_the_runs_counts_and_none_of_the_warm_up() -> None:
    clock = FakeClock(100.0, 2.0, 50.0, 1.0)
    params = pipe(layers.Dense.Params(units=3, trainable=False))
    (told,) = profiling.layer_times(params, {"x": floats(4, 2)}, runs=3, warm_up=1, clock=clock)
    # A layer without trained weights has no backward.
    assert told == profiling.LayerTime(2.0, 0.0, 0.0)


def test_short_calls_are_measured_many_at_a_time() -> None:
    clock = FakeClock(100.0, 0.01, 0.06, 0.09, 0.01, 0.03)
    params = pipe(layers.Dense.Params(units=3, trainable=False))
    (time,) = profiling.layer_times(params, {"x": floats(4, 2)}, runs=2, warm_up=2, clock=clock)
    # Of 0.01 s each, three calls take long enough; there are five, without the first.
    assert time.forward_s == pytest.approx(((0.06 + 0.09) - (0.01 + 0.03)) / 2 / 4)


def test_a_call_that_is_not_long_is_measured_three_at_a_time() -> None:
    clock = FakeClock(0.1, 0.16, 0.1)  # of which 0.03 a call, and 0.07 for passing its values
    params = pipe(layers.Dense.Params(units=3, trainable=False))
    (time,) = profiling.layer_times(params, {"x": floats(4, 2)}, runs=1, warm_up=1, clock=clock)
    assert time.forward_s == pytest.approx(0.03)


def test_a_program_that_the_noise_hides_takes_some_time() -> None:
    # Five calls of it end sooner than one that the machine disturbed: an upper bound, never 0.
    clock = FakeClock(0.01, 0.02, 0.03)
    params = pipe(layers.Dense.Params(units=3, trainable=False))
    (time,) = profiling.layer_times(params, {"x": floats(4, 2)}, runs=1, warm_up=1, clock=clock)
    assert time.forward_s == pytest.approx(0.02 / 5)


def test_calls_take_copies_of_the_values_in_turn() -> None:
    taken: list[tf.Tensor] = []
    begun: list[tf.Tensor] = []
    left: list[tf.Tensor] = []

    def call(argument: Any, own: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
        taken.append(argument)
        begun.append(own[0])
        left.append(own[0] + argument)
        return argument, left[-1:]

    clock = FakeClock(0.01, 0.02, 0.03)
    watch = cell_runner.Stopwatch(
        ["CPU:0"], num_cells=2, num_live=3, runs=1, warm_up=1, clock=clock
    )
    watch.median_s(call, tf.constant(1.0), [tf.constant(0.0)])
    several = taken[-5:]  # after the graph of one call
    assert len({id(value) for value in several[:3]}) == 3
    assert [several[3] is several[0], several[4] is several[1]] == [True, True]
    assert all(begun[-k] is left[-k - 2] for k in (1, 2, 3))


@pytest.mark.parametrize("value", [[True], [1], ["a"]])
def test_only_floating_tensors_are_copied_as_gpus_copy_no_others(value: list[object]) -> None:
    tensor = tf.constant(value)
    assert cell_runner._copy(tensor) is tensor


def test_runs_of_a_single_call_take_copies_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tf.Tensor] = []
    given: list[tf.Tensor] = []
    copy, call_outer = cell_runner._copy, outer_function.OuterFunction.__call__

    def noted_copy(tensor: tf.Tensor) -> tf.Tensor:
        copied.append(copy(tensor))
        return copied[-1]

    def noted_call(self: Any, values: Any) -> Any:
        given.append(values[0][0][0])
        return call_outer(self, values)

    monkeypatch.setattr(cell_runner, "_copy", noted_copy)
    monkeypatch.setattr(outer_function.OuterFunction, "__call__", noted_call)
    clock = FakeClock(1.0)
    watch = cell_runner.Stopwatch(["CPU:0"], num_live=2, runs=3, warm_up=1, clock=clock)
    assert watch.median_s(lambda argument, own: (argument, own), tf.zeros([64, 64])) == 1.0
    addresses = {np.asarray(memoryview(tensor)).ctypes.data for tensor in copied}
    assert len(copied) == len(addresses) == 2
    assert [value is copied[0] for value in given] == [True, False, True, False]


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"num_partitions": 3}, 2)])
def test_layers_run_on_as_many_devices_at_once_as_cells_on_cores(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, int], count: int
) -> None:
    called: list[str] = []
    forward = cell_programs.CellPrograms.forward

    def noted(self: Any, *args: Any) -> Any:
        outputs = forward(self, *args)
        called.append(tf.nest.flatten(outputs.as_nest())[0].device)
        return outputs

    monkeypatch.setattr(cell_programs.CellPrograms, "forward", noted)
    monkeypatch.setattr(placement, "num_cores", lambda: 2)
    own = [layers.Dense.Params(units=3, trainable=False) for _ in range(3)]
    params = pipe(*own, num_micro_batches=3, **fields)
    batch = {"x": floats(3, 3)}
    profiling.layer_times(params, batch, runs=1, warm_up=0, clock=FakeClock(1.0))
    assert len(set(called)) == count


def test_strings_are_read_like_any_field() -> None:
    clock = FakeClock(1.0, 2.0)
    (told,) = profiling.layer_times(
        pipe(layers.Identity.Params()),
        {"x": tf.TensorSpec([4], tf.string)},
        runs=1,
        warm_up=0,
        clock=clock,
    )
    assert told == profiling.LayerTime(1.0, 0.0, 0.0)


def test_equal_layers_are_measured_once_and_others_each() -> None:
    own = [layers.Dense.Params(units=4) for _ in range(5)] + [layers.Dense.Params(units=3)]
    clock = FakeClock(*(float(n) for n in range(1, 100)))
    costs = profiling.balance_by_time(
        pipe(*own), {"x": floats(4, 4)}, runs=1, warm_up=0, clock=clock
    )
    # The first returns no gradient of its input.
    first, *equal, last = costs
    assert len(set(equal)) == 1
    assert len({first, equal[0], last}) == 3


def test_the_last_layer_of_a_network_without_a_loss_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs: list[Any] = []
    init = cell_programs.CellPrograms.__init__

    def remember(self: Any, *args: Any) -> None:
        init(self, *args)
        programs.append(self)

    monkeypatch.setattr(cell_programs.CellPrograms, "__init__", remember)
    own = [layers.Dense.Params(units=4) for _ in range(2)] + [layers.Dense.Params(units=3)]
    clock = FakeClock(1.0, 3.0, 5.0, 4.0)
    times = profiling.layer_times(pipe(*own), {"x": floats(4, 4)}, runs=1, warm_up=0, clock=clock)
    assert times == (profiling.LayerTime(1.0, 3.0, 5.0, 4.0),) * 3
    for each in programs:
        specs = tf.nest.flatten(each.graphs["F"].structured_outputs)
        assert [spec.shape[0] for spec in specs] == [4]
        assert each.graphs["B"].outputs


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
    clock = FakeClock(1.0, 3.0, 5.0, 4.0)
    costs = profiling.balance_by_time(params, batch, runs=1, warm_up=0, clock=clock)
    assert costs == (cost, cost)
