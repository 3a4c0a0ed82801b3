"""What `benchmarks.schedules` compares tables with."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import schedules
from lingvo_gpipe import schedule


@pytest.mark.parametrize(
    ("name", "V", "times"),
    [("1f1b", 1, 33 / 27), ("zb_h1", 1, 1.0), ("interleaved", 2, 57 / 51), ("zb_v", 2, 1.0)],
)
def test_tables_are_compared_with_the_shortest_of_all(name: str, V: int, times: float) -> None:
    found = schedules.row(name, 4, 8, V)
    assert found.times_shortest == times
    assert found.line().endswith(f" {times:.3f}")
    assert found.best == found.ticks  # of the same B, or I and W, and as many live micro-batches


def test_the_shortest_table_is_that_of_the_search() -> None:
    for K, M, V in ((2, 3, 1), (3, 2, 2), (4, 3, 2), (2, 2, 3)):
        table = schedule.make("optimal", K, M, V)
        devices = tuple(range(K)) * V
        ticks = schedules.simulated(table, schedules.KEPT).makespan_s
        assert schedules.shortest(devices, M) == ticks, (K, M, V)


def test_the_shortest_table_is_not_known_where_the_search_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "MAX_STATES", 10)
    schedules.shortest.cache_clear()
    assert schedules.shortest((0, 1, 2, 0, 1, 2), 2) is None  # longer than the bound
    assert schedules.row("interleaved", 3, 2, 2).line().endswith(" ?")
    schedules.shortest.cache_clear()


def test_tables_of_a_schedule_are_counted() -> None:
    one = schedules.row("1f1b", 4, 8, 1)
    rows = [one, schedules.row("zb_h1", 4, 8, 1), dataclasses.replace(one, shortest=None)]
    text = "1 as short, 1 longer: 1.222 to 1.222 times, 1 not known"
    assert schedules.beside_shortest(rows) == text
