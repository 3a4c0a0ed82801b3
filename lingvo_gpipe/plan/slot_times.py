"""How long the slots of a step take, from the times of programs, and their simulated timeline.

The times of a cell's programs are those of its layers, added up, or measured (`profiling`).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from lingvo_gpipe import network
from lingvo_gpipe.network.traffic import INPUT
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.recompute import Work
from lingvo_gpipe.schedule.slot import Phase

# Zero-length slots would hold no memory, so every slot lasts at least this share of the longest:
# too little to show in a result, and more than the rounding error after a million slots.
_LEAST_SHARE = 1e-9


def by_flops(analysis: network.Analysis, per_s: float = 1.0) -> tuple[Work, ...]:
    """Return the time of each layer at FLOPs per second; a stated cost is divided as its FLOPs."""
    times = []
    for layer in analysis.layers:
        forward, backward = layer.meta.flops_forward / per_s, layer.meta.flops_backward / per_s
        stated = layer.params.cost
        if not layer.has_gradient:
            forward = forward if stated is None else stated / per_s
            times.append(Work(forward, 0.0, 0.0, forward))
            continue
        if stated is not None:
            total = 2 * forward + backward
            shares = (forward / total, backward / total) if total else (0.25, 0.5)
            forward, backward = (stated / per_s * share for share in shares)
        times.append(Work(forward, backward, forward, forward + backward))
    return tuple(times)


def program_times(
    analysis: network.Analysis, cell: network.Cell, times: Sequence[Work]
) -> dict[str, float]:
    """Return name → seconds of the programs of a cell, added up from its layers.

    Half of a layer's backward computes the gradient of its inputs, half that of its weights, if it
    has any that are trained.

    Args:
        analysis: analysis of the network.
        cell: one of its cells.
        times: times of each layer of the network.
    """
    layers = [times[n] for n in cell.layers]
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers)
    # A frozen layer has no backward, but its forward is recomputed with that of its cell.
    again = sum(layer.recompute if layer.backward else layer.forward for layer in layers)
    inputs = sum((0.5 if analysis.is_trained[n] else 1.0) * times[n].backward for n in cell.layers)
    return {
        "F": forward,
        "K": forward,
        "R": again,
        "B": again + backward,
        "BK": backward,
        "I": again + inputs,
        "IK": inputs,
        "W": backward - inputs,
        "FB": sum(layer.fused for layer in layers),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTimes:
    """Seconds (FLOPs, where nothing was measured) that the slots of a cell take.

    Attributes:
        seconds: phase → seconds of a slot, on average; 0 where the cell has none.
        fused_s: seconds of F and B as one program; None: the cell does not run it.
    """

    seconds: Mapping[Phase, float]
    fused_s: float | None


def of_cell(
    analysis: network.Analysis, cell: network.Cell, seconds: Callable[[str], float]
) -> SlotTimes:
    """Return the times of a cell's slots on its device.

    Args:
        analysis: analysis of the network.
        cell: one of its cells.
        seconds: name of a program (see `network.Cell.program`) → seconds on a device of speed 1.
    """
    every = frozenset(range(analysis.table.num_micro_batches))
    split = analysis.table.split()[cell.index]

    def mean(phase: Phase, micro_batches: frozenset[int]) -> float:
        names = [cell.program(phase, m) for m in micro_batches]
        times = {name: seconds(name) / cell.device_speed for name in set(names) if name}
        return statistics.fmean(times.get(name or "", 0.0) for name in names) if names else 0.0

    apart = every - cell.fused
    forward_s = mean("F", apart) if apart else seconds("F") / cell.device_speed
    fused_s = seconds("FB") / cell.device_speed if cell.fused else None
    whole = apart - split
    backward_s = mean("B", whole) if whole or fused_s is None else max(0.0, fused_s - forward_s)
    return SlotTimes(
        {
            "F": forward_s,
            "R": mean("R", cell.early),
            "B": backward_s,
            "I": mean("I", split),
            "W": mean("W", split),
        },
        fused_s,
    )


def timeline(
    analysis: network.Analysis,
    cells: Sequence[SlotTimes],
    link_s: Mapping[tuple[int, int], float] | None = None,
) -> simulate.Timeline:
    """Simulate a step: a cell waits only for cells whose values it reads.

    Args:
        analysis: analysis of the network.
        cells: times of each cell's slots.
        link_s: (from, to) → time of one micro-batch's tensors; links that are not in it are free.
    """
    longest = max(max(*cell.seconds.values(), cell.fused_s or 0.0) for cell in cells)
    least = _LEAST_SHARE * (longest or 1.0)
    phases = cells[0].seconds
    fused_s = cells[-1].fused_s
    forward = {(analysis.source(v), cell.index) for cell in analysis.cells for v in cell.imports}
    backward = {
        (analysis.source(v), cell.index) for cell in analysis.cells for v in cell.returned_gradients
    }
    return simulate.simulate(
        analysis.table,
        {phase: [max(cell.seconds[phase], least) for cell in cells] for phase in phases},
        fused_s=None if fused_s is None else max(fused_s, least),
        links=simulate.Links(
            {ends: (link_s or {}).get(ends, 0.0) for ends in forward if ends[0] != INPUT},
            no_gradient=forward - backward,
        ),
    )
