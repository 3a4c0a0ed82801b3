"""Benchmarks run; runs that other processes disturbed do not count."""

from __future__ import annotations

import pytest

from benchmarks.support import processes


def test_a_configuration_is_measured() -> None:
    assert processes.run(["benchmarks.build", "8,4,16,trainer"])["s"] > 0


def test_runs_are_dropped_and_counted_where_others_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = {
        "a": [{"other_load": 0.0}, {"other_load": 0.5}],
        "b": [{"other_load": 0.2}],
        "c": [{"other_load": 0.06}],
    }
    assert processes.quiet(runs["a"]) == runs["a"][:1]
    assert processes.quiet(runs["b"]) == runs["b"]
    processes.print_load(runs)
    assert capsys.readouterr().out.splitlines() == [
        "other load 0.000 to 0.500 cores; 1 of 4 runs dropped",
        "1 runs beside more than 0.06 cores of other load count all the same",
    ]
