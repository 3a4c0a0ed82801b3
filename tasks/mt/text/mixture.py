"""How often each language is drawn, and in what order: pure functions, equal on every machine.

Language l with D_l sentences has the share p_l = D_l^(1/T) / Σ_k D_k^(1/T) at temperature T:
proportional at T=1, nearly equal for large T. Source: Arivazhagan et al. 2019 (arXiv 1907.05019),
section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lingvo_gpipe import errors

Array: TypeAlias = npt.NDArray[Any]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def probabilities(sizes: Sequence[int], temperature: float) -> Array:
    """Return the share of each language, float64, Σ = 1.

    >>> [round(float(p), 3) for p in probabilities([900, 100], 2.0)]
    [0.75, 0.25]

    Args:
        sizes: D_l, sentences of each language; without sentences the share is 0.
        temperature: T, above 0; `inf` means equal shares.

    Raises:
        InputError: T is not above 0, or there is no sentence at all.
    """
    if not temperature > 0:
        raise errors.InputError(
            f"temperature={temperature} is not possible. Use 1 for proportional shares, more for "
            "more equal ones"
        )
    counts = np.asarray(sizes, np.float64)
    if not counts.sum() > 0:
        raise errors.InputError("there is no sentence to draw from. Use another corpus or split")
    # Relative to the largest, so that no power overflows.
    weights = np.where(counts > 0, (counts / counts.max()) ** (1.0 / temperature), 0.0)
    return weights / weights.sum()


def apportion(total: int, shares: Array) -> Array:
    """Return integers, int64, that sum to `total` and differ from total · shares by less than 1.

    >>> apportion(10, np.array([0.55, 0.45])).tolist()
    [6, 4]
    """
    quotas = total * np.asarray(shares, np.float64)
    # The epsilon keeps integers that rounding made slightly smaller.
    whole = np.floor(quotas + 1e-9).astype(np.int64)
    rest = np.argsort(-(quotas - whole), kind="stable")[: max(0, total - int(whole.sum()))]
    whole[rest] += 1
    return whole


def key(*numbers: int) -> int:
    """Return 64 bits, each of which depends on all of `numbers`."""
    state = 0
    for number in numbers:
        state = int(_mix(np.array([(state + number) & _MASK], np.uint64))[0])
    return state


def permutation(count: int, *numbers: int) -> Array:
    """Return a permutation of 0 … count − 1, int64, that depends only on `numbers`.

    NumPy's generators may change between versions; a resumed run must not.
    """
    start = np.uint64(key(*numbers))
    with np.errstate(over="ignore"):
        drawn = _mix(np.arange(count, dtype=np.uint64) + start)
    return np.argsort(drawn, kind="stable")


def draws(count: int, first: int, last: int, *numbers: int) -> Array:
    """Return draws number first … last − 1 from 0 … count − 1, int64.

    Draws are consecutive permutations: nothing is drawn twice before everything was drawn once.
    """
    if last <= first:
        return np.zeros(0, np.int64)
    parts = []
    for passed in range(first // count, math.ceil(last / count)):
        order = permutation(count, *numbers, passed)
        parts.append(order[max(0, first - passed * count) : last - passed * count])
    return np.concatenate(parts)


def _mix(numbers: Array) -> Array:
    """Return uint64 numbers in which each bit depends on every bit of the original.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators (SplitMix64).
    """
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(_GOLDEN)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
