"""Whether a step took as long as its table says, and if it did not, where most of the rest went."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from lingvo_gpipe import pipelining
from lingvo_gpipe.plan import slot_times, step_plan
from lingvo_gpipe.schedule import breakdown, simulate
from lingvo_gpipe.schedule.slot import Phase
from lingvo_gpipe.task import Task

NEAR = 0.1
"""A step that differs from its prediction by a larger share than this is explained."""

_CAUSES = {
    "input": "waiting for the mini-batch",
    "start": "what precedes the slots, such as cutting the mini-batch",
    "update": "its update",
    "transfer": "slots that began late: tensors on their way, or cores busy with something else",
    "uneven": "slots that took longer than others of their kind, as where other processes compute",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """Seconds of an update by measured layers, without input.

    Attributes:
        slots_s: of the slots of each mini-batch or group.
        update_s: of the update.
        layers: times of each layer; None: not known.
    """

    slots_s: float
    update_s: float
    layers: Sequence[slot_times.LayerTime] | None = None


def line(
    timelines: Sequence[simulate.Timeline],
    rows: Sequence[Mapping[str, float]],
    *,
    builds: bool = False,
) -> str:
    """Return one line that compares a step with its table and the median times of its slots.

    A median leaves out what disturbs a few slots. All else than the slots, such as the input, is
    not predicted.

    Args:
        timelines: when each slot of the first replica ran, in each mini-batch or group.
        rows: of each device, part → seconds; see `breakdown.of_step`.
        builds: whether the step built graphs, as the first one of a process does.
    """
    whole = simulate.joined(timelines)
    medians = breakdown.mean_seconds(whole, statistics.median)
    predicted_s = sum(
        breakdown.simulate_means(timeline.table, medians).makespan_s for timeline in timelines
    )
    measured_s = sum(rows[0].values())
    ratio = measured_s / predicted_s
    took = f"it took {1e3 * measured_s:.1f} ms"
    needs = f"the {1e3 * predicted_s:.1f} ms that its table needs with the median time of each slot"
    if abs(ratio - 1) <= NEAR:
        return f"{took}, {ratio:.2f} of {needs}"
    if ratio < 1:
        return f"{took}, {1 - ratio:.0%} less than {needs}: most slots took less than their median"
    lost = {name: max(row[name] for row in rows) for name in _CAUSES if name != "uneven"}
    lost["uneven"] = _uneven_s(whole, medians)
    cause = max(lost, key=lambda name: lost[name])
    why = "building its graphs" if builds and cause == "start" else _CAUSES[cause]
    return f"{took}, {ratio - 1:.0%} more than {needs}: {1e3 * lost[cause]:.1f} ms {why}"


def planned(params: Task.Params, pipe: pipelining.PipeliningLayer) -> Planned:
    """Return the seconds of a step in the cells of a network and of its update, as measured.

    Args:
        params: params of the task.
        pipe: the network.
    """
    own = params.copy()
    own.model.cuts = tuple(len(cell.layers) for cell in pipe.analysis.cells)
    known = step_plan.known_of(own, profile=True)
    plan = step_plan.with_update(step_plan.make_for(own, profile=True, known=known), own)
    return Planned(plan.step_s, plan.update_s or 0.0, known.layer_times)


def beside_plan(
    timelines: Sequence[simulate.Timeline], rows: Sequence[Mapping[str, float]], plan: Planned
) -> str:
    """Return one line that compares a step with a plan by measured layers.

    Args:
        timelines: as in `line`.
        rows: as in `line`.
        plan: what was planned.
    """
    measured_s = sum(rows[0].values())
    slots_s = sum(timeline.length_s for timeline in timelines)
    planned_s = len(timelines) * plan.slots_s + plan.update_s
    ratio = measured_s / planned_s
    expected = f"the {1e3 * planned_s:.1f} ms that --profile planned for slots and update"
    if abs(ratio - 1) <= NEAR:
        return f"that is {ratio:.2f} of {expected}"
    compared = f"{ratio - 1:.0%} more" if ratio > 1 else f"{1 - ratio:.0%} less"
    return f"that is {compared} than {expected}; slots took {1e3 * slots_s:.1f} ms"


def _uneven_s(timeline: simulate.Timeline, medians: Mapping[Phase, Sequence[float]]) -> float:
    """Return how much longer slots took than their medians, on the device where that is most."""
    late_s = [0.0] * timeline.table.num_devices
    for span in timeline.spans:
        usual_s = medians[span.slot.phase][span.slot.cell]
        late_s[span.device] += span.end_s - span.start_s - usual_s
    return max(late_s)
