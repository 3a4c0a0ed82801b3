"""Exact partition of a chain of layers into cells, from the costs of the layers.

Two passes go from the last cell to the first. The first finds the least possible cost of the
heaviest cell, the second the most even cut with that cost. Costs are converted to integers without
rounding, so equal costs compare equal and the result does not depend on their scale.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from lingvo_gpipe.errors import PartitionError


class NoCutFitsError(PartitionError):
    """Every cut has a cell whose layers do not fit its device."""


def partition(
    costs: Sequence[Sequence[float]],
    *,
    reach: Callable[[int, int], int] | None = None,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Cut L layers into K cells of consecutive layers, none empty.

    The heaviest cell is as light as possible. Among the cuts that reach this, the sum of squared
    cell costs is minimal. This is the least variance, the paper's criterion, if all cuts have the
    same total cost; where a layer costs more in one cell than in another, or devices differ in
    speed, the sum of squares also favours light cells. Among equal cuts, the first cells are the
    shortest.

    Args:
        costs: [K][L] any unit, finite and not negative: what each layer costs in each cell. A cell
            that recomputes nothing costs less.
        reach: (cell, start) → the largest end such that the cell can hold layers [start, end);
            `start` if it can hold none. Fewer layers always fit.
        speeds: [K] speed of each device, above 0; a cell's cost is divided by it. Empty: all equal.

    Returns:
        [K] the number of layers in each cell.

    Raises:
        PartitionError: K is not in 1 to L.
        NoCutFitsError: there is no cut within `reach`.

    Source: Huang et al. 2019, section 2.2 (variance of the cells' estimated costs). Takes
    O(K L log L) operations on whole numbers.

    >>> partition([[1, 1, 1, 1, 4]] * 3)
    (2, 2, 1)
    >>> partition([[4, 4, 4, 4, 4, 4], [3, 3, 3, 3, 3, 3]])
    (2, 4)
    """
    num_partitions, num_layers = len(costs), len(costs[0])
    check_number(num_partitions, num_layers)
    # Many cells have the same row.
    exact = {row: [Fraction(cost) for cost in row] for row in map(tuple, costs)}
    whole = dict(zip(exact, _whole(*exact.values()), strict=True))
    (slowness,) = _whole([1 / Fraction(speed) for speed in speeds or [1] * num_partitions])
    cells = [
        _Cell(
            _running([cost * factor for cost in whole[tuple(row)]]),
            _reaches(index, num_layers, reach),
        )
        for index, (row, factor) in enumerate(zip(costs, slowness, strict=True))
    ]
    heaviest = _lightest_heaviest(cells)
    if heaviest is None:
        raise NoCutFitsError(
            f"no cut of {num_layers} layers into {num_partitions} cells fits the devices' memory. "
            "Use more partitions, or larger devices"
        )
    # A later start reaches at least as far, unless `reach` is not monotonic.
    rising = all(
        before <= after
        for index, cell in enumerate(cells[1:], start=1)
        for before, after in itertools.pairwise(cell.reaches[index:])
    )
    cuts = _most_even(cells, heaviest, rising)
    return tuple(after - before for before, after in itertools.pairwise(cuts))


def check_number(num_partitions: int, num_layers: int) -> None:
    """Refuse more cells than layers, or none.

    Raises:
        PartitionError: `num_partitions` is not in 1 to `num_layers`.
    """
    if not 1 <= num_partitions <= num_layers:
        layers = f"are {num_layers} layers. Use 1 to {num_layers}"
        if num_layers == 1:
            layers = "is 1 layer. Use 1"
        raise PartitionError(f"num_partitions={num_partitions}, but there {layers}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """The cost of one cell if it held layers [start, end), for any start and end.

    Attributes:
        sums: [L+1] running sums of the layers' costs: the cell costs `sums[end] - sums[start]`.
        reaches: [L] the largest end up to which its layers fit, for each possible start.
    """

    sums: list[int]
    reaches: list[int]

    def reach(self, start: int, most: int | None = None) -> int:
        """Return the largest end such that the cell fits, and costs at most `most` if given."""
        end = self.reaches[start]
        if most is not None:
            end = min(end, bisect.bisect_right(self.sums, self.sums[start] + most) - 1)
        return end


def _lightest_heaviest(cells: list[_Cell]) -> int | None:
    """Return the least possible cost of the heaviest cell; None if no cut fits the memory."""
    num_layers = len(cells[0].sums) - 1
    # Cost of the heaviest cell after the current one, if those cells hold layers [position, L).
    after: dict[int, int] = {num_layers: 0}
    for index in reversed(range(len(cells))):
        starts = range(index, num_layers) if index else range(1)
        after = _lightest_from(cells[index], starts, after)
    return after.get(0)


def _lightest_from(cell: _Cell, starts: range, after: dict[int, int]) -> dict[int, int]:
    """Return the least cost of the heaviest cell for each start, by bisection.

    A later end makes this cell heavier and the cells after it lighter. `records` holds, from the
    last to the first, the ends after which the remaining cells cost less than after every earlier
    end; any other end costs more both in this cell and after it. At late records this cell is the
    heaviest, at early records a later cell is. The best end is one of the two records where this
    changes.
    """
    result: dict[int, int] = {}
    records: list[int] = []
    for start in reversed(range(starts.start, max(after, default=0))):
        if start + 1 in after:
            while records and after[records[-1]] >= after[start + 1]:
                records.pop()
            records.append(start + 1)
        if start not in starts:
            continue
        before, reach = cell.sums[start], cell.reach(start)
        change = bisect.bisect_left(
            records,
            True,
            key=lambda end: end <= reach and cell.sums[end] - before < after[end],
        )
        around = [end for end in records[max(0, change - 1) : change + 1] if end <= reach]
        if around:
            result[start] = min(max(cell.sums[end] - before, after[end]) for end in around)
    return result


def _most_even(cells: list[_Cell], heaviest: int, rising: bool) -> list[int]:
    """Return the K+1 borders with the least sum of squares, no cell above `heaviest`.

    If a later start reaches at least as far (`rising`), the best end of a cell never moves back
    when its start moves forward: squares of sums satisfy the quadrangle inequality, also under
    bounds on cost and bytes. Then the best end of the middle start halves the ends that the other
    starts must try.
    """
    num_layers = len(cells[0].sums) - 1
    after: dict[int, int] = {num_layers: 0}
    ends: list[dict[int, int]] = []
    for index in reversed(range(len(cells))):
        starts = range(index, num_layers) if index else range(1)
        search = _Search(cells[index], heaviest, after)
        search.fill(starts, rising)
        after = search.sums
        ends.append(search.ends)
    borders = [0]
    for chosen in reversed(ends):
        borders.append(chosen[borders[-1]])
    return borders


class _Search:
    """One cell's best end for every start, given the sums of squares after each end."""

    def __init__(self, cell: _Cell, heaviest: int, after: dict[int, int]) -> None:
        self.sums: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self._cell = cell
        self._heaviest = heaviest
        self._after = after
        self._candidates = sorted(after)

    def fill(self, starts: Sequence[int], rising: bool) -> None:
        windows = [(start, *self._window(start)) for start in starts]
        windows = [window for window in windows if window[1] < window[2]]
        if rising:
            self._halve(windows, 0, len(self._candidates))
        else:
            for start, first, stop in windows:
                self._scan(start, first, stop)

    def _window(self, start: int) -> tuple[int, int]:
        reach = self._cell.reach(start, self._heaviest)
        return (
            bisect.bisect_right(self._candidates, start),
            bisect.bisect_right(self._candidates, reach),
        )

    def _halve(self, windows: list[tuple[int, int, int]], first: int, stop: int) -> None:
        if not windows:
            return
        middle = len(windows) // 2
        start, window_first, window_stop = windows[middle]
        best = self._scan(start, max(first, window_first), min(stop, window_stop))
        self._halve(windows[:middle], first, best + 1)
        self._halve(windows[middle + 1 :], best, stop)

    def _scan(self, start: int, first: int, stop: int) -> int:
        """Store the best end for `start` among the candidates; ties go to the first of them."""
        sums = self._cell.sums
        best, best_sum = first, None
        for position in range(first, stop):
            end = self._candidates[position]
            cost = sums[end] - sums[start]
            total = cost * cost + self._after[end]
            if cost <= self._heaviest and (best_sum is None or total < best_sum):
                best, best_sum = position, total
        if best_sum is not None:
            self.sums[start], self.ends[start] = best_sum, self._candidates[best]
        return best


def _reaches(cell: int, num_layers: int, reach: Callable[[int, int], int] | None) -> list[int]:
    """Return for each start of a cell the largest end up to which its layers fit."""
    reaches = [num_layers] * num_layers
    if reach is not None:
        # Cell k begins at layer k at the earliest; cell 0 begins at layer 0.
        starts = range(cell, num_layers) if cell else range(1)
        for start in starts:
            reaches[start] = min(num_layers, reach(cell, start))
    return reaches


def _running(values: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


def _whole(*lists: list[Fraction]) -> list[list[int]]:
    """Scale all numbers by one factor to the smallest integers."""
    scale = math.lcm(*(value.denominator for values in lists for value in values))
    whole = [[int(value * scale) for value in values] for values in lists]
    divisor = math.gcd(*(value for values in whole for value in values)) or 1
    return [[value // divisor for value in values] for values in whole]
