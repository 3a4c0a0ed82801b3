"""How long the slots of a step take, from the times of layers, and their simulated timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gpipe import network
from lingvo_gpipe.network.traffic.links import INPUT, Stream
from lingvo_gpipe.plan.measured.profiling import LayerTime
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Phase

# Zero-length slots would hold no memory, so every slot lasts at least this share of the longest:
# too little to show in a result, and more than the rounding error after a million slots.
_LEAST_SHARE = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTimes:
    """Seconds (FLOPs, where nothing was measured) that the slots of a cell take.

    Attributes:
        forward_s: seconds of F.
        backward_s: seconds of B.
        fused_s: seconds of F and B as one program.
        input_gradient_s: seconds of I.
        weight_gradient_s: seconds of W.
        recompute_s: seconds of R.
        mean_backward_s: of the backward of one micro-batch, in all its slots, on average.
    """

    forward_s: float
    backward_s: float
    fused_s: float
    input_gradient_s: float
    weight_gradient_s: float
    recompute_s: float
    mean_backward_s: float

    def shorter(self, other: SlotTimes) -> SlotTimes:
        """Return the shorter of each two times."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SlotTimes(*map(min, pairs))

    def on(self, speed: float) -> SlotTimes:
        """Return the times on a device `speed` times as fast."""
        return SlotTimes(*(seconds / speed for seconds in dataclasses.astuple(self)))


def by_flops(analysis: network.Analysis, per_s: float = 1.0) -> tuple[LayerTime, ...]:
    """Return the time of each layer at FLOPs per second; a stated cost is divided as its FLOPs."""
    times = (_layer_flops(analysis, layer) for layer in analysis.layers)
    return tuple(
        LayerTime(time.forward_s / per_s, time.kept_backward_s / per_s, time.backward_s / per_s)
        for time in times
    )


def _layer_flops(analysis: network.Analysis, layer: network.LayerInfo) -> LayerTime:
    forward, backward = float(layer.meta.flops_forward), float(layer.meta.flops_backward)
    costs = analysis.params.costs
    stated = layer.params.cost if costs is None else costs[layer.index]
    if not layer.has_gradient:
        return LayerTime(forward if stated is None else stated, 0.0, 0.0)
    if stated is not None:
        total = 2 * forward + backward
        shares = (forward / total, backward / total) if total else (0.25, 0.5)
        forward, backward = stated * shares[0], stated * shares[1]
    return LayerTime(forward, backward, forward + backward)


def of_cell(
    analysis: network.Analysis, cell: network.Cell, times: Sequence[LayerTime]
) -> SlotTimes:
    """Return the times of a cell's slots on its device.

    Args:
        analysis: analysis of the network.
        cell: one of its cells.
        times: seconds of each layer of the network, on a device of speed 1.
    """
    table = analysis.table
    layers = [times[n] for n in cell.layers]
    forward = sum(layer.forward_s for layer in layers)
    if not cell.has_backward:
        return SlotTimes(forward, *[0.0] * 6).on(cell.device_speed)
    from_kept = sum(layer.kept_backward_s for layer in layers)
    again = _again(layers)
    split = table.split()[cell.index]
    there = cell.kept | cell.early
    again_in_split = (1 - _share(there, split)) * again
    inputs, weights = _halves(analysis, cell, times)
    if cell.returned_gradients:
        inputs += again_in_split
    else:
        weights += again_in_split
    whole = frozenset(range(table.num_micro_batches)) - split
    backward = (1 - _share(there, whole)) * again + from_kept
    split_share = len(split) / table.num_micro_batches
    early_share = len(cell.early) / table.num_micro_batches
    return SlotTimes(
        forward_s=forward,
        backward_s=backward,
        # A frozen layer has no backward.
        fused_s=sum(layer.fused_s if layer.backward_s else layer.forward_s for layer in layers),
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        recompute_s=again,
        mean_backward_s=(1 - split_share) * backward
        + split_share * (inputs + weights)
        + early_share * again,
    ).on(cell.device_speed)


def recomputed_share(
    analysis: network.Analysis, cell: network.Cell, times: Sequence[LayerTime], phase: Phase
) -> float:
    """Return the share of the recomputation in a slot that computes the forward again, in [0, 1].

    Args:
        analysis: analysis of the network.
        cell: one of its cells, with a backward.
        times: as in `of_cell`.
        phase: B, I or W.
    """
    layers = [times[n] for n in cell.layers]
    inputs, weights = _halves(analysis, cell, times)
    whole = sum(layer.kept_backward_s for layer in layers)
    again = _again(layers)
    length = again + {"B": whole, "I": inputs, "W": weights}[phase]
    return again / length if length else 0.0


def _again(layers: Sequence[LayerTime]) -> float:
    """Return the time of the recomputation of a cell's layers."""
    # A frozen layer has no backward, but its forward is recomputed with that of its cell.
    return sum(layer.again_s if layer.backward_s else layer.forward_s for layer in layers)


def _share(part: frozenset[int], whole: frozenset[int]) -> float:
    return len(part & whole) / len(whole) if whole else 0.0


def _halves(
    analysis: network.Analysis, cell: network.Cell, times: Sequence[LayerTime]
) -> tuple[float, float]:
    """Return the times of a cell's I and W, recomputation not counted.

    Half of a layer's backward computes the gradient of its inputs, half that of its weights, if it
    has any that are trained. Where only one of the two has gradients to compute in the cell, it
    takes the whole backward.

    Args:
        analysis: analysis of the network.
        cell: one of its cells.
        times: seconds of each layer of the network.
    """
    backwards = [times[n].kept_backward_s for n in cell.layers]
    whole = sum(backwards)
    if not cell.returned_gradients:
        return 0.0, whole
    shares = [0.5 if analysis.is_trained[n] else 1.0 for n in cell.layers]
    inputs = sum(share * time for share, time in zip(shares, backwards, strict=True))
    return inputs, whole - inputs


def timeline(
    analysis: network.Analysis,
    stream: Stream,
    cells: Sequence[SlotTimes],
    link_s: Mapping[tuple[int, int], float] | None = None,
) -> simulate.Timeline:
    """Simulate a step: a cell waits only for cells whose values it reads.

    Args:
        analysis: analysis of the network.
        stream: stream of the same network.
        cells: times of each cell's slots.
        link_s: (from, to) → time of one micro-batch's tensors; links that are not in it are free.
    """
    longest = max(max(dataclasses.astuple(cell)) for cell in cells)
    least = _LEAST_SHARE * (longest or 1.0)

    def lengths(times: Iterable[float]) -> list[float]:
        return [max(time, least) for time in times]

    forward = {(stream.source(v), cell.index) for cell in analysis.cells for v in cell.imports}
    backward = {
        (stream.source(v), cell.index) for cell in analysis.cells for v in cell.returned_gradients
    }
    return simulate.simulate(
        analysis.table,
        lengths(cell.forward_s for cell in cells),
        lengths(cell.backward_s for cell in cells),
        fused_s=max(cells[-1].fused_s, least) if analysis.cells[-1].fused else None,
        input_gradient_s=lengths(cell.input_gradient_s for cell in cells),
        weight_gradient_s=lengths(cell.weight_gradient_s for cell in cells),
        recompute_s=lengths(cell.recompute_s for cell in cells),
        links=simulate.Links(
            {ends: (link_s or {}).get(ends, 0.0) for ends in forward if ends[0] != INPUT},
            no_gradient=forward - backward,
        ),
    )
