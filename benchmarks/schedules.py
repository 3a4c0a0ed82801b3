"""How long is each schedule, how many micro-batches are live, and is a better table known?

`python -m benchmarks.schedules [--quick] [--rows]` makes every named table for K ≤ 8, M ≤ 32 and
V ≤ 3; `--quick` some of them; `--rows` prints each. Nothing is measured: slots last F=1, I=1, W=1
and B=2, and where cells recompute I=2 and B=3; all cells are equal.

A table is compared with the shortest of F, I and W of the same cells on the same devices, with any
number of live micro-batches. It is known where a schedule is as short as a bound allows, or where
`schedule.search` comes to an end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from benchmarks.support import processes
from lingvo_gpipe import schedule
from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import search, simulate
from lingvo_gpipe.schedule.table import Table

MAX_STATES = 600_000
CELLS_PER_DEVICE = {"gpipe": (1,), "1f1b": (1,), "zb_v": (2,), "dualpipe_v": (2,)}
SHOWN = ((4, 2), (4, 4), (4, 8), (8, 8), (8, 32))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The figures of a table.

    Attributes:
        name: name of the schedule.
        K: devices.
        M: micro-batches.
        V: cells per device.
        ticks: of the table, where forwards are kept.
        bubble: share of the devices' time in which they wait, where forwards are kept.
        recomputed_ticks: of the table, where cells recompute.
        live: per device, the most live micro-batches of its cells.
        shortest_ticks: of the shortest table with the same cells; None: unknown.
    """

    name: str
    K: int
    M: int
    V: int
    ticks: int
    bubble: float
    recomputed_ticks: int
    live: tuple[int, ...]
    shortest_ticks: int | None

    @property
    def times_shortest(self) -> float | None:
        """Its ticks, divided by those of the shortest table; None: unknown."""
        return None if self.shortest_ticks is None else self.ticks / self.shortest_ticks

    def line(self) -> str:
        """Return it as a line of a table."""
        times = "?" if self.times_shortest is None else f"{self.times_shortest:.3f}"
        return (
            f"{self.name:<12}{self.K:>3}{self.M:>4}{self.V:>3}{self.ticks:>7}{self.bubble:>8.1%}"
            f"{self.recomputed_ticks:>12}{max(self.live):>6}{times:>10}"
        )


HEAD = f"{'schedule':<12}{'K':>3}{'M':>4}{'V':>3}{'ticks':>7}{'bubble':>8}{'recomputing':>12}"
HEAD += f"{'live':>6}{'shortest':>10}"


@functools.cache
def shortest_ticks(devices: tuple[int, ...], M: int) -> int | None:
    """Return the ticks of the shortest table of F, I and W; None: the search did not end.

    Args:
        devices: per cell, its device.
        M: micro-batches.
    """
    K = 1 + max(devices)
    known = []
    for name in ("zb_h1", "zb_v", "dualpipe_v"):
        try:
            table = schedule.make(name, K, M, len(devices) // K)
        except ScheduleError:  # it has no such V
            continue
        if _devices(table) == devices:
            known.append(int(simulate.simulate(table, simulate.EQUAL_SLOTS).makespan_s))
    problem, states_left = search.Problem(devices, M), MAX_STATES
    for ticks in range(problem.lower_bound(), min(known)):
        try:
            rows, visited = search.orders_within(problem, ticks, states_left)
        except search.SearchLimitError:
            return None
        if rows is not None:
            return ticks
        states_left -= visited
    return min(known)


def _devices(table: Table) -> tuple[int, ...]:
    return tuple(map(table.device_of, range(table.num_cells)))


def row(name: str, K: int, M: int, V: int) -> Row:
    """Return the figures of a schedule.

    Raises:
        ScheduleError: the schedule is a search, which is too long for these numbers.
    """
    table = schedule.make(name, K, M, V)
    timeline = simulate.simulate(table, simulate.EQUAL_SLOTS)
    recomputing = simulate.simulate(table, simulate.EQUAL_SLOTS_RECOMPUTING)
    return Row(
        name,
        K,
        M,
        V,
        int(timeline.makespan_s),
        timeline.bubble_share,
        int(recomputing.makespan_s),
        timeline.peak_live,
        shortest_ticks(_devices(table), M),
    )


def rows(*, quick: bool) -> Iterator[Row]:
    """Yield the figures of every schedule."""
    sizes = [(K, M) for K in range(1, 9) for M in range(1, 33)]
    if quick:
        sizes = [(K, M) for K in (2, 4, 8) for M in (1, 2, 3, 4, 7, 8, 11, 16, 32)]
    for name in schedule.SCHEDULES:
        for V in CELLS_PER_DEVICE.get(name, (1, 2, 3)):
            for K, M in sizes:
                if name == "optimal" and K * M * V > 48:
                    continue  # searches are of a few cells and micro-batches
                try:
                    yield row(name, K, M, V)
                except ScheduleError:
                    continue


def longer_than_shortest(rows: Sequence[Row]) -> str:
    """Return how many tables are longer than the shortest, where that is known, and how much."""
    ratios = [row.times_shortest for row in rows if row.times_shortest is not None]
    longer = [ratio for ratio in ratios if ratio > 1]
    times = f" ({min(longer):.3f} to {max(longer):.3f} times)" if longer else ""
    return f"{len(longer)} of {len(ratios)}{times}"


def main() -> None:
    """Print the figures, and how they compare."""
    parser = processes.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="some of the tables")
    parser.add_argument("--rows", action="store_true", help="a line for each table")
    options = parser.parse_args()
    print(HEAD)
    by_name: dict[str, list[Row]] = {}
    for each in rows(quick=options.quick):
        if options.rows or (each.K, each.M) in SHOWN:
            print(each.line(), flush=True)
        by_name.setdefault(f"{each.name}, V={each.V}", []).append(each)
    by_name["all"] = [each for of_name in by_name.values() for each in of_name]
    print(f"\n{'tables':<18}longer than shortest")
    for name, ours in by_name.items():
        print(f"{name:<18}{longer_than_shortest(ours)}")


if __name__ == "__main__":
    main()
