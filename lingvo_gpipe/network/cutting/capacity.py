"""How many layers fit a cell on a device of given memory, for each possible first layer.

The layers' formulas are used, before the network is cut. They count weights, gradients, optimizer
slots, imports, the tensors kept for micro-batches in flight, and the largest backward. Each of
these only grows with the number of layers, so bisection finds the last layer that fits. `plan`
computes what the resulting cells need.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gpipe.console import units
from lingvo_gpipe.network.cutting import partition
from lingvo_gpipe.schedule import recompute
from lingvo_gpipe.schedule.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a layer adds to its cell, in the largest micro-batch.

    Attributes:
        fixed: weights, gradients, slots and copies of weights.
        kept: tensors of its forward that are kept for its backward.
        left: what I leaves for W, of its forward and of its own.
        widest: the most that its backward holds in addition to `kept`; for a layer without a
            gradient, the most that its recomputed forward holds.
        gradients: new gradients of its weights, which are made while the old ones exist.
        update: what its update holds, after activations and new gradients are freed.
        excess: what the owner of its largest weight holds more than the mean of all replicas, which
            `fixed` counts.
    """

    fixed: int
    kept: int
    left: int
    widest: int
    gradients: int
    update: int
    excess: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ValueBytes:
    """A value of the stream.

    Attributes:
        size: bytes in the largest micro-batch.
        producer: index of the layer that writes it; negative: a field of the mini-batch.
        consumers: indices of the layers that read it, ascending.
        shared: a field that all micro-batches share.
    """

    size: int
    producer: int
    consumers: tuple[int, ...]
    shared: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """The largest number of micro-batches whose tensors a cell holds at once.

    Attributes:
        near: for exports of the cell directly before it, until this cell's last use.
        far: for exports of any earlier cell.
        inside: (forwards whose intermediate tensors exist, micro-batches of which an I left
            something for W), at the moments that need most. The forwards are kept ones, those that
            an R has computed, and one that a backward recomputes.
        share: share of the device's memory: 1, or less if cells share a device.
    """

    near: int
    far: int
    inside: tuple[tuple[int, int], ...]
    share: float


def holdings(table: Table, policies: Sequence[str]) -> list[Holding]:
    """Return what each cell of a table holds at once, from the order of its slots.

    A value is held from its producer's F on. At most `most` micro-batches have run F in the
    producer and wait for their gradient; at most `latest` more wait only for W in this cell.
    """
    reuses = recompute.reuse(table, policies, fuse=False)
    # Current numbers per cell: forwards without gradient, kept forwards, micro-batches before W.
    in_flight, num_kept, late = ([0] * table.num_cells for _ in range(3))
    # The largest numbers so far.
    most, latest = [1] * table.num_cells, [0] * table.num_cells
    inside: list[set[tuple[int, int]]] = [{(1, 0)} for _ in range(table.num_cells)]
    for slot in table:
        k, m = slot.cell, slot.micro_batch
        is_early = m in reuses[k].early
        is_kept = is_early or m in reuses[k].kept
        if slot.phase == "R":
            num_kept[k] += is_early
            continue
        if slot.phase == "F":
            in_flight[k] += 1
            num_kept[k] += is_kept and not is_early
            most[k] = max(most[k], in_flight[k])
            continue
        # Cell 0 reads only fields: its I computes nothing, its W everything.
        if slot.phase in ("B", "I" if k else "W"):
            waiting = late[k] + (slot.phase == "I") if k else 0
            inside[k].add((num_kept[k] + (not is_kept), waiting))
            num_kept[k] -= is_kept
        if slot.phase == "W":
            late[k] -= 1
        else:
            in_flight[k] -= 1
            late[k] += slot.phase == "I"
            latest[k] = max(latest[k], late[k])
    devices = [table.device_of(k) for k in range(table.num_cells)]
    M = table.num_micro_batches
    return [
        Holding(
            near=min(M, max(most[max(0, k - 1) : k], default=0) + latest[k]),
            far=min(M, max(most[:k], default=0) + latest[k]),
            inside=tuple(_largest_pairs(inside[k])),
            share=1 / devices.count(devices[k]),
        )
        for k in range(table.num_cells)
    ]


def _largest_pairs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of which no other one has two numbers that are as large.

    >>> list(_largest_pairs([(1, 0), (1, 2), (3, 0), (2, 1), (2, 0)]))
    [(3, 0), (2, 1), (1, 2)]
    """
    second = -1
    for pair in sorted(pairs, reverse=True):
        if pair[1] > second:
            second = pair[1]
            yield pair


class Capacity:
    """How far a cell can reach from each layer within a number of bytes."""

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        values: Sequence[ValueBytes],
        holdings: Sequence[Holding],
        num_micro_batches: int,
        limit_bytes: int,
    ) -> None:
        """Make it.

        Args:
            layers: layers of the network, in order.
            values: values of the stream.
            holdings: per cell.
            num_micro_batches: M; the fields of all M are held from the first slot on.
            limit_bytes: memory of a device.
        """
        self._num_layers = len(layers)
        self._holdings = holdings
        self._limit = limit_bytes
        self._fixed = _running(layer.fixed for layer in layers)
        self._gradients = _running(layer.gradients for layer in layers)
        self._kept = _running(layer.kept for layer in layers)
        self._left = _running(layer.left for layer in layers)
        self._widest = _maxima([layer.widest for layer in layers])
        self._update = _maxima([layer.update for layer in layers])
        self._excess = _maxima([layer.excess for layer in layers])
        self._crossing = list(_crossing(values, len(layers), num_micro_batches))
        self._known: dict[tuple[Holding, int], int] = {}

    def reach(self, cell: int, start: int) -> int:
        """Return the largest end such that the cell can hold layers [start, end)."""
        key = self._holdings[cell], start
        if key not in self._known:
            self._known[key] = self._reach(*key)
        return self._known[key]

    def need_bytes(self, cell: int, start: int, end: int) -> int:
        """Return the bytes that the cell needs if it holds layers [start, end)."""
        return self._need(self._holdings[cell], start, end)

    @property
    def is_shared(self) -> bool:
        """Whether a device has several cells."""
        return any(holding.share < 1 for holding in self._holdings)

    def device_bytes(self, cell: int, start: int, end: int) -> int:
        """Return the same for its whole device, if each of its other cells needs as much."""
        return round(self.need_bytes(cell, start, end) / self._holdings[cell].share)

    def _reach(self, holding: Holding, start: int) -> int:
        ends = range(start + 1, self._num_layers + 1)
        limit = self._limit * holding.share
        fitting = bisect.bisect_right(ends, limit, key=lambda end: self._need(holding, start, end))
        return start + fitting

    def _need(self, holding: Holding, start: int, end: int) -> int:
        fixed = self._fixed[end] - self._fixed[start]
        gradients = self._gradients[end] - self._gradients[start]
        kept = self._kept[end] - self._kept[start]
        left = self._left[end] - self._left[start]
        inside = max(forwards * kept + waiting * left for forwards, waiting in holding.inside)
        crossing = self._crossing[start]
        read = bisect.bisect_left(crossing.readers, end)
        imports = crossing.fields[read]
        imports += holding.near * crossing.near[read] + holding.far * crossing.far[read]
        widest = _largest(self._widest, start, end)
        step = gradients + imports + inside + widest
        # Owners are balanced up to one weight.
        fixed += _largest(self._excess, start, end)
        return fixed + max(step, _largest(self._update, start, end))


def cuts_within(
    limit: str,
    within: Capacity,
    costs: Sequence[Sequence[float]],
    names: Sequence[str],
    speeds: Sequence[float] | None = None,
    links: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return cuts such that every cell fits its device.

    Args:
        limit: memory of a device, such as 8GiB.
        within: how many layers the cells can hold in it.
        costs: for each cell, the cost of each layer in it.
        names: names of the layers.
        speeds: for each cell, the speed of its device; None: all equal.
        links: for each layer except the last, the cost of a cut after it; None: no cost.

    Raises:
        NoCutFitsError: no cut fits; the text has the memory needed and the way out.
    """
    num_layers, num_cells = len(names), len(costs)
    try:
        return partition.partition(
            costs[0],
            num_cells,
            cell_costs=dict(enumerate(costs)),
            reach=within.reach,
            speeds=speeds,
            link_costs=links,
        )
    except partition.NoCutFitsError as error:
        spare = num_layers - num_cells
        alone = [
            min(
                within.device_bytes(k, n, n + 1)
                for k in range(max(0, n - spare), min(n, num_cells - 1) + 1)
            )
            for n in range(num_layers)
        ]
        worst = max(range(num_layers), key=alone.__getitem__)
        if alone[worst] > units.parse_size(limit):
            needed = units.size(alone[worst])
            if within.is_shared:
                needed = f"a device of {needed}, which cells share"
            raise partition.NoCutFitsError(
                f"device_memory={limit}, but layer {names[worst]} alone needs "
                f"{needed}. Use fewer examples, more micro-batches, larger devices, or slices of "
                "the layer, which --mode=plan finds"
            ) from error
        whole = units.size(within.need_bytes(0, 0, num_layers))
        raise partition.NoCutFitsError(
            f"device_memory={limit}, but no cut into {num_cells} cells fits: in one cell, the "
            f"layers need {whole}. Use more partitions, more micro-batches, or larger devices"
        ) from error


def _running(sizes: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


def _maxima(sizes: Sequence[int]) -> list[list[int]]:
    """Return the largest of every 1, 2, 4, 8 … neighbours, indexed [power of 2, first index]."""
    rows = [list(sizes)]
    while 2 ** len(rows) <= len(sizes):
        half = 2 ** (len(rows) - 1)
        rows.append([max(pair) for pair in zip(rows[-1], rows[-1][half:], strict=False)])
    return rows


def _largest(maxima: Sequence[Sequence[int]], start: int, end: int) -> int:
    """Return the largest of [start, end) from the result of `_maxima`."""
    power = (end - start).bit_length() - 1
    return max(maxima[power][start], maxima[power][end - 2**power])


@dataclasses.dataclass(frozen=True, slots=True)
class _Crossing:
    """The values that would enter a cell starting at a layer, in the order of their next reader.

    Attributes:
        readers: for each value, the layer that reads it next; ascending.
        fields: bytes of the first 0, 1, 2 … values, only fields, for all micro-batches.
        near: the same for values that the layer directly before writes, for one micro-batch.
        far: the same for all other values, for one micro-batch.
    """

    readers: list[int]
    fields: list[int]
    near: list[int]
    far: list[int]


def _crossing(
    values: Sequence[ValueBytes], num_layers: int, num_micro_batches: int
) -> Iterator[_Crossing]:
    """Yield for each layer the values that it or later layers read from earlier ones."""
    open_values: list[ValueBytes] = [value for value in values if value.producer < 0]
    made: dict[int, list[ValueBytes]] = {}
    for value in values:
        made.setdefault(value.producer, []).append(value)
    for start in range(num_layers):
        open_values += made.get(start - 1, []) if start else []
        open_values = [v for v in open_values if v.consumers and v.consumers[-1] >= start]
        rows = []
        for value in open_values:
            reader = value.consumers[bisect.bisect_left(value.consumers, start)]
            if value.producer < 0:
                sizes = (value.size * (1 if value.shared else num_micro_batches), 0, 0)
            else:
                is_near = value.producer == start - 1
                sizes = (0, value.size, 0) if is_near else (0, 0, value.size)
            rows.append((reader, *sizes))
        rows.sort()
        readers, *columns = zip(*rows, strict=True) if rows else ((), (), (), ())
        fields, near, far = map(_running, columns)
        yield _Crossing(list(readers), fields, near, far)
