"""A clock that answers between question and answer is never said to differ."""

from __future__ import annotations

import itertools
import math

import pytest

from lingvo_gpipe.run.profiles import clocks

TODAY_S = 1_795_713_390.123_456
TICK_S = math.ulp(TODAY_S)


@pytest.mark.parametrize("start", range(8))
def test_the_smallest_step_of_a_float_is_no_difference(start: int) -> None:
    """Whether a sum of two times is rounded up or down depends on their last digits."""
    asked_s = TODAY_S + TICK_S * start
    for its, between in itertools.combinations_with_replacement(range(4), 2):
        own = itertools.cycle([asked_s, asked_s + TICK_S * between])
        ahead = clocks.measure(itertools.repeat(asked_s + TICK_S * its).__next__, own.__next__)
        assert not ahead.is_certain, (its, between, ahead)


def test_microseconds_that_are_cut_off_are_no_difference() -> None:
    """`tf.timestamp` answers at once, with what is less than a microsecond cut off."""
    now_s = TODAY_S + 0.7e-6
    assert not clocks.measure(lambda: math.floor(now_s * 1e6) / 1e6, lambda: now_s).is_certain


@pytest.mark.parametrize("ahead_s", [3.0, 1e-3, -1e-3, -3.0])
def test_a_clock_that_differs_is_found_within_its_error(ahead_s: float) -> None:
    own = itertools.count(TODAY_S, 1e-4)
    ahead = clocks.measure(lambda: next(own) + ahead_s, own.__next__)
    assert ahead.is_certain
    assert abs(ahead.seconds - ahead_s) <= ahead.error_s < 2e-4
