"""Candidates of a kind are corrected by the measured programs of the fastest of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lingvo_gpipe.plan.auto import candidate, finalists
from lingvo_gpipe.plan.auto.candidate import Candidate


@dataclasses.dataclass
class FakePlan:
    """A plan that is its own analysis, table and only cell; `programs` as in `KINDS`."""

    mini_batch_s: float
    heaviest_bytes: int = 0
    programs: float = 0.0

    @property
    def analysis(self) -> FakePlan:
        return self

    table = analysis

    @property
    def cells(self) -> list[FakePlan]:
        return [self]

    @property
    def fused(self) -> frozenset[int]:
        return frozenset({1} if KINDS[self.programs] == (False, False) else ())

    def split(self) -> list[frozenset[int]]:
        return [frozenset(), frozenset({1} if KINDS[self.programs][0] else ())]


# Decimals of V → backwards are split, forward and backward are apart.
KINDS = {0.0: (False, False), 0.25: (False, True), 0.5: (True, True)}


def candidates(*pairs: tuple[float, float]) -> list[Candidate]:
    """Return candidates of V (and see `KINDS`) and seconds, with names a, b, c."""
    plans: list[Any] = [FakePlan(step_s, programs=cells % 1) for cells, step_s in pairs]
    return [
        Candidate(name, int(cells), "full", plan=plan)
        for name, (cells, _), plan in zip("abcdef", pairs, plans, strict=False)
    ]


def ratios(
    pairs: Sequence[tuple[float, float]], factors: Mapping[str, float | None]
) -> tuple[dict[float, Any], list[str]]:
    """Return ratios by V (and see `KINDS`), and the names of the candidates that were measured."""
    measured = []

    def measured_s(one: Candidate) -> float | None:
        measured.append(one.schedule)
        factor = factors[one.schedule]
        return None if factor is None else factor * one.step_s

    found = finalists.ratios(candidates(*pairs), measured_s)
    programs = {names: number for number, names in KINDS.items()}
    return {
        kind.cells_per_device + programs[kind[1:]]: pytest.approx(ratio)
        for kind, ratio in found.items()
    }, measured


def test_the_fastest_of_each_kind_is_measured() -> None:
    pairs = [(3, 1.0), (1, 1.02), (3, 1.04), (2, 1.05), (1, 1.2)]
    found, measured = ratios(pairs, {"a": 1.2, "b": 1.0, "d": 1.1})
    assert measured == ["a", "b", "d"]
    assert found == {1: 1.0, 2: 1.1, 3: 1.2}
    split = [(1.5, 1.0), (1.25, 1.01), (1, 1.02), (1.5, 1.1)]
    found, measured = ratios(split, {"a": 1.2, "b": 1.1, "c": 1.0})
    assert measured == ["a", "b", "c"]
    assert found == {1: 1.0, 1.25: 1.1, 1.5: 1.2}


def test_a_kind_is_hoped_to_be_as_slow_as_one_with_as_many_cells() -> None:
    pairs = [(2, 1.0), (2.5, 1.01), (1, 1.1), (3, 1.12)]
    found, measured = ratios(pairs, {"a": 1.3, "c": 1.0})
    assert measured == ["a", "c"]  # b is hoped to take 1.31, d 1.46; a is far from 1.1
    assert found == {1: 1.0, 2: 1.3, 2.5: 1.3, 3: 1.3}
    found, measured = ratios([(1, 1.0), (2, 1.01), (2.5, 1.02)], {"a": 1.0, "b": 1.1})
    assert measured == ["a", "b"]  # c is hoped to take 1.12, not 1.02
    assert found == {1: 1.0, 2: 1.1, 2.5: 1.1}


def test_what_is_far_slower_is_not_measured_and_has_the_largest_ratio() -> None:
    found, measured = ratios([(1, 1.0), (2, 1.04), (3, 1.06), (1.5, 1.07)], {"a": 0.9, "b": 1.1})
    assert measured == ["a", "b"]
    assert found == {1: 0.9, 2: 1.1, 3: 1.1, 1.5: 0.9}
    assert ratios([(1, 1.0), (2, 1.2)], {}) == ({}, [])


def test_a_single_kind_needs_no_measuring() -> None:
    assert ratios([(2, 1.0), (2, 1.1), (1, 1.2)], {}) == ({}, [])


def test_where_one_cannot_be_measured_none_is_corrected() -> None:
    assert ratios([(1, 1.0), (3, 1.05)], {"a": 1.0, "b": None}) == ({}, ["a", "b"])


def test_of_equally_short_measured_steps_the_simplest_kind_is_taken() -> None:
    given = candidates((1.5, 1.0), (2, 1.01), (1.25, 1.015), (1, 1.02), (1.5, 1.06))
    names = [one.schedule for one in candidate.ordered(given, is_measured=True)]
    assert names == ["d", "c", "a", "b", "e"]


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
