"""Bytes: what a pipelined network holds on each device and sends over each link in one step.

Weights, gradients and links are exact, from params alone. Activations follow the schedule: every
tensor is held from the slot that brings it to the slot that needs it last, on a simulated
timeline, and on top of them works one slot. What a slot needs for itself is told by formula here,
or read from the traced programs by `measure`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import nests, network
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import memory_formulas, micro_batches, wiring
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Phase, Slot

INPUT = -1  # the source of links that carry the mini-batch's own fields


@dataclasses.dataclass(frozen=True, slots=True)
class CellBytes:
    """What one micro-batch of a cell needs while a slot works on it, imports not counted.

    Attributes:
        forward: the most a forward holds at once, its exports included.
        backward: the most a backward holds that recomputes its forward; new accumulators and the
            imports' gradients included.
        fused: the most that forward and backward hold as one program.
        kept_forward: the most a forward holds that is kept, what it leaves included.
        residual: what a kept forward leaves for its backward.
        kept_backward: the most a backward from the residual holds besides it.
        is_estimate: whether some of it is by formula.
    """

    forward: int
    backward: int
    fused: int
    kept_forward: int
    residual: int
    kept_backward: int
    is_estimate: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What goes from one cell to another in a step.

    Attributes:
        source: the cell that makes it, or `INPUT`.
        target: the cell that reads it.
        forward_bytes: values, and tied weights.
        backward_bytes: gradients on their way back.
        names: of the stream and of tied weights, in the order of making.
    """

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    names: tuple[str, ...]


class Network:
    """An analysed network with what its bytes depend on: who sends what to whom, and keeps what.

    Attributes:
        params: its `network.PipelineParams`.
        analysis: of it.
        cells: its cells, in training.
        wanted: per cell, the imports whose gradient it sends back.
    """

    def __init__(self, params: Any, analysis: network.Analysis) -> None:
        """Make it; nothing is traced."""
        self.params = params
        self.analysis = analysis
        self.cells = analysis.cells
        self.wanted = [
            cell.imports_with_gradient if cell.has_backward else () for cell in self.cells
        ]
        self._specs = {size: _specs_for(params, analysis, size) for size in set(analysis.sizes)}
        self._sizes: dict[tuple[int, int, bool], int] = {}

    def works(self, slot: Slot) -> bool:
        """Whether a slot has anything to compute."""
        return self.cells[slot.cell].computes(slot.phase, slot.micro_batch)

    def value_bytes(self, version: int, micro_batch: int, *, floating: bool = False) -> int:
        """Return the bytes of a version of the stream in one micro-batch.

        Args:
            version: its number.
            micro_batch: m.
            floating: of its floating leaves alone, which its gradient has.
        """
        key = version, self.analysis.sizes[micro_batch], floating
        if key not in self._sizes:
            spec = self._specs[key[1]][version]
            self._sizes[key] = base.spec_bytes(nests.floating(spec) if floating else spec)
        return self._sizes[key]

    def source(self, version: int) -> int:
        """Return the cell that makes a version, or `INPUT`."""
        producer = self.analysis.wiring.versions[version].producer
        return INPUT if producer == wiring.FIELD else self.analysis.cell_of(producer)

    def is_whole(self, version: int) -> bool:
        """Tell whether a version is a field that all micro-batches share."""
        found = self.analysis.wiring.versions[version]
        return found.producer == wiring.FIELD and found.name in self.params.unbatched

    def owner(self, path: str) -> int:
        """Return the cell that owns a variable."""
        return self.analysis.owner_cell(path)


def parameter_bytes(net: Network) -> list[int]:
    """Return per cell the bytes of its own variables, as they are kept: frozen ones too."""
    totals = [0] * len(net.cells)
    for path, spec in net.analysis.variables.items():
        totals[net.owner(path)] += spec.size_bytes
    return totals


def gradient_bytes(net: Network) -> list[int]:
    """Return per cell the bytes of its gradients; a tied weight has one in each of its cells."""
    return [sum(net.analysis.variables[path].size_bytes for path in c.weights) for c in net.cells]


def copy_bytes(net: Network) -> list[int]:
    """Return per cell the bytes of weights that a step holds besides the variables.

    They are weights in another compute dtype, and those of other cells that tied layers read.
    """
    totals = []
    for cell in net.cells:
        total = 0
        for path in [*cell.weights, *cell.state]:
            spec = net.analysis.variables[path]
            own = net.analysis.owner[path] in cell.layers
            if not own or spec.read_dtype != spec.dtype:
                total += spec.read_bytes
        totals.append(total)
    return totals


def update_bytes(net: Network, slots: Mapping[str, int]) -> list[int]:
    """Return per cell the most bytes that the update holds besides what is there before it.

    It is that of one layer, since a device updates layer after layer.

    Args:
        net: the network.
        slots: path → bytes of its optimizer slots and of its average.
    """
    weights: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for path, spec in net.analysis.variables.items():
        if spec.is_trained:
            weights[net.analysis.owner[path]].append((spec.size_bytes, slots[path]))
    return [max(memory_formulas.update(weights[n]) for n in cell.layers) for cell in net.cells]


def links(net: Network) -> tuple[Link, ...]:
    """Tell every link's bytes per step; tensors that skip cells go straight.

    What several cells of one device read is sent to the first of them, and nothing is sent between
    cells of one device. Scalars (losses, seeds, sums of metrics) are left out.
    """
    analysis = net.analysis
    forward: dict[tuple[int, int], int] = defaultdict(int)
    backward: dict[tuple[int, int], int] = defaultdict(int)
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    received: dict[tuple[int, int | str], int] = {}  # device, what → the cell that it is sent to

    def send(what: int | str, name: str, source: int, target: int, size: int, back: int) -> None:
        device = analysis.table.device_of(target)
        if source != INPUT and analysis.table.device_of(source) == device:
            return
        is_first = received.setdefault((device, what), target) == target
        # Each cell's gradient comes back by itself, and is added where the value was made.
        if is_first or back:
            names[source, target].append(name)
            forward[source, target] += size if is_first else 0
            backward[source, target] += back

    for cell in net.cells:
        wanted = net.wanted[cell.index]
        for v in cell.imports:
            # A field without a batch side is sent once for all micro-batches.
            counted = range(1 if net.is_whole(v) else len(analysis.sizes))
            size = sum(net.value_bytes(v, m) for m in counted)
            back = sum(net.value_bytes(v, m, floating=True) for m in counted) if v in wanted else 0
            name = analysis.wiring.versions[v].name
            send(v, name, net.source(v), cell.index, size, back)
        for path in [*cell.weights, *cell.state]:
            owner, spec = net.owner(path), analysis.variables[path]
            if owner != cell.index:
                back = spec.size_bytes if path in cell.weights else 0
                send(path, path, owner, cell.index, spec.read_bytes, back)
    return tuple(
        Link(*ends, forward[ends], backward[ends], tuple(names[ends])) for ends in sorted(names)
    )


def estimate(net: Network, cell: int) -> CellBytes:
    """Tell a cell's bytes by the layers' formulas, for the largest micro-batch."""
    analysis = net.analysis
    left = kept = working = widest = 0
    for n in analysis.cells[cell].layers:
        info = analysis.layers[n]
        held = memory_formulas.activations(analysis, info)
        working = max(working, held.forward)
        widest = max(widest, held.beside)
        left += held.residual
        kept += held.kept
    gradients = sum(analysis.variables[path].size_bytes for path in net.cells[cell].weights)
    backward = max(working, kept + widest + gradients)
    return CellBytes(
        forward=working,
        backward=backward,
        fused=backward,
        kept_forward=max(working, left),
        residual=left,
        kept_backward=widest + gradients,
        is_estimate=True,
    )


def at_least(told: CellBytes, least: CellBytes) -> CellBytes:
    """Return the larger of two tellings of a cell's bytes, number by number."""
    pairs = zip(dataclasses.astuple(told), dataclasses.astuple(least), strict=True)
    return CellBytes(*map(max, pairs))


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Bytes on a device from one moment to another, in seconds."""

    device: int
    start_s: float
    end_s: float
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes held at once besides weights, gradients and slots.

    Attributes:
        devices: on each device.
        together: on all devices at one moment, whose memory may be the same host's.
    """

    devices: tuple[int, ...]
    together: int


def peak_activations(
    net: Network, timeline: simulate.Timeline, needs: Sequence[CellBytes]
) -> Peaks:
    """Tell the peaks of a step.

    Args:
        net: the network.
        timeline: of its table; every slot takes some time.
        needs: per cell.
    """
    spans = {span.slot: span for span in timeline.spans}
    held = [
        *_imports(net, spans),
        *_returned(net, spans),
        *_residuals(net, spans, needs),
        *_working(net, timeline.spans, needs),
    ]
    own: list[list[_Held]] = [[] for _ in range(net.analysis.table.num_devices)]
    for item in held:
        own[item.device].append(item)
    return Peaks(tuple(map(_most, own)), _most(held))


def _most(held: Iterable[_Held]) -> int:
    """Return the most bytes held at once; what ends makes room for what starts at that moment."""
    changes = [
        change for item in held for change in ((item.start_s, item.size), (item.end_s, -item.size))
    ]
    changes.sort()
    return max(itertools.accumulate(size for _, size in changes), default=0)


_GRADIENT: tuple[Phase, ...] = ("B", "I")
_ALL: tuple[Phase, ...] = ("F", "B", "I", "W")
Spans = dict[Slot, simulate.Span]


def _last_use_s(net: Network, spans: Spans, cell: int, m: int) -> float:
    """Return when a cell needs a micro-batch's imports no more."""
    slots = (Slot(cell, phase, m) for phase in _ALL)
    return max(spans[slot].end_s for slot in slots if slot in spans and net.works(slot))


def _gradient_s(spans: Spans, cell: int, m: int) -> float | None:
    """Return when a cell has the gradients of a micro-batch's imports."""
    for phase in _GRADIENT:
        slot = Slot(cell, phase, m)
        if slot in spans:
            return spans[slot].end_s
    return None


def _imports(net: Network, spans: Spans) -> Iterator[_Held]:
    """Yield what a device receives: once, however many of its cells read it."""
    table = net.analysis.table
    times: dict[tuple[int, int, int], tuple[float, float]] = {}
    for m in range(table.num_micro_batches):
        for cell in net.cells:
            device = table.device_of(cell.index)
            for v in cell.imports:
                source = net.source(v)
                # Fields are cut and sent before the first slot, shared ones as they are.
                start = -1.0 if source == INPUT else spans[Slot(source, "F", m)].end_s
                end = _last_use_s(net, spans, cell.index, m)
                key = device, v, 0 if net.is_whole(v) else m
                before = times.get(key, (start, end))
                times[key] = min(before[0], start), max(before[1], end)
    for (device, v, m), (start, end) in times.items():
        yield _Held(device, start, end, net.value_bytes(v, m))


def _returned(net: Network, spans: Spans) -> Iterator[_Held]:
    """Yield the gradients that wait at the cell whose export they belong to."""
    table = net.analysis.table
    for cell in net.cells:
        for v in net.wanted[cell.index]:
            source = net.source(v)
            if source == INPUT or not net.cells[source].has_backward:
                continue
            for m in range(table.num_micro_batches):
                start = _gradient_s(spans, cell.index, m)
                if start is not None:
                    end = _last_use_s(net, spans, source, m)
                    yield _Held(
                        table.device_of(source), start, end, net.value_bytes(v, m, floating=True)
                    )


def _residuals(net: Network, spans: Spans, needs: Sequence[CellBytes]) -> Iterator[_Held]:
    """Yield what kept forwards leave."""
    table = net.analysis.table
    for cell in range(len(net.cells)):
        for m in net.cells[cell].kept:
            start = spans[Slot(cell, "F", m)].start_s
            end = _last_use_s(net, spans, cell, m)
            yield _Held(table.device_of(cell), start, end, needs[cell].residual)


def _working(
    net: Network, spans: Iterable[simulate.Span], needs: Sequence[CellBytes]
) -> Iterator[_Held]:
    """Yield what slots hold while they work."""
    for span in spans:
        size = _slot_bytes(net, span.slot, needs[span.slot.cell])
        yield _Held(span.device, span.start_s, span.end_s, size)


def _slot_bytes(net: Network, slot: Slot, needs: CellBytes) -> int:
    kept = slot.micro_batch in net.cells[slot.cell].kept
    if slot.micro_batch in net.cells[slot.cell].fused:
        return needs.fused
    if slot.phase == "F":
        return max(0, needs.kept_forward - needs.residual) if kept else needs.forward
    if not net.works(slot):
        return 0
    return needs.kept_backward if kept else needs.backward


def _specs_for(params: Any, analysis: network.Analysis, size: int) -> Sequence[Any]:
    """Return the specs of all versions for micro-batches of `size` examples."""
    if size == max(analysis.sizes):
        return analysis.specs
    whole = uncut(params)
    return network.analyze(whole, resized(params, analysis.fields, size)).specs


def uncut(params: Any) -> Any:
    """Return a copy of a network's params with one cell and one micro-batch."""
    whole = params.copy()
    layers = [layer for cell in params.cells for layer in cell] or params.layers
    whole.set(
        layers=layers,
        cells=[],
        num_partitions=1,
        num_micro_batches=1,
        micro_batch_size=None,
        schedule="gpipe",
        recompute="full",
        cuts=None,
        costs=None,
        devices=None,
        device_speeds=(),
        device_memory=None,
    )
    return whole


def resized(params: Any, fields: dict[str, Any], size: int) -> dict[str, tf.TensorSpec]:
    """Return a mini-batch's specs with `size` examples."""
    return {
        name: spec
        if name in params.unbatched
        else micro_batches.with_batch(spec, size, params.batch_dim)
        for name, spec in fields.items()
    }
