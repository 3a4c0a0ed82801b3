"""How many layers each cell has where devices have several cells.

Even cells may leave a device with all the heavier ones, and even devices may make the pipeline wait
for single cells. So borders between cells are moved as long as the table takes less time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from lingvo_gpipe.schedule.table import Table

Cuts: TypeAlias = tuple[int, ...]
_Figure: TypeAlias = tuple[float, ...]  # the smaller, the better
_MAX_SLOTS = 1_000_000
"""Slots that are simulated for all cuts that are tried: about half a second."""
_MAX_LOADS = 1_000_000
"""Cells whose loads are added up for all cuts that are tried: about a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class CellCosts:
    """What layers cost in each cell.

    Attributes:
        layers: [C][L] cost of each layer in each cell: forward, recomputation and backward.
        recomputations: [C] how often a cell computes a forward again, on average.
        speeds: [C] relative speed of the cell's device.
        reach: (cell, first layer) → the largest end of the cell; None: any.
    """

    layers: Sequence[Sequence[float]]
    recomputations: Sequence[float]
    speeds: Sequence[float]
    reach: Callable[[int, int], int] | None = None


def cut(table: Table, costs: CellCosts, start: Cuts) -> Cuts:
    """Return the number of layers in each cell for which the table takes the shortest time.

    Not every cut is tried: the result is no longer than `start`, and often the shortest.

    Args:
        table: the schedule of training.
        costs: what layers cost in each cell.
        start: layers in each cell, to begin with.

    >>> from lingvo_gpipe import schedule
    >>> costs = CellCosts([[1.0, 43.0, 0.0, 22.0, 0.0, 34.0]] * 4, [0.0] * 4, [1.0] * 4)
    >>> cut(schedule.make("interleaved", 2, 8), costs, start=(1, 1, 2, 2))
    (2, 2, 1, 1)
    """
    search = Search(table, costs)
    # From a cut of even devices, too: between the two are cuts that are worse than both.
    loads = _Tried(search.loads, _MAX_LOADS // len(start))
    ranks = _Tried(search.rank, _MAX_SLOTS // search.num_slots)
    starts = (start, _improved(start, search.fits, loads))
    return min((_improved(each, search.fits, ranks) for each in starts), key=search.rank)


class _Tried(dict[Cuts, _Figure]):
    """The figure of each cut that was tried.

    Attributes:
        is_full: whether as many were tried as may be.
    """

    def __init__(self, figure: Callable[[Cuts], _Figure], most: int) -> None:
        super().__init__()
        self._figure, self._most = figure, most

    @property
    def is_full(self) -> bool:
        return len(self) > self._most

    def __missing__(self, cuts: Cuts) -> _Figure:
        self[cuts] = self._figure(cuts)
        return self[cuts]


def _improved(start: Cuts, fits: Callable[[Cuts], bool], figures: _Tried) -> Cuts:
    """Return the cut where moving borders does not make its figure less, or tries are used up."""
    best = start
    while True:
        for each in filter(fits, _neighbours(best)):
            if figures.is_full and each not in figures:
                return best
            if figures[each] < figures[best]:
                best = each
                break
        else:
            return best


class Search:
    """What cuts take."""

    def __init__(self, table: Table, costs: CellCosts) -> None:
        """Prepare."""
        self._costs = costs
        self._devices = [table.device_of(cell) for cell in range(table.num_cells)]
        sums = {
            row: list(itertools.accumulate(row, initial=0.0)) for row in map(tuple, costs.layers)
        }
        self._sums = [sums[tuple(row)] for row in costs.layers]
        self._whole = max(row[-1] for row in self._sums) or 1.0
        self._clock = _Clock(table)

    @property
    def num_slots(self) -> int:
        """Slots of the table."""
        return self._clock.num_slots

    def rank(self, cuts: Cuts) -> _Figure:
        """Return what must be small: the table's time, then `loads`."""
        return (self._rounded(self.time(cuts)), *self.loads(cuts))

    def loads(self, cuts: Cuts) -> _Figure:
        """Return the heaviest device, the heaviest cell and how uneven cells are."""
        cells = self._cells(cuts)
        devices = [0.0] * (1 + max(self._devices))
        for device, load in zip(self._devices, cells, strict=True):
            devices[device] += load
        squares = sum(cell**2 for cell in cells) / self._whole
        return tuple(map(self._rounded, (max(devices), max(cells), squares)))

    def time(self, cuts: Cuts) -> float:
        """Return how long the table takes, in the costs' unit."""
        return self._clock.run(self._cells(cuts), self._costs.recomputations)

    def fits(self, cuts: Cuts) -> bool:
        """Whether every cell can hold its layers."""
        if self._costs.reach is None:
            return True
        ends = list(itertools.accumulate(cuts, initial=0))
        pairs = enumerate(itertools.pairwise(ends))
        return all(self._costs.reach(k, start) >= end for k, (start, end) in pairs)

    def _cells(self, cuts: Cuts) -> list[float]:
        ends = list(itertools.accumulate(cuts, initial=0))
        return [
            (row[end] - row[start]) / speed
            for row, speed, (start, end) in zip(
                self._sums, self._costs.speeds, itertools.pairwise(ends), strict=True
            )
        ]

    def _rounded(self, figure: float) -> float:
        """Return a cost without its last bits, in which sums of equal layers differ."""
        return round(figure / self._whole, 9)


def _neighbours(cuts: Cuts) -> Iterator[Cuts]:
    """Yield cuts with one border 1, 2, 4 … layers away, then with several in a row."""
    steps = [sign * 2**power for power in range(max(cuts).bit_length()) for sign in (1, -1)]
    for together in range(1, len(cuts)):
        for first in range(len(cuts) - together):
            for step in steps:
                if cuts[first] + step >= 1 and cuts[first + together] - step >= 1:
                    new = list(cuts)
                    new[first] += step
                    new[first + together] -= step
                    yield tuple(new)


# Lengths of a slot in forwards, and in recomputations.
_FORWARD, _RECOMPUTATION, _INPUTS, _BACKWARD, _BACKWARD_OF_KEPT = range(5)
_LENGTHS = ((1, 0), (0, 1), (1, 1), (2, 1), (2, 0))


class _Clock:
    """Simulates a table many times, with other lengths of its cells."""

    def __init__(self, table: Table) -> None:
        order = table.order()
        places = {slot: place for place, (_, slot) in enumerate(order)}
        early = table.recomputed()
        self.num_slots = len(order)
        self._num_devices = table.num_devices
        # Device, index of the length, cell, and the slot of another cell that it waits for, or -1.
        self._steps: list[tuple[int, int, int, int]] = []
        for device, slot in order:
            needs = [
                places[need]
                for need in slot.needs(table.num_cells)
                if need.cell != slot.cell and need in places
            ]
            length = _FORWARD
            if slot.phase == "R":
                length = _RECOMPUTATION
            elif slot.phase == "I" and slot.micro_batch not in early[slot.cell]:
                length = _INPUTS
            elif slot.phase == "B":
                is_early = slot.micro_batch in early[slot.cell]
                length = _BACKWARD_OF_KEPT if is_early else _BACKWARD
            self._steps.append((device, length, slot.cell, needs[0] if needs else -1))

    def run(self, cells: Sequence[float], recomputations: Sequence[float]) -> float:
        """Return how long the table takes.

        Args:
            cells: cost of each cell for one micro-batch, all phases together. I and W are as long
                as F, without recomputation, which is in R, or in B or I.
            recomputations: of each cell.
        """
        pairs = list(zip(cells, recomputations, strict=True))
        lengths = [
            [cost / (3 + again) * (forwards + again * more) for cost, again in pairs]
            for forwards, more in _LENGTHS
        ]
        free, ends = [0.0] * self._num_devices, [0.0] * self.num_slots
        for place, (device, length, cell, need) in enumerate(self._steps):
            begin = free[device]
            if need >= 0 and ends[need] > begin:
                begin = ends[need]
            free[device] = ends[place] = begin + lengths[length][cell]
        return max(free)
