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


def ratios(
    pairs: list[tuple[int, float]], factors: dict[str, float | None]
) -> tuple[dict[int, Any], list[str]]:
    """Return ratios by cells per device, and the names of the candidates that were measured."""
    measured = []

    def measured_s(one: Candidate) -> float | None:
        measured.append(one.schedule)
        factor = factors[one.schedule]
        return None if factor is None else factor * one.step_s

    found = finalists.ratios(candidates(*pairs), measured_s)
    return {cells: pytest.approx(ratio) for cells, ratio in found.items()}, measured


def test_the_fastest_of_each_number_of_cells_is_measured() -> None:
    pairs = [(3, 1.0), (1, 1.02), (3, 1.04), (2, 1.1), (1, 1.2)]
    found, measured = ratios(pairs, {"a": 1.2, "b": 1.0, "d": 1.1})
    assert measured == ["a", "b", "d"]
    assert found == {1: 1.0, 2: 1.1, 3: 1.2}


def test_what_is_far_slower_is_not_measured_and_has_the_largest_ratio() -> None:
    found, measured = ratios([(3, 1.0), (2, 1.1), (1, 1.3)], {"a": 1.5, "b": 1.4})
    assert measured == ["a", "b"]
    assert found == {3: 1.5, 2: 1.4, 1: 1.5}


def test_a_single_number_of_cells_needs_no_measuring() -> None:
    assert ratios([(2, 1.0), (2, 1.1), (1, 1.2)], {}) == ({}, [])


def test_where_one_cannot_be_measured_none_is_corrected() -> None:
    assert ratios([(1, 1.0), (3, 1.1)], {"a": 1.0, "b": None}) == ({}, ["a", "b"])


def test_of_equally_short_measured_steps_the_fewest_cells_are_taken() -> None:
    given = candidates((3, 1.0), (1, 1.01), (2, 1.02), (1, 1.025), (1, 1.04))
    names = [one.schedule for one in candidate.ordered(given, is_measured=True)]
    # b and d have as many cells, and their times the same errors: they are not equally short.
    assert names == ["b", "d", "c", "a", "e"]
    assert [one.schedule for one in candidate.ordered(given)] == ["a", "b", "c", "d", "e"]


def test_of_equally_short_steps_the_smallest_is_taken() -> None:
    given = candidates((1, 1.0), (1, 1.004), (1, 1.006))
    plan: Any = FakePlan(1.004, heaviest_bytes=-1)
    given[1] = dataclasses.replace(given[1], plan=plan)
    for is_measured in (False, True):
        names = [one.schedule for one in candidate.ordered(given, is_measured=is_measured)]
        assert names == ["b", "a", "c"]
