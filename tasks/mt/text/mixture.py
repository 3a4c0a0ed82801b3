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


def permutation(count: int, *numbers: int) -> Array:
    """Return a permutation of 0 … count − 1 that depends only on `numbers`.

    RandomState's numbers are the same in every version of NumPy: a resumed run needs them.
    """
    key = [number % 2**32 for number in numbers]
    return np.random.RandomState(key).permutation(count)


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
