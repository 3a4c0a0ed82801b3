"""How far the clocks of workers are ahead of the chief's, so that one timeline has them all.

As the Network Time Protocol does: a worker is asked for its time, and of several answers the one
that came back soonest counts. Its time lies between question and answer, so the error is at most
half of the time between the two, and the microsecond in which TensorFlow counts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

_TRIES = 10

_RESOLUTION_S = 1e-6
"""`tf.timestamp` cuts what is less off."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """How far a clock is ahead of this process's.

    Attributes:
        seconds: the difference; negative if it is slow.
        error_s: how far from it the true one may be.
    """

    seconds: float
    error_s: float

    @property
    def is_certain(self) -> bool:
        """Whether the clocks differ by more than the error."""
        return abs(self.seconds) > self.error_s


def of_workers(workers: Mapping[int, str]) -> dict[int, Ahead]:
    """Ask workers for their time.

    Args:
        workers: number → its CPU.

    Returns:
        Number → how far its clock is ahead, of those that are for certain.
    """
    found = {number: measure(functools.partial(_time_of, host)) for number, host in workers.items()}
    return {number: ahead for number, ahead in found.items() if ahead.is_certain}


def measure(ask: Callable[[], float], clock: Callable[[], float] = time.time) -> Ahead:
    """Return how far a clock is ahead.

    Args:
        ask: returns its time in seconds since 1970.
        clock: returns the time of this process in seconds since 1970.

    >>> answers, own = iter([8.0, 9.5] * 5), iter([3.0, 5.0, 5.0, 6.0] * 5)
    >>> measure(answers.__next__, own.__next__)
    Ahead(seconds=4.0, error_s=0.500001)
    """
    found = []
    for _ in range(_TRIES):
        asked_s, its_s, answered_s = clock(), ask(), clock()
        # Differences first: today's seconds since 1970 are exact to 0.2 µs, their sum to 0.5 µs.
        half_s = (answered_s - asked_s) / 2
        found.append(Ahead((its_s - asked_s) - half_s, half_s + _RESOLUTION_S))
    return min(found, key=lambda ahead: ahead.error_s)


def line(ahead: Mapping[int, Ahead]) -> str:
    """Return what was found of one worker's clock or more, for the user.

    >>> line({1: Ahead(-0.25, 0.0004), 2: Ahead(0.0031, 0.0002)})
    'worker 1: -250.0 ms (± 0.4), worker 2: +3.1 ms (± 0.2)'
    """
    return ", ".join(
        f"worker {number}: {1e3 * one.seconds:+.1f} ms (± {1e3 * one.error_s:.1f})"
        for number, one in sorted(ahead.items())
    )


def _time_of(host: str) -> float:
    with tf.device(host):
        return float(tf.timestamp())
