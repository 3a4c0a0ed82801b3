"""How long is each schedule's bubble, how much is live, and how far is it from the best table?

`python -m benchmarks.schedules` makes every named table for K ≤ 8, M ≤ 32 and V ≤ 3; `--quick` for
some of them; `--rows` prints each. Plain Python: nothing is measured, so the machine's load makes
no difference. Slots last F=1, I=1, W=1 and B=2, and where cells recompute I=2 and B=3; every cell
is equal, so a device of V cells has as much to do as a device of one.

The best table has the same cells on the same devices, B or I and W as the schedule has, and at most
as many live micro-batches on a device. The shortest of all has the same cells on the same devices,
but I and W and any number of live micro-batches. They are known where a schedule is as short as a
bound allows, or where `schedule.search` comes to an end. PyTorch's figures are those that
`tools/pytorch_schedules.py` wrote.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.support import processes
from lingvo_gpipe import schedule
from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import search, simulate
from lingvo_gpipe.schedule.table import Table

PYTORCH = Path(__file__).parents[1] / "tests/lingvo_gpipe/schedule/pytorch.json"
KEPT, RECOMPUTED = (1.0, 2.0, 1.0, 1.0), (1.0, 3.0, 2.0, 1.0)
MAX_STATES = 600_000
CELLS = {"gpipe": (1,), "1f1b": (1,), "zb_v": (2,), "dualpipe_v": (2,)}
SHOWN = ((4, 2), (4, 4), (4, 8), (8, 8), (8, 32))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The figures of a table.

    Attributes:
        name: name of the schedule.
        K: devices.
        M: micro-batches.
        V: cells per device.
        ticks: from kept forwards.
        bubble: share of the devices' time in which they wait, from kept forwards.
        recomputed: ticks where cells recompute.
        live: per device, the most live micro-batches of its cells.
        best: ticks of the best table; None: not known.
        shortest: ticks of the shortest table of all; None: not known.
    """

    name: str
    K: int
    M: int
    V: int
    ticks: int
    bubble: float
    recomputed: int
    live: tuple[int, ...]
    best: int | None
    shortest: int | None

    @property
    def times_shortest(self) -> float | None:
        """Its ticks, divided by those of the shortest table of all; None: not known."""
        return None if self.shortest is None else self.ticks / self.shortest

    @property
    def share(self) -> float:
        """The most live micro-batches, in those of all cells of a device."""
        return max(self.live) / self.V

    def line(self) -> str:
        """Return it as a line of a table."""
        best = "?" if self.best is None else str(self.ticks - self.best)
        times = "?" if self.times_shortest is None else f"{self.times_shortest:.3f}"
        return (
            f"{self.name:<12}{self.K:>3}{self.M:>4}{self.V:>3}{self.ticks:>7}{self.bubble:>8.1%}"
            f"{self.recomputed:>12}{max(self.live):>6}{self.share:>7.1f}{best:>12}{times:>10}"
        )


HEAD = f"{'schedule':<12}{'K':>3}{'M':>4}{'V':>3}{'ticks':>7}{'bubble':>8}{'recomputing':>12}"
HEAD += f"{'live':>6}{'/V':>7}{'above best':>12}{'shortest':>10}"


def simulated(table: Table, lengths: Sequence[float]) -> simulate.Timeline:
    """Return the timeline of equal cells."""
    f, b, i, w = ([length] * table.num_cells for length in lengths)
    return simulate.simulate(table, f, b, input_gradient_s=i, weight_gradient_s=w)


@functools.cache
def shortest(devices: tuple[int, ...], M: int) -> int | None:
    """Return the ticks of the shortest table of F, I and W; None: the search did not end.

    Args:
        devices: per cell, its device.
        M: micro-batches.
    """
    K = 1 + max(devices)
    ticks = []
    for name in ("zb_h1", "zb_v", "dualpipe_v"):
        try:
            table = schedule.make(name, K, M, len(devices) // K)
        except ScheduleError:  # it has no such V
            continue
        if _devices(table) == devices:
            ticks.append(int(simulated(table, KEPT).makespan_s))
    return search.least_ticks(search.Problem(devices, M, split=True), min(ticks), MAX_STATES)


def _devices(table: Table) -> tuple[int, ...]:
    return tuple(map(table.device_of, range(table.num_cells)))


def row(name: str, K: int, M: int, V: int) -> Row:
    """Return the figures of a schedule.

    Raises:
        ScheduleError: the schedule is a search, which is too long for these numbers.
    """
    table = schedule.make(name, K, M, V)
    timeline = simulated(table, KEPT)
    ticks, live = int(timeline.makespan_s), timeline.peak_live
    split = any(table.split()) or name == "optimal"
    devices = _devices(table)
    problem = search.Problem(devices, M, split, max(live))
    best = search.least_ticks(problem, ticks, MAX_STATES)
    recomputed = int(simulated(table, RECOMPUTED).makespan_s)
    bubble, least = timeline.bubble_share, shortest(devices, M)
    return Row(name, K, M, V, ticks, bubble, recomputed, live, best, least)


def rows(*, quick: bool) -> Iterator[Row]:
    """Yield the figures of every schedule."""
    sizes = [(K, M) for K in range(1, 9) for M in range(1, 33)]
    if quick:
        sizes = [(K, M) for K in (2, 4, 8) for M in (1, 2, 3, 4, 7, 8, 11, 16, 32)]
    for name in schedule.SCHEDULES:
        for V in CELLS.get(name, (1, 2, 3)):
            for K, M in sizes:
                if name == "optimal" and K * M * V > 48:
                    continue  # searches are of a few cells and micro-batches
                try:
                    yield row(name, K, M, V)
                except ScheduleError:
                    continue


class Comparison:
    """How many tables are better than PyTorch's, equal or worse.

    That is: ticks, ticks where cells recompute, and the most live micro-batches on a device.
    """

    def __init__(self) -> None:
        self._theirs = json.loads(PYTORCH.read_text())
        self.counts: dict[str, collections.Counter[str]] = {}

    def add(self, ours: Row) -> None:
        """Compare one table, if PyTorch has it."""
        of_sizes = self._theirs.get(f"{ours.name} {ours.K} {ours.V}", {})
        theirs = of_sizes.get(str(ours.M))
        if theirs is None:
            return
        ticks, recomputed, most_live, together = theirs
        pairs = [
            (ours.ticks, ticks),
            (ours.recomputed, recomputed),
            (max(ours.live), most_live),
        ]
        verdict = "equal"
        if any(own > other for own, other in pairs):
            verdict = "worse"
        elif any(own < other for own, other in pairs):
            verdict = "better"
        counts = self.counts.setdefault(ours.name, collections.Counter())
        counts[verdict] += 1
        counts["shorter"] += ours.ticks < ticks
        counts["fewer live"] += max(ours.live) < most_live
        counts["fewer together"] += sum(ours.live) < together

    def total(self, verdict: str) -> int:
        """Return how many tables of all schedules have a verdict."""
        return sum(counts[verdict] for counts in self.counts.values())


def beside_shortest(found: Sequence[Row]) -> str:
    """Return how long tables are, in those of the shortest table of all."""
    times = [each.times_shortest for each in found if each.times_shortest is not None]
    longer = [one for one in times if one > 1]
    text = f"{len(times) - len(longer)} as short"
    if longer:
        text += f", {len(longer)} longer: {min(longer):.3f} to {max(longer):.3f} times"
    unknown = len(found) - len(times)
    return text + (f", {unknown} not known" if unknown else "")


def main() -> None:
    """Print the figures, and how they compare."""
    parser = processes.parser(__doc__, measures=False)
    parser.add_argument("--rows", action="store_true", help="a line for each table")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}; equal cells, free links")
    print(HEAD)
    comparison, distances = Comparison(), collections.Counter[tuple[str, int, str]]()
    by_name: dict[tuple[str, int], list[Row]] = {}
    for each in rows(quick=options.quick):
        if options.rows or (each.K, each.M) in SHOWN:
            print(each.line(), flush=options.rows)
        comparison.add(each)
        by_name.setdefault((each.name, each.V), []).append(each)
        above = "not known" if each.best is None else str(each.ticks - each.best)
        distances[each.name, each.V, above] += 1
    print("\nticks above the best table: number of tables")
    for name, V in dict.fromkeys((name, V) for name, V, _ in distances):
        found = {above: n for (a, b, above), n in distances.items() if (a, b) == (name, V)}
        print(f"{name:<12} V={V}: " + ", ".join(f"{k}: {found[k]}" for k in sorted(found)))
    known = sum(number for (_, _, above), number in distances.items() if above != "not known")
    shortest = sum(number for (_, _, above), number in distances.items() if above == "0")
    print(f"longer than the best table: {known - shortest} of {known}, where that is known")
    print("\nbeside the shortest table of I and W, with any number of live micro-batches")
    for (name, V), found_rows in by_name.items():
        print(f"{name:<12} V={V}: {beside_shortest(found_rows)}")
    print("\nagainst PyTorch's tables of the same name")
    for name, counts in comparison.counts.items():
        print(
            f"{name:<12}{counts['better']:>5} better, {counts['equal']:>4} equal, "
            f"{counts['worse']:>2} worse ({counts['shorter']} shorter, {counts['fewer live']} with "
            f"fewer live, {counts['fewer together']} summed over devices)"
        )
    tables = sum(comparison.total(verdict) for verdict in ("better", "equal", "worse"))
    worse, better = comparison.total("worse"), comparison.total("better")
    figure = f"{worse} of {tables} tables worse than PyTorch's, {better} better"
    processes.conclude("schedules", figure, "0 worse")


if __name__ == "__main__":
    main()
