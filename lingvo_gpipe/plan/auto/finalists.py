"""The fastest candidates, compared again by measured programs of their cells.

The times of a cell's layers do not add up to its own, and the smaller cells are, the more they fall
short of it: a program that is called more often finds less in the caches. So the fastest candidate
of each number of cells per device is planned by the programs of its cells, and the others with as
many cells are taken to be longer or shorter in the same ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gpipe.plan.auto.candidate import Candidate, near

_CLOSE_SHARE = 0.15  # the fastest of a number of cells is not measured if it is longer by more


def by_programs(
    by_time: Sequence[Candidate], measured: Callable[[Candidate], Candidate]
) -> list[Candidate]:
    """Return candidates by time, corrected by what the fastest ones take.

    Args:
        by_time: candidates, the fastest first, all of them with plans by the times of layers.
        measured: a candidate → the same, planned by the programs of its cells.
    """
    fastest = {one.cells_per_device: one for one in reversed(by_time)}
    close = near(sorted(fastest.values(), key=lambda one: one.step_s), _CLOSE_SHARE)
    if len(close) == 1:
        return list(by_time)
    ratios = {one.cells_per_device: measured(one).step_s / one.step_s for one in close}
    largest = max(ratios.values())  # so that none becomes the best that was not measured
    corrected = (
        dataclasses.replace(one, correction=ratios.get(one.cells_per_device, largest))
        for one in by_time
    )
    return sorted(corrected, key=lambda one: one.step_s)
