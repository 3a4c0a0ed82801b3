"""Times of a cell's slots come from the programs that its slots run, and from who computes too."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, schedule
from lingvo_gpipe.execution import placement
from lingvo_gpipe.keras_layers import adapter
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.plan import machine_memory, slot_times
from lingvo_gpipe.plan.measured import cell_runner, cell_times
from lingvo_gpipe.schedule import simulate

FIELDS = {name: tf.TensorSpec([8, 4]) for name in ("x", "target")}


def params(num_layers: int = 3, **fields: Any) -> Any:
    own = [layers.Dense.Params(units=4) for _ in range(num_layers)]
    settings: dict[str, Any] = {"num_partitions": 2, "num_micro_batches": 4, **fields}
    return PipeliningLayer.Params(layers=[*own, layers.MeanSquaredError.Params()], **settings)


class FakeRunner:
    """Programs of constant times: F 1, K 2, R 3, FB 4, B 10, I 20, W 30; 5 less from kept."""

    made: ClassVar[list[int]] = []
    watches: ClassVar[list[cell_runner.Stopwatch]] = []

    def __init__(self, _: Any, __: Any, cell: network.Cell) -> None:
        self.made.append(cell.index)

    def forward_s(self, watch: cell_runner.Stopwatch) -> float:
        self.watches.append(watch)
        return 1.0

    def kept_forward_s(self, _: Any) -> float:
        return 2.0

    def recomputation_s(self, _: Any) -> float:
        return 3.0

    def fused_s(self, _: Any) -> float:
        return 4.0

    def backward_s(self, _: Any, phase: str = "B", *, from_kept: bool) -> float:
        return {"B": 10.0, "I": 20.0, "W": 30.0}[phase] - 5.0 * from_kept


def measured(
    monkeypatch: pytest.MonkeyPatch, given: Any, known: cell_times.Known | None = None
) -> cell_times.StepTimes | None:
    FakeRunner.made, FakeRunner.watches = [], []
    monkeypatch.setattr(cell_times, "CellRunner", FakeRunner)
    monkeypatch.setattr(placement, "num_cores", lambda: 2)
    analysis = network.analyze(given, FIELDS)
    needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    return cell_times.measure(given, analysis, needs, known)


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        # One forward of the last cell meets its backward.
        ({}, (1, 10, 0, 0, 0, 0, 10), (1, 10, 4, 0, 0, 0, 10)),
        ({"recompute": "never"}, (2, 5, 0, 0, 0, 0, 5), (2, 5, 0, 0, 0, 0, 5)),
        # One forward of the four is kept.
        (
            {"recompute": "except_last", "fuse": False},
            (1.25, 8.75, 0, 0, 0, 0, 8.75),
            (1.25, 8.75, 0, 0, 0, 0, 8.75),
        ),
        ({"schedule": "1f1b"}, (1, 10, 0, 0, 0, 0, 10), (1, 3, 4, 0, 0, 0, 3)),
        # The first cell returns no gradient: its backward is not split.
        (
            {"schedule": "zb_h1", "recompute": "never"},
            (2, 5, 0, 0, 0, 0, 5),
            (2, 0, 0, 15, 25, 0, 40),
        ),
        # One R has a slot of its own: the last cell is fused.
        (
            {"schedule": "1f1b", "recompute": "early"},
            (1, 5, 0, 0, 0, 3, 8),
            (1, 3, 4, 0, 0, 0, 3),
        ),
    ],
)
def test_slots_take_the_time_of_the_programs_that_they_run(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    first: tuple[float, ...],
    last: tuple[float, ...],
) -> None:
    times = measured(monkeypatch, params(**fields))
    assert times is not None
    assert times.busy == [slot_times.SlotTimes(*first), slot_times.SlotTimes(*last)]
    assert times.num_at_once == 2


def test_equal_cells_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = measured(monkeypatch, params(num_layers=9, num_partitions=5, cuts=(2,) * 5))
    assert times is not None
    assert len(times.cells) == 5
    assert FakeRunner.made == [0, 1, 4]  # the first one returns no gradient, the last has a loss


def test_equal_cells_of_other_schedules_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cell of ZB-H1 has whole backwards, like that of 1F1B with as many live."""
    known: cell_times.Known = []
    split: dict[str, Any] = {"schedule": "zb_h1", "recompute": "never"}
    first = measured(monkeypatch, params(**split), known)
    assert FakeRunner.made == [0, 1]
    assert measured(monkeypatch, params(**split), known) == first
    assert FakeRunner.made == []
    measured(monkeypatch, params(schedule="1f1b", recompute="never"), known)
    assert FakeRunner.made == [1]
    measured(monkeypatch, params(schedule="gpipe", recompute="never"), known)
    assert FakeRunner.made == [0, 1]  # more micro-batches are live
    monkeypatch.setattr(cell_times, "devices_at_once", lambda _: ["one"])
    measured(monkeypatch, params(**split), known)
    assert FakeRunner.made == [0, 1]


@pytest.mark.parametrize(
    ("fields", "cells", "live"),
    [
        ({}, 1, 4),
        ({"num_micro_batches": 8}, 1, 4),  # the limit
        ({"schedule": "1f1b"}, 1, 2),
        ({"schedule": "interleaved", "cells_per_device": 2}, 2, 4),
    ],
)
def test_values_are_as_many_as_cells_and_live_micro_batches_of_a_device(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], cells: int, live: int
) -> None:
    measured(monkeypatch, params(num_layers=4, **fields))
    found = {(watch.num_cells, watch.num_live) for watch in FakeRunner.watches}
    assert found == {(cells, live)}


def test_copies_for_live_micro_batches_need_what_these_hold() -> None:
    def needed(schedule: str) -> int:
        analysis = network.analyze(params(num_layers=4, schedule=schedule, fuse=False), FIELDS)
        cell = analysis.cells[0]
        needs = memory_formulas.CellBytes(forward=1000, backward=3000)
        return cell_times._program_bytes(analysis, cell, needs)

    analysis = network.analyze(params(num_layers=4), FIELDS)
    cell = analysis.cells[0]
    values = [analysis.specs[v] for v in (*cell.imports, *cell.exports_with_gradient)]
    assert len(values) == 2
    # Four are live instead of two.
    assert needed("gpipe") - needed("1f1b") == 2 * sum(map(base.spec_bytes, values))


def test_cells_that_may_not_fit_the_host_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = machine_memory.MachineMemory(100, 100)
    monkeypatch.setattr(machine_memory, "of_this_machine", lambda: memory)
    assert measured(monkeypatch, params()) is None


def test_a_device_is_faster_while_others_wait() -> None:
    table = schedule.make("gpipe", 2, 2)
    one, two = (slot_times.SlotTimes(*[s] * 7) for s in (2.0, 1.0))
    times = cell_times.StepTimes((cell_times.CellTimes(one, two),) * 2, 2)

    def simulated(cells: Any) -> simulate.Timeline:
        return simulate.simulate(table, [c.forward_s for c in cells], [c.backward_s for c in cells])

    # F F . . . B B and . F F B B . .: of four slots of a device, one half computes beside others.
    assert simulated([one, one]).makespan_s == 12.0
    busy = cell_times._busy_shares(simulated([one, one]), 1, 2)
    assert busy == [0.5, 0.5]
    length_s = times.timeline(simulated, 1).makespan_s
    assert length_s == pytest.approx(6 * 4 / 3)
    # Replicas use the other cores, and a device that was measured alone is as fast as it is.
    assert times.timeline(simulated, 2).makespan_s == 12.0
    alone = cell_times.StepTimes((cell_times.CellTimes(one, None),) * 2, 1)
    assert alone.timeline(simulated, 1).makespan_s == 12.0


@pytest.mark.parametrize(
    "table",
    [
        "0F0,0F1,0B1,0F2,0F3,0I3,0W3,0B2,0B0",
        # Two cells, whose programs take two sets of values in turn.
        "0F0,1F0,0F1,1F1,1B1,1I0,1W0,0B0,0B1,0F2,1F2,1B2,0B2,0F3,1F3,1B3,0B3",
    ],
)
@pytest.mark.parametrize("calls", [1, 3])
def test_every_program_of_a_cell_runs(
    monkeypatch: pytest.MonkeyPatch, table: str, calls: int
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 1)
    monkeypatch.setattr(cell_runner, "_LONG_S", 0.0 if calls == 1 else 100.0)
    monkeypatch.setattr(cell_runner, "_FEWEST_CALLS", calls)
    monkeypatch.setattr(cell_runner, "_MOST_CALLS", calls)
    given = params(num_layers=2, num_partitions=1, schedule=table)
    given.set(recompute="except_last", fuse=False)
    analysis = network.analyze(given, FIELDS)
    needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    times = cell_times.measure(given, analysis, needs)
    assert times is not None
    cell = times.busy[-1]
    assert min(cell.forward_s, cell.backward_s, cell.weight_gradient_s) > 0.0


@pytest.mark.parametrize("table", [None, "0F0,1F0,1I0,1W0,0I0,0W0"])
def test_a_loop_s_lists_are_measured_as_kept(
    monkeypatch: pytest.MonkeyPatch, table: str | None
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 1)
    lstm = adapter.from_keras(keras.layers.LSTM(4, return_sequences=True)).set(name="lstm")
    own = [layers.Dense.Params(units=4), lstm, layers.MeanSquaredError.Params()]
    given = PipeliningLayer.Params(layers=own, cuts=(1, 2), recompute="never")
    given.set(schedule=table or "interleaved", cells_per_device=None if table else 2)
    fields = {name: tf.TensorSpec([2, 5, 4]) for name in ("x", "target")}
    analysis = network.analyze(given, fields)
    needs = [memory_formulas.cell_bytes(analysis, cell) for cell in analysis.cells]
    times = cell_times.measure(given, analysis, needs)
    assert times is not None
    assert times.busy[1].forward_s > 0.0


def test_a_cell_without_gradients_to_return_runs_its_whole_backward_as_w() -> None:
    """As in a step: its I computes nothing, so nothing is left for W."""
    own = [layers.Dense.Params(units=4, activation="relu") for _ in range(4)]
    given = PipeliningLayer.Params(
        layers=[*own, layers.MeanSquaredError.Params()],
        num_partitions=2,
        num_micro_batches=4,
        schedule="zb_v",
    )
    analysis = network.analyze(given, FIELDS)
    made = [info.params.instantiate() for info in analysis.layers]
    watch = cell_runner.Stopwatch(["/device:CPU:0"], runs=1, warm_up=1)
    names = {}
    for cell in analysis.cells[:2]:
        runner = cell_runner.CellRunner(analysis, made, cell)
        runner.backward_s(watch, "W", from_kept=False)
        names[cell.index] = {name.partition(" ")[0] for name in runner._programs.graphs}
    assert names == {0: {"B"}, 1: {"I", "W"}}


@pytest.mark.parametrize(("limit", "fits"), [(2**30, False), (2**31, True)])
def test_the_memory_of_a_control_group_counts(
    monkeypatch: pytest.MonkeyPatch, limit: int, fits: bool
) -> None:
    swap = 2**30
    memory = machine_memory.MachineMemory(limit + swap, 0, is_group=True, swap_bytes=swap)
    monkeypatch.setattr(machine_memory, "of_this_machine", lambda: memory)
    assert cell_runner.fits_host(2**30) is fits
