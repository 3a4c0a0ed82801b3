"""A table and the times of its slots → when everything starts and ends.

Devices follow their own order and wait for data; links carry any number of tensors at once. So
this is the time that no executor can beat with these slots, against which a real one is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule.table import Phase, Slot, Table


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """Links between cells, which need not be a chain.

    The later cell of a link waits for the earlier one's tensor, the earlier one for the gradient.

    Attributes:
        seconds: (from, to) with from < to → seconds of one tensor, and of its gradient back.
        no_gradient: links over which no gradient comes back, such as those from a frozen cell.
    """

    seconds: Mapping[tuple[int, int], float]
    no_gradient: Collection[tuple[int, int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One slot's time on its device, in seconds from the mini-batch's start."""

    device: int
    slot: Slot
    start_s: float
    end_s: float

    def later(self, seconds: float) -> Span:
        """Return the same slot at a later time; an earlier one if seconds are negative."""
        return Span(self.device, self.slot, self.start_s + seconds, self.end_s + seconds)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every slot of a table starts and ends.

    Attributes:
        table: the schedule that was simulated, or run.
        spans: one per slot, in an order in which they can be run.
    """

    table: Table
    spans: tuple[Span, ...]

    @functools.cached_property
    def makespan_s(self) -> float:
        """Seconds from the start to the end of the last slot."""
        return max(span.end_s for span in self.spans)

    def later(self, seconds: float) -> Timeline:
        """Return the same slots at a later time; an earlier one if seconds are negative."""
        return Timeline(self.table, tuple(span.later(seconds) for span in self.spans))

    @functools.cached_property
    def first_s(self) -> float:
        """Start of the first slot."""
        return min(span.start_s for span in self.spans)

    @functools.cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each device computes."""
        devices: list[list[float]] = [[] for _ in range(self.table.num_devices)]
        for span in self.spans:
            devices[span.device].append(span.end_s - span.start_s)
        return tuple(math.fsum(lengths) for lengths in devices)

    @property
    def bubble_share(self) -> float:
        """Share of all devices' time in which they wait, in [0, 1]."""
        whole = self.makespan_s * self.table.num_devices
        return min(1.0, max(0.0, 1.0 - math.fsum(self.busy_s) / whole)) if whole > 0 else 0.0

    @functools.cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most micro-batches that are live at once on each device.

        One is live from the start of its forward to the end of its backward (of W, where the
        backward is split); on a device of several cells, once for each. In a forward-only table,
        only the one being computed is live.
        """
        peaks = [0] * self.table.num_devices
        live = [0] * self.table.num_devices
        for span in self.spans:
            if span.slot.phase == "F":
                live[span.device] += 1
                peaks[span.device] = max(peaks[span.device], live[span.device])
            if span.slot.phase in "BW" or self.table.is_forward_only:
                live[span.device] -= 1
        return tuple(peaks)


EQUAL_SLOTS: dict[Phase, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Lengths of slots, in forwards, of cells that keep their forwards."""

EQUAL_SLOTS_RECOMPUTING: dict[Phase, float] = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
"""The same where B, or I, computes the forward again."""


def simulate(
    table: Table,
    seconds: Mapping[Phase, Sequence[float] | float],
    *,
    fused_s: float | None = None,
    links: Links | None = None,
) -> Timeline:
    """Compute the start and end of every slot of `table`.

    Args:
        table: a schedule of C cells and M micro-batches.
        seconds: phase → [C] seconds of one micro-batch in each cell, or one number for all cells;
            for each phase that the table has. Recomputation is part of B or I, unless the table
            has R slots.
        fused_s: seconds of the last cell's forward and backward where the table fuses them
            (`Table.fused`), of which those of F are the forward's part. None: the sum of F and B.
        links: which cell reads from which. None: a chain whose links are free.

    Returns:
        The timeline: every slot's span, the bubble share, the peak of live micro-batches.

    Raises:
        ScheduleError: a phase is missing, its length is not C, or a time is negative or not
            finite.

    Source: Huang et al. 2019, section 2 (bubble overhead). Equal cells, free links:

    >>> from lingvo_gpipe import schedule
    >>> timeline = simulate(schedule.make("gpipe", 4, 8), {"F": 1.0, "B": 2.0})
    >>> round(timeline.bubble_share, 6) == round(3 / 11, 6)
    True
    """
    lengths = _lengths(table, seconds)
    if links is None:
        links = Links({(cell, cell + 1): 0.0 for cell in range(table.num_cells - 1)})
    neighbours = _neighbours(table.num_cells, links)
    last = table.num_cells - 1
    fused: dict[Slot, float] = {}
    if fused_s is not None:
        _check_times("fused_s", [fused_s])
        forward_s = min(lengths["F"][last], fused_s)
        for m in table.fused():
            fused[Slot(last, "F", m)] = forward_s
            fused[Slot(last, "B", m)] = fused_s - forward_s
    ends: dict[Slot, float] = {}
    free_s = [0.0] * table.num_devices
    spans = []
    for device, slot in table.order():
        start_s = max(free_s[device], neighbours.ready_s(slot, ends))
        length_s = fused.get(slot, lengths[slot.phase][slot.cell])
        ends[slot] = free_s[device] = start_s + length_s
        spans.append(Span(device, slot, start_s, ends[slot]))
    return Timeline(table, tuple(spans))


@dataclasses.dataclass(frozen=True, slots=True)
class _Neighbours:
    """For each cell, those it reads from and those it gets gradients of, with seconds."""

    before: list[dict[int, float]]
    after: list[dict[int, float]]

    def ready_s(self, slot: Slot, ends: Mapping[Slot, float]) -> float:
        """Return when all that `slot` reads from other cells has come.

        What it reads from its own cell is there: the same device has done that before.
        """
        arrivals = [0.0]
        if slot.phase == "F":
            for source, link_s in self.before[slot.cell].items():
                arrivals.append(ends[Slot(source, "F", slot.micro_batch)] + link_s)
        elif slot.phase in "BI":
            for target, link_s in self.after[slot.cell].items():
                whole = Slot(target, "B", slot.micro_batch)
                gradient = whole if whole in ends else Slot(target, "I", slot.micro_batch)
                arrivals.append(ends[gradient] + link_s)
        return max(arrivals)


def _lengths(
    table: Table, seconds: Mapping[Phase, Sequence[float] | float]
) -> dict[Phase, Sequence[float]]:
    """Return seconds by phase and cell, for the phases that the table has."""
    lengths: dict[Phase, Sequence[float]] = {}
    for phase in dict.fromkeys(slot.phase for slot in table):
        if phase not in seconds:
            raise ScheduleError(f"the table has {phase} slots, but no seconds are given for them")
        times = seconds[phase]
        if isinstance(times, float | int):
            times = [times] * table.num_cells
        if len(times) != table.num_cells:
            raise ScheduleError(
                f"{phase} has {len(times)} times for {table.num_cells} cells. Give one per cell"
            )
        _check_times(phase, times)
        lengths[phase] = times
    return lengths


def _neighbours(num_cells: int, links: Links) -> _Neighbours:
    """Return the cells that each cell reads from and sends to, with each link's seconds."""
    before: list[dict[int, float]] = [{} for _ in range(num_cells)]
    after: list[dict[int, float]] = [{} for _ in range(num_cells)]
    for (source, target), seconds in links.seconds.items():
        _check_times(f"links[{source, target}]", [seconds])
        before[target][source] = seconds
        if (source, target) not in links.no_gradient:
            after[source][target] = seconds
    return _Neighbours(before, after)


def _check_times(name: str, times: Sequence[float]) -> None:
    for seconds in times:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ScheduleError(
                f"{name}: {seconds} is negative or not finite. Use seconds of 0 or more"
            )
