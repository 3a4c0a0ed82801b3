"""Shares by temperature, orders and draws: against the formula, and for consistency."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gpipe import errors
from lingvo_gpipe.tasks.mt.text import mixture

SIZES = [1_000_000, 30_000, 2_000, 95, 1]
PINNED = [2, 4, 1, 5, 6, 3, 0, 7]


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0, np.inf])
def test_shares_are_those_of_the_formula(temperature: float) -> None:
    powers = [size ** (1 / temperature) for size in SIZES]
    wanted = [power / sum(powers) for power in powers]
    np.testing.assert_allclose(mixture.probabilities(SIZES, temperature), wanted, rtol=1e-12)
    assert mixture.probabilities([10, 0, 10], temperature).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("sizes", "temperature", "text"),
    [
        *(
            (SIZES, value, r"temperature=\S+ is not possible. Use 1")
            for value in (0.0, -1.0, np.nan)
        ),
        ([0, 0], 5.0, "no sentence to draw from"),
    ],
)
def test_impossible_shares_are_refused(sizes: list[int], temperature: float, text: str) -> None:
    with pytest.raises(errors.InputError, match=text):
        mixture.probabilities(sizes, temperature)


@given(st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 5))
def test_a_permutation_is_one_and_is_repeatable(count: int, seed: int, other: int) -> None:
    found = mixture.permutation(count, seed, other)
    assert sorted(found.tolist()) == list(range(count))
    assert np.array_equal(found, mixture.permutation(count, seed, other))


def test_a_permutation_is_the_same_in_every_version() -> None:
    assert mixture.permutation(8, 1, 2).tolist() == PINNED


def test_permutations_of_other_numbers_differ() -> None:
    keys = list(itertools.product(range(3), repeat=3))
    assert len({tuple(mixture.permutation(20, *key)) for key in keys}) == len(keys)


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_draws_in_parts_are_the_draws_of_the_whole(
    count: int, start: int, middle: int, length: int
) -> None:
    first, cut, last = start, start + middle, start + middle + length
    parts = [mixture.draws(count, first, cut, 3), mixture.draws(count, cut, last, 3)]
    assert np.array_equal(np.concatenate(parts), mixture.draws(count, first, last, 3))


def test_every_pass_of_draws_has_everything_once_in_another_order() -> None:
    passes = mixture.draws(50, 0, 150, 9).reshape(3, 50)
    for each in passes:
        assert sorted(each.tolist()) == list(range(50))
    assert len({tuple(each) for each in passes}) == 3
