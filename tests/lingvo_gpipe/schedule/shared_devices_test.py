from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import recompute, shared_devices, simulate
from lingvo_gpipe.schedule.shared_devices import CellCosts, Cuts

NAMES = ("interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")


def seconds(name: str, K: int, M: int, costs: CellCosts, cuts: Cuts) -> float:
    """Return how long a step takes by the simulator; all phases as `CellCosts` says."""
    table = schedule.make(name, K, M, 2)
    ends = list(itertools.accumulate(cuts, initial=0))
    cells = [
        sum(row[start:end]) / speed
        for row, speed, (start, end) in zip(
            costs.layers, costs.speeds, itertools.pairwise(ends), strict=True
        )
    ]
    again = costs.recomputations
    one = [cell / (3 + r) for cell, r in zip(cells, again, strict=True)]
    whole = [u * (2 + r) for u, r in zip(one, again, strict=True)]
    inputs = [u * (1 + r) for u, r in zip(one, again, strict=True)]
    return simulate.simulate(table, {"F": one, "B": whole, "I": inputs, "W": one}).makespan_s


def all_cuts(num_layers: int, num_cells: int) -> list[Cuts]:
    borders = itertools.combinations(range(1, num_layers), num_cells - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *each, num_layers))) for each in borders]


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, int, int, CellCosts, Cuts]:
    name, K, M = draw(st.sampled_from(NAMES)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    num_layers = draw(st.integers(2 * K, 2 * K + 3))
    of_layers = st.lists(
        st.sampled_from([0.0, 1.0, 2.0, 5.0, 9.0]), min_size=num_layers, max_size=num_layers
    )
    layers, last = draw(of_layers), draw(of_layers)
    rows = [layers] * (2 * K - 1) + [last]
    again = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=2 * K, max_size=2 * K))
    devices = draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=K, max_size=K))
    table = schedule.make(name, K, M, 2)
    speeds = [devices[table.device_of(cell)] for cell in range(2 * K)]
    start = draw(st.sampled_from(all_cuts(num_layers, 2 * K)))
    return name, K, M, CellCosts(rows, again, speeds), start


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_a_step_is_no_longer_and_hardly_longer_than_the_shortest(
    problem: tuple[str, int, int, CellCosts, Cuts],
) -> None:
    name, K, M, costs, start = problem
    table = schedule.make(name, K, M, 2)
    found = shared_devices.cut(table, costs, start)
    search = shared_devices.Search(table, costs)
    assert search.time(start) == pytest.approx(seconds(name, K, M, costs, start))
    assert sum(found) == sum(start)
    assert min(found) >= 1
    took = seconds(name, K, M, costs, found)
    assert took <= seconds(name, K, M, costs, start) * (1 + 1e-9)
    shortest = min(seconds(name, K, M, costs, each) for each in all_cuts(sum(start), 2 * K))
    assert took <= 1.35 * shortest


def test_recomputation_in_slots_of_its_own_is_timed() -> None:
    for name in NAMES:
        table = recompute.with_slots(schedule.make(name, 2, 3, 2), ["early"] * 4, fuse=False)
        ones = [1.0] * 4
        timeline = simulate.simulate(table, simulate.EQUAL_SLOTS | {"R": 1.0})
        search = shared_devices.Search(table, CellCosts([[4.0] * 4] * 4, ones, ones))
        assert search.time((1, 1, 1, 1)) == timeline.makespan_s


def test_most_steps_are_the_shortest() -> None:
    layers = (3.0, 1.0, 9.0, 0.0, 2.0, 5.0, 5.0, 1.0)
    shortest = 0
    cases = [(name, n) for name in NAMES for n in range(len(layers))]
    for name, n in cases:
        costs = CellCosts([layers[n:] + layers[:n]] * 4, [1.0] * 4, [1.0] * 4)
        found = shared_devices.cut(schedule.make(name, 2, 4, 2), costs, (2, 2, 2, 2))
        took = seconds(name, 2, 4, costs, found)
        best = min(seconds(name, 2, 4, costs, each) for each in all_cuts(len(layers), 4))
        shortest += took <= best * (1 + 1e-9)
    assert shortest >= 0.9 * len(cases)


def test_equal_layers_are_shared_equally() -> None:
    for name in NAMES:
        costs = CellCosts([[1.0] * 12] * 4, [1.0] * 4, [1.0] * 4)
        table = schedule.make(name, 2, 4, 2)
        assert shared_devices.cut(table, costs, (3, 3, 3, 3)) == (3, 3, 3, 3)


def test_no_cell_gets_more_than_it_can_hold() -> None:
    free = CellCosts([[1.0, 43.0, 0.0, 22.0, 0.0, 34.0]] * 4, [0.0] * 4, [1.0] * 4)
    table = schedule.make("interleaved", 2, 8)
    assert shared_devices.cut(table, free, (1, 1, 2, 2)) == (2, 2, 1, 1)
    tight = dataclasses.replace(free, reach=lambda cell, start: start + (2 if cell else 1))
    found = shared_devices.cut(table, tight, (1, 1, 2, 2))
    assert found[0] == 1
    assert max(found) == 2


def test_a_search_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_devices, "_MAX_SLOTS", 0)
    monkeypatch.setattr(shared_devices, "_MAX_LOADS", 0)
    costs = CellCosts([[1.0, 43.0, 0.0, 22.0, 0.0, 34.0]] * 4, [0.0] * 4, [1.0] * 4)
    found = shared_devices.cut(schedule.make("interleaved", 2, 8), costs, (1, 1, 2, 2))
    assert found == (1, 1, 2, 2)


def test_many_cells_are_cut_after_a_bounded_number_of_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(shared_devices.Search, name)

        def counting(search: shared_devices.Search, cuts: Cuts) -> Any:
            counted[name] += 1
            return method(search, cuts)

        monkeypatch.setattr(shared_devices.Search, name, counting)

    count("loads")
    count("time")
    table = schedule.make("interleaved", 64, 8, 3)
    costs = CellCosts([[1.0, 2.0, 3.0, 9.0] * 100] * 192, [1.0] * 192, [1.0] * 192)
    start = (*[2] * 191, 18)
    found = shared_devices.cut(table, costs, start)
    search = shared_devices.Search(table, costs)
    assert search.rank(found) < search.rank(start)
    assert counted["loads"] < 2 * shared_devices._MAX_LOADS // 192
    assert counted["time"] * len(table.order()) < 1.1 * shared_devices._MAX_SLOTS
