from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import named, orders, search, simulate
from lingvo_gpipe.schedule.table import Phase, Slot, Table

BEFORE: dict[Phase, Phase] = {"I": "F", "W": "I"}


def all_orders(cells: list[int], M: int) -> Iterator[tuple[Slot, ...]]:
    """Yield every order of a device's slots, micro-batches in any order."""

    def extend(left: frozenset[Slot], order: tuple[Slot, ...]) -> Iterator[tuple[Slot, ...]]:
        if not left:
            yield order
        for slot in left:
            before = BEFORE.get(slot.phase)
            if before is None or Slot(slot.cell, before, slot.micro_batch) not in left:
                yield from extend(left - {slot}, (*order, slot))

    phases: tuple[Phase, ...] = ("F", "I", "W")
    slots = [Slot(k, p, m) for k, p, m in itertools.product(cells, phases, range(M))]
    yield from extend(frozenset(slots), ())


def ticks_of(table: Table) -> float:
    return simulate.simulate(table, simulate.EQUAL_SLOTS).makespan_s


def most_live(table: Table) -> int:
    return max(orders.most_live([slot for slot in row if slot]) for row in table.devices)


@pytest.mark.parametrize(
    ("devices", "M"), [((0, 1), 2), ((0, 1, 0), 1), ((0, 1, 1), 1), ((0, 1, 1, 0), 1)]
)
def test_no_order_of_the_slots_is_shorter(devices: tuple[int, ...], M: int) -> None:
    """Against all orders, whatever order a cell takes its micro-batches in."""
    least: dict[int, float] = {}  # the most live → ticks of the shortest table
    rows = [
        list(all_orders([k for k, home in enumerate(devices) if home == device], M))
        for device in range(1 + max(devices))
    ]
    for each in itertools.product(*rows):
        try:
            table = Table(each)
        except errors.ScheduleError:
            continue  # a deadlock
        live, ticks = most_live(table), ticks_of(table)
        least[live] = min(ticks, least.get(live, ticks))
    for limit in range(min(least), max(least) + 1):
        shortest = int(min(ticks for live, ticks in least.items() if live <= limit))
        problem = search.Problem(devices, M, limit)
        assert problem.lower_bound() <= shortest
        assert search.orders_within(problem, shortest - 1, 10_000)[0] is None
        rows_found, _ = search.orders_within(problem, shortest, 10_000)
        assert rows_found is not None
        assert ticks_of(Table.on_grid(rows_found)) == shortest


def test_a_table_that_is_found_takes_no_longer_and_holds_no_more_than_allowed() -> None:
    for ticks, limit in ((31, 3), (41, 2)):
        problem = search.Problem((0, 1, 2, 3), 8, limit)
        rows, states = search.orders_within(problem, ticks, 50_000)
        assert rows is not None
        table = Table.on_grid(rows)
        assert (ticks_of(table), most_live(table)) == (ticks, limit)
        assert 0 < states <= 50_000
        assert search.orders_within(problem, ticks - 1, 50_000)[0] is None


def test_a_search_ends_after_its_number_of_states() -> None:
    problem = search.Problem((0, 1, 2, 3) * 2, 6, most_live=5)
    with pytest.raises(search.SearchLimitError, match="not done after 1000 states"):
        search.orders_within(problem, 43, 1000)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_no_named_table_is_better_than_the_optimal_one(V: int) -> None:
    names = ("1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")
    for K, M in itertools.product((1, 2, 3), (1, 2, 3, 5)):
        best = schedule.make("optimal", K, M, V)
        for name in names:
            if V not in {"1f1b": (1,), "zb_v": (2,), "dualpipe_v": (2,)}.get(name, (V,)):
                continue
            table = schedule.make(name, K, M, V)
            figures = (ticks_of(table), most_live(table))
            assert (ticks_of(best), most_live(best)) <= figures, (name, K, M)


def test_optimal_of_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MAX_STATES", 100)
    text = (
        "optimal for num_devices=4, num_micro_batches=8, cells_per_device=2: the search is too "
        "long. Use fewer, or zb_h1, or zb_v for two cells per device"
    )
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.make("optimal", 4, 8, 2)
