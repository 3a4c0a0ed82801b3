"""Where the time of a step went, device by device.

Plain Python, for measured timelines and simulated ones.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Phase, Slot
from lingvo_gpipe.schedule.table import Table

PARTS = (
    "forward",
    "recomputation",
    "backward",
    "transfer",
    "imbalance",
    "fill and drain",
    "update",
    "input",
    "start",
    "rest",
)
"""Parts of a step; `of_step` says what each is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Around:
    """What surrounds the slots of a step, in seconds of the timeline's clock.

    Attributes:
        begun_s: when the step was begun.
        ended_s: when its update was done.
        input_s: seconds of waiting for the mini-batch, before that.
    """

    begun_s: float
    ended_s: float
    input_s: float = 0.0


def of_step(
    timeline: simulate.Timeline,
    around: Around,
    recomputed: Callable[[Slot], float] = lambda _: 0.0,
) -> list[dict[str, float]]:
    """Return the seconds of each part of a step, for each device; they add up to the whole step.

    - forward, recomputation, backward: in slots.
    - transfer: from the moment at which all that a slot waits for is computed and its device is
      free, to its start.
    - fill and drain: waiting of a device that it would also have if all cells took the mean time.
    - imbalance: its other waiting.
    - input: before the step.
    - start: from there to the first slot, such as cutting the mini-batch and reading the weights.
    - update: after the last slot.
    - rest: everything else.

    Args:
        timeline: when each slot ran; slots that computed nothing are not in it.
        around: what surrounds them.
        recomputed: share of the recomputation in a slot B, I or W.
    """
    table = timeline.table
    first_s = min(span.start_s for span in timeline.spans)
    last_s = max(span.end_s for span in timeline.spans)
    spans = {span.slot: span for span in timeline.spans}
    equal = _idle_of_equal_cells(timeline)
    rows = []
    for device in range(table.num_devices):
        parts = dict.fromkeys(PARTS, 0.0)
        parts["input"] = around.input_s
        parts["start"] = first_s - around.begun_s
        parts["update"] = max(0.0, around.ended_s - last_s)
        idle_s, free_s = 0.0, first_s
        mine = [span for span in timeline.spans if span.device == device]
        for span in sorted(mine, key=lambda span: span.start_s):
            needs = [spans[need] for need in span.slot.needs(table.num_cells) if need in spans]
            others = [need.end_s for need in needs if need.device != device]
            ready_s = max([free_s, *others])
            ready_s = min(ready_s, max(free_s, span.start_s))
            idle_s += ready_s - free_s
            parts["transfer"] += max(0.0, span.start_s - ready_s)
            for name, share in _shares(span.slot, recomputed).items():
                parts[name] += share * (span.end_s - max(span.start_s, free_s))
            free_s = max(free_s, span.end_s)
        idle_s += last_s - free_s
        parts["fill and drain"] = min(idle_s, equal[device])
        parts["imbalance"] = idle_s - parts["fill and drain"]
        whole_s = around.input_s + around.ended_s - around.begun_s
        parts["rest"] = whole_s - sum(parts.values())
        rows.append(parts)
    return rows


def table_of(rows: Sequence[Mapping[str, float]], labels: Sequence[str]) -> list[list[str]]:
    """Return the shares of each part as rows of text: a head, then a row for each device.

    A part that is 0.0 % of every device's time is left out.
    """
    shown = [
        name for name in PARTS if any(abs(row[name]) >= 5e-4 * sum(row.values()) for row in rows)
    ]
    lines = [["", *shown, "step ms"]]
    for label, row in zip(labels, rows, strict=True):
        whole_s = sum(row.values())
        shares = [f"{100 * row[name] / whole_s:z.1f} %" for name in shown]
        lines.append([label, *shares, f"{1e3 * whole_s:.1f}"])
    return lines


def with_backwards(
    table: Table, spans: Sequence[simulate.Span], forward_share: float
) -> simulate.Timeline:
    """Return a measured timeline in which a slot fused with its backward is two.

    Args:
        table: the schedule.
        spans: when each call ran.
        forward_share: share of the forward in such a call.
    """
    ran = {span.slot for span in spans}
    whole = []
    for span in spans:
        slot = span.slot
        backward = Slot(slot.cell, "B", slot.micro_batch)
        is_last = slot.cell == table.num_cells - 1 and slot.micro_batch in table.fused()
        if slot.phase == "F" and is_last and backward not in ran:
            middle_s = span.start_s + forward_share * (span.end_s - span.start_s)
            whole.append(dataclasses.replace(span, end_s=middle_s))
            span = simulate.Span(span.device, backward, middle_s, span.end_s)
        whole.append(span)
    return simulate.Timeline(table, tuple(whole))


def _shares(slot: Slot, recomputed: Callable[[Slot], float]) -> dict[str, float]:
    """Return the parts of a slot, and the share of each."""
    if slot.phase == "F":
        return {"forward": 1.0}
    if slot.phase == "R":
        return {"recomputation": 1.0}
    again = recomputed(slot)
    return {"recomputation": again, "backward": 1 - again}


def _idle_of_equal_cells(timeline: simulate.Timeline) -> list[float]:
    """Return how long each device would wait if each phase took the mean time in every cell.

    Cells that have no slot of a phase do not count in its mean; those whose slot computes nothing
    do, with no time.
    """
    table = timeline.table
    slots = {(slot.phase, slot.cell) for slot in table}
    lengths = {}
    for phase, seconds in mean_seconds(timeline).items():
        of_slots = [time_s for cell, time_s in enumerate(seconds) if (phase, cell) in slots]
        lengths[phase] = statistics.fmean(of_slots or [0.0])
    equal = simulate.simulate(table, lengths)
    return [equal.makespan_s - busy_s for busy_s in equal.busy_s]


def mean_seconds(
    timeline: simulate.Timeline, mean: Callable[[Sequence[float]], float] = statistics.fmean
) -> dict[Phase, list[float]]:
    """Return the mean seconds of each phase in each cell; 0 where a cell has no such slot.

    Args:
        timeline: when each slot ran.
        mean: the arithmetic one, or another, such as `statistics.median`.
    """
    times: dict[tuple[Phase, int], list[float]] = {}
    for span in timeline.spans:
        key = span.slot.phase, span.slot.cell
        times.setdefault(key, []).append(span.end_s - span.start_s)
    cells = range(timeline.table.num_cells)
    return {
        phase: [mean(times.get((phase, cell), [0.0])) for cell in cells]
        for phase in ("F", "R", "B", "I", "W")
    }
