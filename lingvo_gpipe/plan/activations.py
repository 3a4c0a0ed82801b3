"""Peak activations of a step: the bytes of every slot, added over the schedule's timeline.

A tensor is held from the slot that makes it to the slot that reads it last, and every slot holds
more while it runs. What it holds (`CellBytes`) is known by formula (`network.memory_formulas`), or
more exactly from the cell's traced programs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.graphs import traced_memory
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.network.memory_formulas import CellBytes
from lingvo_gpipe.network.traffic import INPUT
from lingvo_gpipe.plan import measuring
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Slot


def traced(analysis: network.Analysis) -> list[CellBytes]:
    """Trace the programs of every cell and return what they hold, for the largest micro-batch.

    Nothing is run, and no variable is created. The bodies of loops and conditions are not read: a
    cell with such operations holds at least what the layers' formulas say, and is marked as an
    estimate.
    """
    # A device may use all threads while others wait. 0 is TensorFlow's own choice.
    threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    layers = [info.params.instantiate() for info in analysis.layers]
    slots: list[set[str]] = [set() for _ in analysis.cells]
    for slot in analysis.table:
        name = analysis.cells[slot.cell].program(slot.phase, slot.micro_batch)
        slots[slot.cell] |= {name} if name else set()
    return [
        _traced(analysis, cell, layers, names, threads)
        for cell, names in zip(analysis.cells, slots, strict=True)
    ]


def _traced(
    analysis: network.Analysis,
    cell: network.Cell,
    layers: Sequence[base.Layer],
    names: set[str],
    threads: int,
) -> CellBytes:
    programs = cell_programs.CellPrograms(cell.index, analysis, layers, jit=False)
    if names & {"I", "IK"}:
        names = names | {"I", "IK"}  # they leave the same, of which IK finds a part
    num_left = {}

    def call_all() -> None:
        inputs, upstream = measuring.values(analysis, cell)
        for name in sorted(names):
            held = measuring.held_for(programs, cell, name, inputs, upstream)
            if name in ("BK", "IK"):
                num_left["K"] = len(held)
            results = programs.run(cell, name, inputs, upstream, held)
            if name in ("I", "IK"):
                num_left[name] = len(results.held.keys() - held.keys())

    tf.function(call_all, autograph=False).get_concrete_function()
    graphs = programs.graphs

    def left(name: str) -> int:
        """Return the bytes that a program leaves for the next one, after its other outputs."""
        if name not in num_left:
            return 0
        count = len(graphs[name].outputs)
        return traced_memory.kept_bytes(graphs[name], range(count - num_left[name], count))

    result = CellBytes(
        {name: traced_memory.peak_bytes(graph, threads) for name, graph in graphs.items()},
        residual=left("K"),
        left_residual=max(0, left("I") - left("IK")),
        left_gradients=left("IK"),
    )
    if all(map(traced_memory.is_complete, graphs.values())):
        return result
    return result.at_least(memory_formulas.cell_bytes(analysis, cell))


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes held at once, weights, gradients of weights and optimizer slots not counted.

    Attributes:
        devices: on each device.
        together: on all devices at one moment, for devices that share the memory of one host.
    """

    devices: tuple[int, ...]
    together: int


def peak_activations(
    analysis: network.Analysis,
    timeline: simulate.Timeline,
    needs: Sequence[CellBytes],
) -> Peaks:
    """Return the peaks of a step.

    Args:
        analysis: analysis of the network.
        timeline: timeline of its table; no slot has length zero.
        needs: per cell.
    """
    tensors = list(_Tensors(analysis, timeline, needs).all())
    by_device: list[list[_Tensor]] = [[] for _ in range(analysis.table.num_devices)]
    for tensor in tensors:
        by_device[tensor.device].append(tensor)
    return Peaks(tuple(map(_most, by_device)), _most(tensors))


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """Bytes on a device from one moment to another, in seconds."""

    device: int
    start_s: float
    end_s: float
    size_bytes: int


def _most(tensors: Iterable[_Tensor]) -> int:
    """Return the most bytes held at once; at one moment, ends come before starts."""
    changes = [
        change
        for tensor in tensors
        for change in ((tensor.start_s, tensor.size_bytes), (tensor.end_s, -tensor.size_bytes))
    ]
    changes.sort()
    return max(itertools.accumulate(size for _, size in changes), default=0)


class _Tensors:
    """What devices hold in a step, and when."""

    def __init__(
        self,
        analysis: network.Analysis,
        timeline: simulate.Timeline,
        needs: Sequence[CellBytes],
    ) -> None:
        self._cells = analysis.cells
        self._micro_batches = range(analysis.table.num_micro_batches)
        self._analysis = analysis
        self._spans = {span.slot: span for span in timeline.spans}
        self._needs = needs

    def all(self) -> Iterator[_Tensor]:
        """Yield everything but weights, their gradients and optimizer slots."""
        yield from self._imports()
        yield from self._returned_gradients()
        yield from self._residuals()
        yield from self._left()
        yield from self._working()

    def _imports(self) -> Iterator[_Tensor]:
        """Yield what a device receives: once, however many of its cells read it."""
        times: dict[tuple[int, int, int], tuple[float, float]] = {}
        for m in self._micro_batches:
            for cell in self._cells:
                end_s = self._last_use_s(cell, m)
                for v in cell.imports:
                    source = self._analysis.source(v)
                    # Fields are split and sent before the first slot.
                    start_s = -1.0 if source == INPUT else self._spans[Slot(source, "F", m)].end_s
                    key = cell.device_number, v, m
                    before = times.get(key, (start_s, end_s))
                    times[key] = min(before[0], start_s), max(before[1], end_s)
        for (device, v, m), (start_s, end_s) in times.items():
            yield _Tensor(device, start_s, end_s, self._analysis.value_bytes(v, m))

    def _returned_gradients(self) -> Iterator[_Tensor]:
        """Yield the gradients that wait at the cell whose export they belong to."""
        for cell in self._cells:
            for v in cell.returned_gradients:
                to = self._cells[self._analysis.source(v)]
                for m in self._micro_batches:
                    start_s = self._gradient_s(cell, m)
                    if start_s is not None:
                        end_s = self._last_use_s(to, m)
                        size = self._analysis.gradient_bytes(v, m)
                        yield _Tensor(to.device_number, start_s, end_s, size)

    def _residuals(self) -> Iterator[_Tensor]:
        """Yield what kept forwards and recomputations leave."""
        for cell in self._cells:
            for m in cell.kept | cell.early:
                start_s = self._spans[Slot(cell.index, "R" if m in cell.early else "F", m)].start_s
                end_s = self._last_use_s(cell, m)
                if Slot(cell.index, "I", m) in self._spans and cell.computes("I"):
                    end_s = self._spans[Slot(cell.index, "I", m)].end_s
                size = self._needs[cell.index].residual
                yield _Tensor(cell.device_number, start_s, end_s, size)

    def _left(self) -> Iterator[_Tensor]:
        """Yield what each slot I leaves for its slot W."""
        for slot, span in self._spans.items():
            cell, needs = self._cells[slot.cell], self._needs[slot.cell]
            if slot.phase == "I" and cell.computes("I") and cell.computes("W"):
                end_s = self._spans[Slot(slot.cell, "W", slot.micro_batch)].end_s
                is_kept = slot.micro_batch in cell.kept | cell.early
                of_forward_s = span.end_s if is_kept else span.start_s
                yield _Tensor(span.device, span.start_s, end_s, needs.left_gradients)
                yield _Tensor(span.device, of_forward_s, end_s, needs.left_residual)

    def _working(self) -> Iterator[_Tensor]:
        """Yield what slots hold while they run."""
        for slot, span in self._spans.items():
            size = _slot_bytes(self._cells[slot.cell], slot, self._needs[slot.cell])
            yield _Tensor(span.device, span.start_s, span.end_s, size)

    def _last_use_s(self, cell: network.Cell, m: int) -> float:
        """Return when a cell reads a micro-batch's imports for the last time."""
        return max(
            self._spans[slot].end_s
            for slot in (
                Slot(cell.index, "F", m),
                Slot(cell.index, "R", m),
                Slot(cell.index, "B", m),
                Slot(cell.index, "I", m),
                Slot(cell.index, "W", m),
            )
            if slot in self._spans and cell.computes(slot.phase)
        )

    def _gradient_s(self, cell: network.Cell, m: int) -> float | None:
        """Return when a cell has the gradients of a micro-batch's imports."""
        for slot in (Slot(cell.index, "B", m), Slot(cell.index, "I", m)):
            if slot in self._spans:
                return self._spans[slot].end_s
        return None


def _slot_bytes(cell: network.Cell, slot: Slot, needs: CellBytes) -> int:
    """Return what a slot holds while it runs, without residuals or what slot I leaves for W."""
    name = cell.program(slot.phase, slot.micro_batch)
    if name is None:
        return 0
    left = {
        "K": needs.residual,
        "R": needs.residual,
        "I": needs.left_gradients + needs.left_residual,
        "IK": needs.left_gradients,
    }
    return max(0, needs.peaks.get(name, 0) - left.get(name, 0))
