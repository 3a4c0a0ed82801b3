"""What a device of so many bytes can hold: how far a cell reaches from each layer.

By the layers' formulas, before anything is cut: weights, gradients, optimizer slots, the imports
and what is kept of the micro-batches under way, and on top the largest backward. Each only grows
with the number of layers, so that the last end is found by halving. `plan` tells what the cells
that come out really need.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.network import partition
from lingvo_gpipe.schedule import recompute, table


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a layer adds to its cell, in the largest micro-batch.

    Attributes:
        fixed: of weights, gradients, slots and copies of weights.
        kept: what its backward keeps of its forward.
        widest: what is there besides while its own backward works; or its forward, computed again,
            where no gradient flows through it.
        gradients: of its weights, new ones made while the old ones are there.
        update: what its update holds, when activations and the new gradients are gone.
    """

    fixed: int
    kept: int
    widest: int
    gradients: int
    update: int


@dataclasses.dataclass(frozen=True, slots=True)
class ValueBytes:
    """A value of the stream.

    Attributes:
        size: bytes in the largest micro-batch.
        producer: index of its layer; negative: a field of the mini-batch.
        consumers: indices of the layers that read it, ascending.
        shared: a field that all micro-batches share.
    """

    size: int
    producer: int
    consumers: tuple[int, ...]
    shared: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """How many micro-batches a cell holds at once, at most.

    Attributes:
        near: of what the cell right before it makes, from there on to its own last use.
        far: of what any cell before it makes.
        inside: forwards whose inside is there: kept ones, and one that a backward computes again.
        share: of the device's memory that is the cell's: 1, or less where cells share a device.
    """

    near: int
    far: int
    inside: int
    share: float


def holdings(table: table.Table, policies: Sequence[str]) -> list[Holding]:
    """Tell what each cell of a table holds at once, by the order of its slots alone.

    A value waits from its producer's F on. Of those micro-batches whose gradient the producer's
    cell has not got, no more wait than have gone forward there; others wait for W alone.
    """
    kept = [reuse.kept for reuse in recompute.reuse(table, policies, fuse=False)]
    open_, held, late = ([0] * table.num_cells for _ in range(3))
    ahead, inside, latest = [1] * table.num_cells, [1] * table.num_cells, [0] * table.num_cells
    for slot in table:
        k, own = slot.cell, slot.micro_batch in kept[slot.cell]
        if slot.phase == "F":
            open_[k] += 1
            held[k] += own
            ahead[k] = max(ahead[k], open_[k])
            continue
        inside[k] = max(inside[k], held[k] + (not own))
        if slot.phase == "W":
            late[k] -= not own
        else:
            # From a kept forward, I does all.
            open_[k] -= 1
            held[k] -= own
            late[k] += slot.phase == "I" and not own
            latest[k] = max(latest[k], late[k])
    homes = [table.device_of(k) for k in range(table.num_cells)]
    M = table.num_micro_batches
    return [
        Holding(
            near=min(M, max(ahead[max(0, k - 1) : k], default=0) + latest[k]),
            far=min(M, max(ahead[:k], default=0) + latest[k]),
            inside=inside[k],
            share=1 / homes.count(homes[k]),
        )
        for k in range(table.num_cells)
    ]


class Capacity:
    """Answers how far cells reach from each layer within a number of bytes."""

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
            layers: of the network, in order.
            values: of the stream.
            holdings: per cell.
            num_micro_batches: M; fields of all are there from the first slot on, in every cell.
            limit_bytes: of a device.
        """
        self._num_layers = len(layers)
        self._holdings = holdings
        self._limit = limit_bytes
        self._fixed = _running(layer.fixed for layer in layers)
        self._gradients = _running(layer.gradients for layer in layers)
        self._kept = _running(layer.kept for layer in layers)
        self._widest = _maxima([layer.widest for layer in layers])
        self._update = _maxima([layer.update for layer in layers])
        self._crossing = list(_crossing(values, len(layers), num_micro_batches))
        self._known: dict[tuple[Holding, int], int] = {}

    def reach(self, cell: int, start: int) -> int:
        """Return the last end so that the cell can hold layers [start, end), for `partition`."""
        key = self._holdings[cell], start
        if key not in self._known:
            self._known[key] = self._reach(*key)
        return self._known[key]

    def need_bytes(self, cell: int, start: int, end: int) -> int:
        """Return what the cell needs if it holds layers [start, end)."""
        return self._need(self._holdings[cell], start, end)

    @property
    def is_shared(self) -> bool:
        """Whether a device has several cells."""
        return any(holding.share < 1 for holding in self._holdings)

    def device_bytes(self, cell: int, start: int, end: int) -> int:
        """Return the same of its whole device, whose other cells have as much each."""
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
        crossing = self._crossing[start]
        read = bisect.bisect_left(crossing.readers, end)
        imports = crossing.fields[read]
        imports += holding.near * crossing.near[read] + holding.far * crossing.far[read]
        widest = _largest(self._widest, start, end)
        step = gradients + imports + holding.inside * kept + widest
        return fixed + max(step, _largest(self._update, start, end))


def cuts_within(
    limit: str,
    within: Capacity,
    costs: Sequence[Sequence[float]],
    names: Sequence[str],
    speeds: Sequence[float] | None = None,
    links: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the cuts whose every cell fits its device.

    Args:
        limit: bytes of a device, as they were given.
        within: how far cells reach in it.
        costs: per cell, what each layer costs in it.
        names: of the layers.
        speeds: per cell, how fast its device is; None: all alike.
        links: per layer but the last, what a cut behind it costs; None: nothing.

    Raises:
        PartitionError: there are none; tells by how much, and the way out.
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
            raise errors.PartitionError(
                f"device_memory={limit}, but layer {names[worst]} alone needs "
                f"{needed}. Use fewer examples, more micro-batches, or larger devices"
            ) from error
        whole = units.size(within.need_bytes(0, 0, num_layers))
        raise errors.PartitionError(
            f"device_memory={limit}, but no cut into {num_cells} cells fits: in one cell, the "
            f"layers need {whole}. Use more partitions, more micro-batches, or larger devices"
        ) from error


def _running(sizes: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


def _maxima(sizes: Sequence[int]) -> list[list[int]]:
    """Return the largest of every 1, 2, 4, 8 … neighbours: by power of 2, by the first of them."""
    rows = [list(sizes)]
    while 2 ** len(rows) <= len(sizes):
        half = 2 ** (len(rows) - 1)
        rows.append([max(pair) for pair in zip(rows[-1], rows[-1][half:], strict=False)])
    return rows


def _largest(maxima: Sequence[Sequence[int]], start: int, end: int) -> int:
    """Return the largest of [start, end), of what `_maxima` gave."""
    power = (end - start).bit_length() - 1
    return max(maxima[power][start], maxima[power][end - 2**power])


@dataclasses.dataclass(frozen=True, slots=True)
class _Crossing:
    """What comes from before a layer, by its next reader.

    Attributes:
        readers: ascending.
        fields: bytes of the first 0, 1, 2 … of them, if they are fields: in all micro-batches.
        near: the same if they are what the layer right before it makes: in one.
        far: the same if they are others: in one.
    """

    readers: list[int]
    fields: list[int]
    near: list[int]
    far: list[int]


def _crossing(
    values: Sequence[ValueBytes], num_layers: int, num_micro_batches: int
) -> Iterator[_Crossing]:
    """Yield for each layer what comes from before it."""
    open_values: list[ValueBytes] = [value for value in values if value.producer < 0]
    made: dict[int, list[ValueBytes]] = {}
    for value in values:
        made.setdefault(value.producer, []).append(value)
    for start in range(num_layers):
        open_values += made.get(start - 1, []) if start else []
        open_values = [v for v in open_values if v.consumers and v.consumers[-1] >= start]
        found = []
        for value in open_values:
            reader = value.consumers[bisect.bisect_left(value.consumers, start)]
            if value.producer < 0:
                sizes = (value.size * (1 if value.shared else num_micro_batches), 0, 0)
            else:
                is_near = value.producer == start - 1
                sizes = (0, value.size, 0) if is_near else (0, 0, value.size)
            found.append((reader, *sizes))
        found.sort()
        readers, *columns = zip(*found, strict=True) if found else ((), (), (), ())
        fields, near, far = map(_running, columns)
        yield _Crossing(list(readers), fields, near, far)
