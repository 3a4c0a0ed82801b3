"""Peak activations of a step: the bytes of every slot, added over the schedule's timeline.

A tensor is held from the slot that makes it to the slot that reads it last, and every slot holds
more while it runs. What it holds (`CellBytes`) comes from `network.memory_formulas` or, traced,
from `plan.traced_cells`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gpipe import network
from lingvo_gpipe.network.memory_formulas import CellBytes
from lingvo_gpipe.network.traffic.links import INPUT, Stream
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Slot


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
    stream: Stream,
    timeline: simulate.Timeline,
    needs: Sequence[CellBytes],
) -> Peaks:
    """Return the peaks of a step.

    Args:
        analysis: analysis of the network.
        stream: stream of the same network.
        timeline: timeline of its table; no slot has length zero.
        needs: per cell.
    """
    tensors = list(_Tensors(analysis, stream, timeline, needs).all())
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
        stream: Stream,
        timeline: simulate.Timeline,
        needs: Sequence[CellBytes],
    ) -> None:
        self._cells = analysis.cells
        self._micro_batches = range(analysis.table.num_micro_batches)
        self._stream = stream
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
                    source = self._stream.source(v)
                    # Fields are split and sent before the first slot; shared ones are not split.
                    start_s = -1.0 if source == INPUT else self._spans[Slot(source, "F", m)].end_s
                    key = cell.device_number, v, 0 if self._stream.is_shared(v) else m
                    before = times.get(key, (start_s, end_s))
                    times[key] = min(before[0], start_s), max(before[1], end_s)
        for (device, v, m), (start_s, end_s) in times.items():
            yield _Tensor(device, start_s, end_s, self._stream.value_bytes(v, m))

    def _returned_gradients(self) -> Iterator[_Tensor]:
        """Yield the gradients that wait at the cell whose export they belong to."""
        for cell in self._cells:
            for v in cell.returned_gradients:
                to = self._cells[self._stream.source(v)]
                for m in self._micro_batches:
                    start_s = self._gradient_s(cell, m)
                    if start_s is not None:
                        end_s = self._last_use_s(to, m)
                        size = self._stream.gradient_bytes(v, m)
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
        """Yield what I slots leave for W."""
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
    """Return what a slot holds while it runs, without residuals and what I leaves for W."""
    is_kept = slot.micro_batch in cell.kept | cell.early
    if slot.micro_batch in cell.fused:
        return needs.fused
    if slot.phase == "F" and slot.micro_batch not in cell.kept:
        return needs.forward
    if slot.phase in "FR":
        return max(0, needs.kept_forward - needs.residual) if is_kept else 0
    if not cell.computes(slot.phase):
        return 0
    if slot.phase in "IW" and cell.computes("I") and cell.computes("W"):
        if slot.phase == "W":
            return needs.weight_gradients
        if is_kept:
            return max(0, needs.kept_import_gradients - needs.left_gradients)
        return max(0, needs.import_gradients - needs.left_gradients - needs.left_residual)
    return needs.kept_backward if is_kept else needs.backward
