"""Candidates with as many cells are corrected by the measured programs of the fastest of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lingvo_gpipe.plan.auto import candidate, finalists
from lingvo_gpipe.plan.auto.candidate import Candidate


@dataclasses.dataclass
class FakePlan:
    mini_batch_s: float
    heaviest_bytes: int = 0


def candidates(*pairs: tuple[int, float]) -> list[Candidate]:
    """Return candidates of cells per device and seconds, with names a, b, c."""
    plans: list[Any] = [FakePlan(step_s) for _, step_s in pairs]
    return [
        Candidate(name, cells, "full", plan=plan)
        for name, (cells, _), plan in zip("abcdef", pairs, plans, strict=False)
    ]


def corrected(
    pairs: list[tuple[int, float]], factors: dict[str, float]
) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return names and seconds of corrected candidates, and the names of those measured."""
    measured = []

    def measure(one: Candidate) -> Candidate:
        measured.append(one.schedule)
        plan: Any = FakePlan(factors[one.schedule] * one.step_s)
        return dataclasses.replace(one, plan=plan)

    found = finalists.by_programs(candidates(*pairs), measure)
    return [(one.schedule, pytest.approx(one.step_s)) for one in found], measured


def test_the_fastest_of_each_number_of_cells_is_measured() -> None:
    pairs = [(3, 1.0), (1, 1.02), (3, 1.04), (2, 1.1), (1, 1.2)]
    found, measured = corrected(pairs, {"a": 1.2, "b": 1.0, "d": 1.1})
    assert measured == ["a", "b", "d"]
    assert found == [("b", 1.02), ("a", 1.2), ("e", 1.2), ("d", 1.21), ("c", 1.248)]


def test_what_is_far_slower_is_not_measured_and_does_not_become_the_best() -> None:
    found, measured = corrected([(3, 1.0), (2, 1.1), (1, 1.3)], {"a": 1.5, "b": 1.4})
    assert measured == ["a", "b"]
    assert found == [("a", 1.5), ("b", 1.54), ("c", 1.95)]


def test_a_single_number_of_cells_needs_no_measuring() -> None:
    found, measured = corrected([(2, 1.0), (2, 1.1)], {})
    assert not measured
    assert found == [("a", 1.0), ("b", 1.1)]


def test_of_equally_short_measured_steps_the_fewest_cells_are_taken() -> None:
    given = candidates((3, 1.0), (1, 1.02), (2, 1.025), (1, 1.04))
    names = [one.schedule for one in candidate.ordered(given, is_measured=True)]
    assert names == ["b", "c", "a", "d"]
    assert [one.schedule for one in candidate.ordered(given)] == ["a", "b", "c", "d"]
