"""When a run is started again, and when it is given up; the clock is a fake."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import restarts

START_S = 10.0


def waits(steps: Sequence[int | None], lasting_s: Sequence[float] = ()) -> list[float]:
    """Return the seconds that are waited for after each loss.

    Args:
        steps: the step of each loss.
        lasting_s: how long each start lasts; `START_S` if not given.
    """
    now_s = 0.0
    policy = restarts.Restarts(100, lambda: now_s)
    found = []
    for number, step in enumerate(steps):
        now_s += lasting_s[number] if number < len(lasting_s) else START_S
        found.append(policy.wait_s("a", step))
        now_s += found[-1]
    return found


# Steps of losses, how long each start lasts → what is waited for.
CASES: dict[str, tuple[Sequence[int | None], Sequence[float], Sequence[float]]] = {
    "one": ([7], [], [0.0]),
    "twice at one step": ([7, 7], [], [0.0, 1.0]),
    "alternating steps": ([7, 9] * 5, [], [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]),
    "before the first step, and at it": ([None, 0, None, 0], [], [0, 1, 2, 4]),
    "a step at each start": (range(9), [], [0, 1, 2, 4, 8, 16, 32, 60, 60]),
    "progress": ([1, 2, 3, 100, 101], [9, 9, 9, 120, 9], [0, 1, 2, 0, 1]),
    "long starts without progress": ([50, 20, 30, 40], [200] * 4, [0, 1, 2, 2]),
    "rare": ([50, 20, 30], [700] * 3, [0, 0, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_waited_for_longer_and_longer_until_there_is_progress(case: str) -> None:
    steps, lasting_s, expected = CASES[case]
    assert waits(steps, lasting_s) == list(expected)


def test_a_run_is_given_up() -> None:
    policy = restarts.Restarts(3)
    for step in (7, 7, 8):
        policy.wait_s("a", step)
    assert policy.count == 3
    with pytest.raises(errors.DeviceError, match="--max_restarts=3 allows no further restart"):
        policy.wait_s("a", 9)
    policy = restarts.Restarts(100)
    for step in (6, 7, 7):
        policy.wait_s("a", step)
    with pytest.raises(errors.DeviceError, match="a, at step 7, the 3rd time in a row"):
        policy.wait_s("a", 7)
