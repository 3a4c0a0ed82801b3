"""The fastest candidates, compared again by measured programs of their cells.

Measured times of layers add up to less than a step takes, and to the less the more cells a device
has; a part of that is what a program finds in the caches (decision 0029). So the fastest candidate
of each number of cells per device is planned by the programs of its cells, and the others with as
many cells are taken to be longer or shorter in the same ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_gpipe.plan.auto.candidate import Candidate, near

_CLOSE_SHARE = 0.15  # the fastest of a number of cells is not measured if it is longer by more


def ratios(
    by_time: Sequence[Candidate], measured_s: Callable[[Candidate], float | None]
) -> dict[int, float]:
    """Return cells per device → measured time of a step over that by the times of layers.

    A number of cells whose fastest candidate is far slower is not measured, and has the largest
    ratio of the others, so that it does not become the best.

    Args:
        by_time: candidates with plans by the times of layers, the fastest first; at least one.
        measured_s: a candidate → seconds of its step by the programs of its cells; None: they
            cannot be measured.

    Returns:
        Ratios of each number of cells; none if they cannot all be measured, or if all candidates
        that are close to the fastest have as many cells.
    """
    fastest = {one.cells_per_device: one for one in reversed(by_time)}
    close = near(sorted(fastest.values(), key=lambda one: one.step_s), _CLOSE_SHARE)
    if len(close) == 1:
        return {}
    found: dict[int, float] = {}
    for one in close:
        step_s = measured_s(one)
        if step_s is None:
            return {}
        found[one.cells_per_device] = step_s / one.step_s
    largest = max(found.values())
    return {cells: found.get(cells, largest) for cells in fastest}
