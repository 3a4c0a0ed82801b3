"""The fastest candidates, compared again by measured programs of their cells.

Measured times of layers add up to less than a step takes, and to the less the more programs a
device runs: it may have several cells, and I and W in the place of one backward, or of forward and
backward at once. A part of that is what a program finds in the caches (decision 0029). So the
fastest candidates of the most promising kinds are planned by the programs of their cells, and the
others of a kind are taken to be longer or shorter in the same ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from lingvo_gpipe.plan.auto.candidate import Candidate, Kind, near

_FAR_SHARE = 0.15  # nothing is measured if all other kinds are longer by more
_CLOSE_SHARE = 0.05  # a kind that is longer by more than the shortest measured one is not tried


def ratios(
    by_time: Sequence[Candidate], measured_s: Callable[[Candidate], float | None]
) -> dict[Kind, float]:
    """Return kind → measured time of a step over that by the times of layers.

    The fastest of each kind are measured, the most promising first: a kind is hoped to have the
    smallest ratio of those with as many cells, or else the largest of those with fewer, or else 1.
    One that is not close to the shortest even so is not measured. It has the largest ratio of those
    with as many cells, or else of all, so that it does not become the best.

    Args:
        by_time: candidates with plans by the times of layers, the fastest first; at least one.
        measured_s: a candidate → seconds of its step by the programs of its cells; None: they
            cannot be measured.

    Returns:
        Ratios of each kind; none if they cannot all be measured, or if all other kinds are far
        slower than the fastest.
    """
    fastest = {one.kind: one for one in reversed(by_time)}
    left = sorted(fastest.values(), key=lambda one: one.step_s)
    if len(near(left, _FAR_SHARE)) == 1:
        return {}
    found: dict[Kind, float] = {}

    def with_cells(counts: Collection[int]) -> list[float]:
        return [ratio for kind, ratio in found.items() if kind.cells_per_device in counts]

    def hoped_s(one: Candidate) -> float:
        cells = one.cells_per_device
        alike, fewer = with_cells([cells]), with_cells(range(cells))
        return one.step_s * (min(alike) if alike else max(fewer, default=1.0))

    shortest_s = math.inf
    while left:
        one = min(left, key=hoped_s)
        if hoped_s(one) > (1 + _CLOSE_SHARE) * shortest_s:
            break
        step_s = measured_s(one)
        if step_s is None:
            return {}
        found[one.kind] = step_s / one.step_s
        shortest_s = min(shortest_s, step_s)
        left.remove(one)
    return {
        kind: found.get(kind) or max(with_cells([kind.cells_per_device]) or found.values())
        for kind in fastest
    }
