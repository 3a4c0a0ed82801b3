from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import search, simulate
from lingvo_gpipe.schedule.named import optimal, weight_slots
from lingvo_gpipe.schedule.table import Phase, Slot, Table

BEFORE: dict[Phase, Phase] = {"B": "F", "I": "F", "W": "I"}


def orders(cells: list[int], M: int, split: bool) -> Iterator[tuple[Slot, ...]]:
    """Yield every order of a device's slots, micro-batches in any order."""

    def extend(left: frozenset[Slot], order: tuple[Slot, ...]) -> Iterator[tuple[Slot, ...]]:
        if not left:
            yield order
        for slot in left:
            before = BEFORE.get(slot.phase)
            if before is None or Slot(slot.cell, before, slot.micro_batch) not in left:
                yield from extend(left - {slot}, (*order, slot))

    phases: tuple[Phase, ...] = ("F", "I", "W") if split else ("F", "B")
    slots = [Slot(k, p, m) for k, p, m in itertools.product(cells, phases, range(M))]
    yield from extend(frozenset(slots), ())


def ticks_of(table: Table) -> float:
    one, two = [1.0] * table.num_cells, [2.0] * table.num_cells
    return simulate.simulate(
        table, one, two, input_gradient_s=one, weight_gradient_s=one
    ).makespan_s


@pytest.mark.parametrize(
    ("devices", "M", "split"),
    [
        ((0, 1), 2, True),
        ((0, 1), 3, False),
        ((0, 1, 0), 1, True),
        ((0, 1, 1, 0), 1, True),
        ((0, 1, 1), 2, False),
    ],
)
def test_no_order_of_the_slots_is_shorter(devices: tuple[int, ...], M: int, split: bool) -> None:
    """Against all orders, whatever order a cell takes its micro-batches in."""
    least: dict[int, float] = {}  # the most live → ticks of the shortest table
    rows = [
        list(orders([k for k, home in enumerate(devices) if home == device], M, split))
        for device in range(1 + max(devices))
    ]
    for each in itertools.product(*rows):
        try:
            ticks = ticks_of(Table(each))
        except errors.ScheduleError:
            continue  # a deadlock
        most = max(map(weight_slots.most_live, each))
        least[most] = min(ticks, least.get(most, ticks))
    for most_live in range(min(least), max(least) + 1):
        known = min(ticks for most, ticks in least.items() if most <= most_live)
        problem = search.Problem(devices, M, split, most_live)
        assert problem.lower_bound() <= known
        assert search.least_ticks(problem, int(known) + 2, 10_000) == known


def test_a_table_that_is_found_takes_no_longer_and_holds_no_more_than_allowed() -> None:
    for split, ticks, most_live in ((True, 31, 3), (True, 41, 2), (False, 39, 3), (False, 33, 4)):
        problem = search.Problem((0, 1, 2, 3), 8, split, most_live)
        table, states = search.table_within(problem, ticks, 50_000)
        assert table is not None
        assert ticks_of(table) == ticks
        rows = [[slot for slot in row if slot] for row in table.devices]
        assert max(map(weight_slots.most_live, rows)) == most_live
        assert 0 < states <= 50_000
        assert search.table_within(problem, ticks - 1, 50_000)[0] is None


def test_a_search_ends_after_its_number_of_states() -> None:
    problem = search.Problem((0, 1, 2, 3) * 2, 6, split=True, most_live=5)
    with pytest.raises(search.SearchLimitError, match="not done after 1000 states"):
        search.table_within(problem, 43, 1000)
    assert search.least_ticks(problem, 60, 1000) is None


@pytest.mark.parametrize("V", [1, 2, 3])
def test_no_named_table_is_better_than_the_optimal_one(V: int) -> None:
    names = ("1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")
    for K, M in itertools.product((1, 2, 3), (1, 2, 3, 5)):
        best = schedule.make("optimal", K, M, V)
        ticks = ticks_of(best)
        most = max(weight_slots.most_live([s for s in row if s]) for row in best.devices)
        for name in names:
            if V not in {"1f1b": (1,), "zb_v": (2,), "dualpipe_v": (2,)}.get(name, (V,)):
                continue
            table = schedule.make(name, K, M, V)
            live = max(weight_slots.most_live([s for s in row if s]) for row in table.devices)
            assert (ticks, most) <= (ticks_of(table), live), (name, K, M)


def test_optimal_of_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal, "MAX_STATES", 100)
    text = (
        "optimal for num_devices=4, num_micro_batches=8, cells_per_device=2: the search is too "
        "long. Use fewer, or zb_h1, or zb_v for two cells per device"
    )
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.make("optimal", 4, 8, 2)
