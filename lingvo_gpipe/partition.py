"""A chain of layers' costs → how many layers each cell holds, exactly.

Two passes from the last cell to the first, in whole numbers, so that equal is equal: the first
finds how light the heaviest cell can be, the second the most even cut among those that reach it.
Costs are converted to integers without rounding; the answer does not depend on their scale.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from lingvo_gpipe.errors import PartitionError


def partition(
    costs: Sequence[float],
    num_partitions: int,
    *,
    own_costs: Mapping[int, Sequence[float]] | None = None,
    memory: Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    reach: Callable[[int, int], int] | None = None,
    speeds: Sequence[float] | None = None,
    link_costs: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Cut L layers into K cells of consecutive layers, none empty.

    The heaviest cell is as light as possible. Among the cuts that reach this, the sum of squared
    cell costs is least: this is the least variance, the paper's criterion, since the sum of all
    cells is the same for every cut (where it is not, with `own_costs`, `speeds` or `link_costs`,
    cells are light first and even second). Among equals, the first cells are the shortest.

    Args:
        costs: [L] any unit, what each layer costs.
        num_partitions: K, from 1 to L.
        own_costs: cell → [L] what each layer costs if it lies in that cell, where that differs: in
            one that recomputes nothing, or in the last one, whose forward and backward may be
            fused.
        memory: [L] bytes that each layer keeps on its device.
        memory_limit: bytes that a device has, or [K] of them.
        reach: (cell, start) → the last end so that the cell can hold layers [start, end), where
            bytes do not simply add up; `start` where it can hold none. Fewer layers always fit.
        speeds: [K] how fast each device is; a cell's cost is divided by it. None: all equal.
        link_costs: [L-1] what a cut after layer l costs, added to the cell before it and to the
            one behind it.

    Returns:
        [K] the number of layers in each cell.

    Raises:
        PartitionError: K is not in 1 to L, a length does not fit, a number is negative or not
            finite, or no cut fits the memory.

    Source: Huang et al. 2019, section 2.2 (variance of the cells' estimated costs). Takes
    O(K L log L) operations on whole numbers; with link costs, O(K L^2) at worst.

    >>> partition([1, 1, 1, 1, 4], 3)
    (2, 2, 1)
    >>> partition([4, 4, 4, 4, 4, 4], 2, own_costs={1: [3, 3, 3, 3, 3, 3]})
    (2, 4)
    """
    num_layers = len(costs)
    if not 1 <= num_partitions <= num_layers:
        raise PartitionError(_wrong_number(num_partitions, num_layers))
    rows, links = _rows(costs, num_partitions, own_costs or {}, link_costs)
    bytes_, limits = _memory(memory, memory_limit, num_layers, num_partitions)
    kept = _running(bytes_)
    cells = [
        _Cell.of(row, [0, *links, 0], factor, _reaches(index, kept, limit, reach))
        for index, (row, factor, limit) in enumerate(
            zip(rows, _slowness(speeds, num_partitions), limits, strict=True)
        )
    ]
    ordered = not any(links)
    heaviest = _lightest_heaviest(cells, ordered)
    if heaviest is None:
        raise PartitionError(_too_little_memory(bytes_, limits, reach is not None))
    # A later start reaches at least as far, unless `reach` says otherwise.
    rising = all(
        before <= after
        for index, cell in enumerate(cells[1:], start=1)
        for before, after in itertools.pairwise(cell.reaches[index:])
    )
    cuts = _most_even(cells, heaviest, ordered and rising)
    return tuple(after - before for before, after in itertools.pairwise(cuts))


def check_cuts(cuts: Sequence[int], num_layers: int, num_partitions: int) -> tuple[int, ...]:
    """Return the user's own cuts, the number of layers in each cell, if they fit.

    Raises:
        PartitionError: they are not `num_partitions` positive numbers that sum to `num_layers`.

    >>> check_cuts([2, 1], num_layers=3, num_partitions=2)
    (2, 1)
    """
    shown = f"cuts={list(cuts)}"
    if len(cuts) != num_partitions:
        raise PartitionError(
            f"{shown} has {len(cuts)} cells, but num_partitions={num_partitions}. Give each cell's "
            f"number of layers, or set num_partitions={len(cuts)}"
        )
    for cell, count in enumerate(cuts):
        if not isinstance(count, numbers.Integral) or count < 1:
            raise PartitionError(
                f"{shown}: cell {cell} has {count} layers. Give each cell a whole number from 1"
            )
    if sum(cuts) != num_layers:
        raise PartitionError(
            f"{shown} sums to {sum(cuts)}, but there are {num_layers} layers. Change it by "
            f"{num_layers - sum(cuts):+d}"
        )
    return tuple(int(count) for count in cuts)


def heaviest_share(costs: Sequence[float], cuts: Sequence[int]) -> float:
    """Return the heaviest cell's share of all costs: 1/K where the cut is even.

    >>> heaviest_share([1, 1, 2], (2, 1))
    0.5
    """
    check_cuts(cuts, len(costs), len(cuts))
    ends = itertools.accumulate(cuts)
    exact = _running(_whole(_numbers("costs", costs, len(costs)))[0])
    if not exact[-1]:
        return 1 / len(cuts)
    loads = [exact[end] - exact[end - count] for end, count in zip(ends, cuts, strict=True)]
    return max(loads) / exact[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """What one cell would cost if it held layers [start, end), for any start and end.

    Attributes:
        inner: [L+1] running sums of its layers' costs; never falling.
        ahead, behind: [L+1] the same with the links' costs: the cell costs
            `behind[end] - ahead[start]`.
        reaches: [L] the last end up to which its layers fit, for each start it can have.
    """

    inner: list[int]
    ahead: list[int]
    behind: list[int]
    reaches: list[int]

    @classmethod
    def of(cls, costs: list[int], links: list[int], factor: int, reaches: list[int]) -> _Cell:
        inner = _running([cost * factor for cost in costs])
        ahead = [cost - link * factor for cost, link in zip(inner, links, strict=True)]
        behind = [cost + link * factor for cost, link in zip(inner, links, strict=True)]
        return cls(inner, ahead, behind, reaches)

    def reach(self, start: int, most: int | None = None) -> int:
        """Return the last end of a cell whose layers fit and, `most` given, cost no more."""
        end = self.reaches[start]
        if most is not None:
            end = min(end, bisect.bisect_right(self.inner, self.inner[start] + most) - 1)
        return end


def _lightest_heaviest(cells: list[_Cell], ordered: bool) -> int | None:
    """Return the least possible cost of the heaviest cell; None where memory allows no cut."""
    num_layers = len(cells[0].inner) - 1
    # The heaviest of the cells behind the one in hand, if they hold layers [position, L).
    after: dict[int, int] = {num_layers: 0}
    for index in reversed(range(len(cells))):
        starts = range(index, num_layers) if index else range(1)
        after = (_lightest_ordered if ordered else _lightest_by_scan)(cells[index], starts, after)
    return after.get(0)


def _lightest_ordered(cell: _Cell, starts: range, after: dict[int, int]) -> dict[int, int]:
    """Return the lightest heaviest for each start, by halving: the cell only grows with its end.

    `records` holds, from the far to the near, the ends behind which less remains than behind
    every end before them: the others cost more on both sides. Far records are bound by the cell
    itself, near ones by what is behind it; the best is one of the two where that changes.
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
        before, reach = cell.inner[start], cell.reach(start)
        change = bisect.bisect_left(
            records,
            True,
            key=lambda end: end <= reach and cell.inner[end] - before < after[end],
        )
        around = [end for end in records[max(0, change - 1) : change + 1] if end <= reach]
        if around:
            result[start] = min(max(cell.inner[end] - before, after[end]) for end in around)
    return result


def _lightest_by_scan(cell: _Cell, starts: range, after: dict[int, int]) -> dict[int, int]:
    """Return the lightest heaviest for each start, whatever links add to the cells."""
    result: dict[int, int] = {}
    candidates = sorted(after)
    for start in starts:
        best: int | None = None
        before, ahead, reach = cell.inner[start], cell.ahead[start], cell.reach(start)
        for end in candidates[bisect.bisect_right(candidates, start) :]:
            if end > reach or (best is not None and cell.inner[end] - before >= best):
                break
            cost = max(cell.behind[end] - ahead, after[end])
            best = cost if best is None else min(best, cost)
        if best is not None:
            result[start] = best
    return result


def _most_even(cells: list[_Cell], heaviest: int, ordered: bool) -> list[int]:
    """Return the K+1 borders with the least sum of squares, no cell above `heaviest`.

    Without link costs the best end of a cell never moves back when its start moves on (`ordered`):
    a square of a sum has the quadrangle inequality, and bounds on cost and bytes keep it. Then the
    middle start halves the ends that the others need to look at.
    """
    num_layers = len(cells[0].inner) - 1
    after: dict[int, int] = {num_layers: 0}
    ends: list[dict[int, int]] = []
    for index in reversed(range(len(cells))):
        starts = range(index, num_layers) if index else range(1)
        search = _Search(cells[index], heaviest, after)
        search.fill(starts, ordered)
        after = search.sums
        ends.append(search.ends)
    borders = [0]
    for chosen in reversed(ends):
        borders.append(chosen[borders[-1]])
    return borders


class _Search:
    """One cell's best end for every start, given the sums of squares behind each end."""

    def __init__(self, cell: _Cell, heaviest: int, after: dict[int, int]) -> None:
        self.sums: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self._cell = cell
        self._heaviest = heaviest
        self._after = after
        self._candidates = sorted(after)

    def fill(self, starts: Sequence[int], ordered: bool) -> None:
        windows = [(start, *self._window(start)) for start in starts]
        windows = [window for window in windows if window[1] < window[2]]
        if ordered:
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
        start, own_first, own_stop = windows[middle]
        best = self._scan(start, max(first, own_first), min(stop, own_stop))
        self._halve(windows[:middle], first, best + 1)
        self._halve(windows[middle + 1 :], best, stop)

    def _scan(self, start: int, first: int, stop: int) -> int:
        """Store the best end for `start` among the candidates; ties go to the first of them."""
        behind, ahead = self._cell.behind, self._cell.ahead[start]
        best, best_sum = first, None
        for position in range(first, stop):
            end = self._candidates[position]
            cost = behind[end] - ahead
            total = cost * cost + self._after[end]
            if cost <= self._heaviest and (best_sum is None or total < best_sum):
                best, best_sum = position, total
        if best_sum is not None:
            self.sums[start], self.ends[start] = best_sum, self._candidates[best]
        return best


def _rows(
    costs: Sequence[float],
    num_partitions: int,
    own_costs: Mapping[int, Sequence[float]],
    link_costs: Sequence[float] | None,
) -> tuple[list[list[int]], list[int]]:
    """Return per cell what each layer costs in it, and what links cost, in whole numbers."""
    num_layers = len(costs)
    exact = [_numbers("costs", costs, num_layers)]
    numbered = {id(costs): 0}
    row_of = [0] * num_partitions
    for cell, own in own_costs.items():
        if not 0 <= cell < num_partitions:
            raise PartitionError(
                f"own_costs names cell {cell}, but there are {num_partitions} cells, counted from 0"
            )
        if id(own) not in numbered:  # many cells share few rows
            numbered[id(own)] = len(exact)
            exact.append(_numbers(f"own_costs[{cell}]", own, num_layers))
        row_of[cell] = numbered[id(own)]
    *rows, links = _whole(*exact, _numbers("link_costs", link_costs, num_layers - 1))
    return [rows[number] for number in row_of], links


def _reaches(
    cell: int, kept: list[int], limit: int | None, reach: Callable[[int, int], int] | None
) -> list[int]:
    """Return for each start of a cell the last end up to which its layers fit."""
    num_layers = len(kept) - 1
    reaches = [num_layers] * num_layers
    if limit is not None:
        reaches = [bisect.bisect_right(kept, have + limit) - 1 for have in kept[:-1]]
    if reach is not None:
        # A cell begins at its own number at the earliest, the first one nowhere else.
        starts = range(cell, num_layers) if cell else range(1)
        for start in starts:
            reaches[start] = min(reaches[start], reach(cell, start))
    return reaches


def _running(values: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))


def _numbers(what: str, values: Sequence[float] | None, count: int) -> list[Fraction]:
    """Return `values` without rounding; None stands for zeros."""
    if values is None:
        return [Fraction(0)] * count
    if len(values) != count:
        raise PartitionError(f"{what} has {len(values)} numbers. Give {count}")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise PartitionError(f"{what}[{index}]={value} is no cost. Use 0 or more")
    return [
        Fraction(value) if isinstance(value, numbers.Rational) else Fraction(float(value))
        for value in values
    ]


def _whole(*lists: list[Fraction]) -> list[list[int]]:
    """Scale all numbers alike to the smallest whole ones."""
    scale = math.lcm(*(value.denominator for values in lists for value in values))
    whole = [[int(value * scale) for value in values] for values in lists]
    divisor = math.gcd(*(value for values in whole for value in values)) or 1
    return [[value // divisor for value in values] for values in whole]


def _slowness(speeds: Sequence[float] | None, num_partitions: int) -> list[int]:
    """Return whole factors in proportion to the time that each device takes."""
    exact = [Fraction(1)] * num_partitions
    if speeds is not None:
        exact = _numbers("speeds", speeds, num_partitions)
        for cell, speed in enumerate(exact):
            if not speed:
                raise PartitionError(f"speeds[{cell}]=0, so that cell never ends. Use more than 0")
    return _whole([1 / speed for speed in exact])[0]


def _memory(
    memory: Sequence[float] | None,
    memory_limit: float | Sequence[float] | None,
    num_layers: int,
    num_partitions: int,
) -> tuple[list[int], list[int | None]]:
    """Return whole bytes of each layer, and the limit of each cell."""
    if memory is None and memory_limit is None:
        return [0] * num_layers, [None] * num_partitions
    if memory is None or memory_limit is None:
        raise PartitionError("memory and memory_limit need each other. Give both, or neither")
    if not isinstance(memory_limit, Sequence):
        memory_limit = [memory_limit] * num_partitions
    # A layer's bytes are rounded up and a limit down: what fits then really fits.
    layers = [math.ceil(size) for size in _numbers("memory", memory, num_layers)]
    limits = [math.floor(size) for size in _numbers("memory_limit", memory_limit, num_partitions)]
    return layers, list(limits)


def _too_little_memory(layers: list[int], limits: list[int | None], by_reach: bool) -> str:
    if by_reach:
        return f"no cut of {len(layers)} layers into {len(limits)} cells fits the devices' memory"
    largest = max(limit for limit in limits if limit is not None)
    for index, size in enumerate(layers):
        if size > largest:
            return (
                f"layer {index} needs {size:,} bytes, more than the memory_limit of {largest:,}. "
                "Make that layer smaller, or its device larger"
            )
    if len(set(limits)) > 1:
        return (
            f"no cut into {len(limits)} cells fits memory_limit={limits}: the layers need "
            f"{sum(layers):,} bytes in all. Use more partitions, or larger devices"
        )
    needed, free = 0, 0
    for size in layers:
        needed, free = (
            (needed, free - size) if size <= free and needed else (needed + 1, largest - size)
        )
    return (
        f"no cut into {len(limits)} cells fits the memory_limit of {largest:,} bytes. "
        f"Use num_partitions={needed} or more"
    )


def _wrong_number(num_partitions: int, num_layers: int) -> str:
    if num_layers == 0:
        return "there are no layers to cut. Give one or more"
    layers = "1 layer. Use 1" if num_layers == 1 else f"{num_layers} layers. Use 1 to {num_layers}"
    return (
        f"num_partitions={num_partitions}, but there {'is' if num_layers == 1 else 'are'} {layers}"
    )
