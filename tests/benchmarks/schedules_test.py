"""What `benchmarks.schedules` compares tables with."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import schedules
from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import simulate


@pytest.mark.parametrize(
    ("name", "V", "times"),
    [("1f1b", 1, 33 / 27), ("zb_h1", 1, 1.0), ("interleaved", 2, 57 / 51), ("zb_v", 2, 1.0)],
)
def test_tables_are_compared_with_the_shortest(name: str, V: int, times: float) -> None:
    row = schedules.row(name, 4, 8, V)
    assert row.times_shortest == times
    assert row.line().endswith(f" {times:.3f}")


def test_the_shortest_table_is_that_of_the_search() -> None:
    for K, M, V in ((2, 3, 1), (3, 2, 2), (4, 3, 2), (2, 2, 3)):
        table = schedule.make("optimal", K, M, V)
        ticks = simulate.simulate(table, simulate.EQUAL_SLOTS).makespan_s
        assert schedules.shortest_ticks(tuple(range(K)) * V, M) == ticks, (K, M, V)


def test_longer_tables_are_counted_where_the_shortest_is_known() -> None:
    row = schedules.row("1f1b", 4, 8, 1)
    rows = [row, schedules.row("zb_h1", 4, 8, 1), dataclasses.replace(row, shortest_ticks=None)]
    assert schedules.longer_than_shortest(rows) == "1 of 2 (1.222 to 1.222 times)"
