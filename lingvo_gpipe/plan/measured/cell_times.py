"""Times of the slots of whole cells, measured by the very programs that a step runs.

The times of a cell's layers do not add up to its own: a cell's tensors fit into caches less often,
and TensorFlow runs operations of several layers at once. Where devices share cores, a slot takes
less time while other devices wait, so every program is measured on one device alone, too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.network.memory_formulas import CellBytes
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.plan.measured import profiling
from lingvo_gpipe.plan.measured.cell_runner import CellRunner, Stopwatch, devices_at_once, fits_host
from lingvo_gpipe.plan.slot_times import SlotTimes
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Phase

_ROUNDS = 3  # until times and timeline fit each other
_MOST_LIVE = 4  # micro-batches that have copies of their own, since these take memory

_Times = TypeVar("_Times")


@dataclasses.dataclass(frozen=True, slots=True)
class CellTimes:
    """Times of the slots of a cell, measured or by formula.

    Attributes:
        busy: while as many devices compute as there are cores, or as a step has.
        alone: while no other device computes; None: it is alone in `busy`.
    """

    busy: SlotTimes
    alone: SlotTimes | None

    def shorter(self, other: CellTimes) -> CellTimes:
        """Return the shorter of two times of each slot."""
        alone = self.alone and other.alone and self.alone.shorter(other.alone)
        return CellTimes(self.busy.shorter(other.busy), alone)

    def at(self, share: float) -> SlotTimes:
        """Return the times where all cores are used during a share of the slots' time.

        >>> one, other = SlotTimes(*[3.0] * 7), SlotTimes(*[1.5] * 7)
        >>> CellTimes(one, other).at(0.5).forward_s
        2.0
        """
        if self.alone is None:
            return self.busy
        pairs = zip(dataclasses.astuple(self.busy), dataclasses.astuple(self.alone), strict=True)
        return SlotTimes(
            *(
                1.0 / (share / busy + (1.0 - share) / min(busy, alone)) if busy and alone else busy
                for busy, alone in pairs
            )
        )


Known: TypeAlias = list[tuple[tuple[object, ...], CellTimes]]
"""What makes cells equal, and the times of those that were measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of the slots of all cells.

    Attributes:
        cells: times of each of them.
        num_at_once: how many devices computed at once in `CellTimes.busy`.
    """

    cells: tuple[CellTimes, ...]
    num_at_once: int

    @property
    def busy(self) -> list[SlotTimes]:
        """Times of each cell while other devices compute."""
        return [cell.busy for cell in self.cells]

    def with_cells(self, others: Sequence[CellTimes | None]) -> StepTimes:
        """Return the same with other times of some cells; None: those that it has."""
        pairs = zip(others, self.cells, strict=True)
        return dataclasses.replace(self, cells=tuple(other or own for other, own in pairs))

    def timeline(
        self, simulated: Callable[[Sequence[SlotTimes]], simulate.Timeline], num_replicas: int
    ) -> simulate.Timeline:
        """Return the timeline of a step whose devices share cores.

        How long slots take follows from how many devices compute meanwhile, and that from the
        timeline: both are computed in turn.

        Args:
            simulated: times of each cell's slots → timeline of one replica.
            num_replicas: R; their devices compute at the same times.
        """
        timeline = simulated(self.busy)
        if self.num_at_once == 1:
            return timeline
        for _ in range(_ROUNDS):
            shares = _busy_shares(timeline, num_replicas, self.num_at_once)
            timeline = simulated(
                [cell.at(share) for cell, share in zip(self.cells, shares, strict=True)]
            )
        return timeline


def _busy_shares(timeline: simulate.Timeline, num_replicas: int, at_once: int) -> list[float]:
    """Return for each cell how much of its slots' time all cores are used, in [0, 1].

    A time in which some of them are used counts in part.

    Args:
        timeline: of one replica.
        num_replicas: R.
        at_once: number of devices that use all cores; at least 2.
    """
    spans = timeline.spans
    starts = np.array([span.start_s for span in spans])
    ends = np.array([span.end_s for span in spans])
    times, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    changes = np.zeros(len(times))
    np.add.at(changes, places, np.repeat([1.0, -1.0], len(spans)))
    computing = np.minimum(np.cumsum(changes)[:-1] * num_replicas, at_once)
    used = np.maximum(computing - 1.0, 0.0) / (at_once - 1)
    until = np.concatenate([[0.0], np.cumsum(used * np.diff(times))])
    busy_s = np.interp(ends, times, until) - np.interp(starts, times, until)
    cells = [span.slot.cell for span in spans]
    num_cells = timeline.table.num_cells
    wholes = np.bincount(cells, ends - starts, num_cells)
    return [float(s) for s in np.bincount(cells, busy_s, num_cells) / wholes]


def by_layers(analysis: network.Analysis, times: Sequence[profiling.LayerTime]) -> StepTimes:
    """Return the times of cells as those of their layers add up.

    Args:
        analysis: analysis of the network of one replica.
        times: of each layer.
    """
    cells = (slot_times.of_cell(analysis, cell, times) for cell in analysis.cells)
    return StepTimes(tuple(CellTimes(cell, None) for cell in cells), 1)


def measure(
    params: network.PipelineParams,
    analysis: network.Analysis,
    needs: Sequence[CellBytes],
    known: Known | None = None,
) -> StepTimes | None:
    """Measure the programs of every cell; equal cells once.

    Args:
        params: params of the network, with all replicas.
        analysis: analysis of the network of one replica.
        needs: bytes that the programs of each cell hold.
        known: cells that were measured before, which are not measured again; those that are
            measured now are added.

    Returns:
        Times of each cell; None where a network has no loss, or where the cells of all devices
        that run at once may need more than half of the host's memory.
    """
    if not any(cell.losses for cell in analysis.cells):
        return None
    devices = devices_at_once(params)
    size = max(_program_bytes(analysis, *pair) for pair in zip(analysis.cells, needs, strict=True))
    if not fits_host(len(devices) * size):
        return None
    return on_devices(analysis, devices, known)


def on_devices(
    analysis: network.Analysis, devices: Sequence[str], known: Known | None = None
) -> StepTimes:
    """Measure the programs of every cell on these devices at once; see `measure`.

    Args:
        analysis: analysis of the network.
        devices: names of the devices.
        known: see `measure`.
    """
    known = [] if known is None else known
    return StepTimes(tuple(_each(analysis, devices, _measured, known)), len(devices))


def of_compiled(analysis: network.Analysis, devices: Sequence[str]) -> list[CellTimes | None]:
    """Measure the programs of every cell, all of them compiled by XLA.

    Args:
        analysis: analysis of the network with `jit_compile`.
        devices: see `on_devices`.

    Returns:
        Times of each cell; None: XLA cannot compile it.
    """

    def measured(runner: CellRunner, *settings: Any) -> CellTimes | None:
        try:
            return _measured(runner, *settings)
        except tf.errors.OpError:  # an operation that XLA does not have, strings, dynamic shapes
            return None

    return _each(analysis, devices, measured, [])


def _each(
    analysis: network.Analysis,
    devices: Sequence[str],
    measured: Callable[[CellRunner, network.Analysis, network.Cell, Sequence[str]], _Times],
    known: list[tuple[tuple[object, ...], _Times]],
) -> list[_Times]:
    """Return what is measured of each cell, of equal ones once; `known` has those before."""
    layers = [info.params.instantiate() for info in analysis.layers]
    settings = (_most_cells(analysis), _most_live(analysis), *devices)
    found = []
    for cell in analysis.cells:
        work = (*_work(analysis, cell), *settings)
        equal = [times for other, times in known if other == work]
        if not equal:
            runner = CellRunner(analysis, layers, cell)
            equal = [measured(runner, analysis, cell, devices)]
            known.append((work, equal[0]))
        found += equal
    return found


def _measured(
    runner: CellRunner, analysis: network.Analysis, cell: network.Cell, devices: Sequence[str]
) -> CellTimes:
    counts = _most_cells(analysis), _most_live(analysis)
    busy = _slot_times(analysis, cell, runner, Stopwatch(devices, *counts))
    if len(devices) == 1:
        return CellTimes(busy, None)
    alone = _slot_times(analysis, cell, runner, Stopwatch(devices[:1], *counts))
    return CellTimes(busy, alone)


def _most_cells(analysis: network.Analysis) -> int:
    """Return how many cells the device with most of them has."""
    return max(collections.Counter(cell.device_number for cell in analysis.cells).values())


def _most_live(analysis: network.Analysis) -> int:
    """Return how many micro-batches are live on the device with most of them, up to a limit."""
    seconds = [1.0] * analysis.table.num_cells
    timeline = simulate.simulate(
        analysis.table,
        seconds,
        seconds,
        input_gradient_s=seconds,
        weight_gradient_s=seconds,
        recompute_s=seconds,
    )
    return min(max(timeline.peak_live), _MOST_LIVE)


def _program_bytes(analysis: network.Analysis, cell: network.Cell, needs: CellBytes) -> int:
    """Return the bytes that a cell's programs need on a device, with all copies of values."""
    weights = memory_formulas.weights(analysis, cell.layers)
    own = weights.variables + weights.gradients + weights.copies
    values = (*cell.imports, *cell.exports_with_gradient)
    residual = needs.residual if cell.kept | cell.early else 0
    of_micro_batch = sum(base.spec_bytes(analysis.specs[v]) for v in values)
    of_micro_batch += max(residual, needs.left_residual + needs.left_gradients)
    largest = max(dataclasses.astuple(needs))
    return _most_cells(analysis) * own + _most_live(analysis) * of_micro_batch + 2 * largest


def _work(analysis: network.Analysis, cell: network.Cell) -> tuple[object, ...]:
    """Return what two cells must share to take equal time."""
    table = analysis.table
    return (
        [profiling.layer_work(analysis, n) for n in cell.layers],
        [v in cell.mode.differentiable for v in (*cell.imports, *cell.exports)],
        cell.recompute_policy,
        cell.compiled,
        cell.device_speed,
        cell.kept,
        cell.fused,
        cell.early,
        table.split()[cell.index],
    )


def _slot_times(
    analysis: network.Analysis, cell: network.Cell, runner: CellRunner, watch: Stopwatch
) -> SlotTimes:
    """Measure the programs that the slots of a cell run; slots of a phase have their mean time."""
    every = frozenset(range(analysis.table.num_micro_batches))
    forward_s = runner.forward_s(watch)
    if not cell.has_backward:
        return SlotTimes(forward_s, *[0.0] * 6).on(cell.device_speed)
    split = analysis.table.split()[cell.index]
    there = cell.kept | cell.early
    fused_s = runner.fused_s(watch) if cell.fused else 0.0
    if cell.kept:
        share = len(cell.kept) / len(every - cell.fused)
        forward_s = share * runner.kept_forward_s(watch) + (1 - share) * forward_s
    recompute_s = runner.recomputation_s(watch) if cell.early else 0.0

    def backward_s(phase: Phase, slots: frozenset[int]) -> float:
        """Return the mean time of the backwards of some micro-batches."""
        total_s = 0.0
        for from_kept, group in ((True, slots & there), (False, slots - there)):
            if group and cell.computes(phase):
                total_s += len(group) * runner.backward_s(watch, phase, from_kept=from_kept)
        return total_s / (len(slots) or 1)

    whole = every - split - cell.fused
    inputs_s, weights_s = backward_s("I", split), backward_s("W", split)
    whole_s = backward_s("B", whole) if whole else max(0.0, fused_s - forward_s)
    return SlotTimes(
        forward_s=forward_s,
        backward_s=whole_s,
        fused_s=fused_s,
        input_gradient_s=inputs_s,
        weight_gradient_s=weights_s,
        recompute_s=recompute_s,
        mean_backward_s=(
            len(split) * (inputs_s + weights_s)
            + len(every - split) * whole_s
            + len(cell.early) * recompute_s
        )
        / len(every),
    ).on(cell.device_speed)
