"""What a device of so many bytes can hold: how far a cell reaches from each layer.

By the layers' formulas, before anything is cut: weights, gradients, optimizer slots, the imports
and what is kept of the micro-batches under way, and on top the largest backward. Each only grows
with the number of layers. `plan` tells what the cells that come out really need.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from lingvo_gpipe import recompute
from lingvo_gpipe.schedule import table as table_lib


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a layer adds to its cell, in the largest micro-batch.

    Attributes:
        fixed: of weights, gradients, slots and copies of weights.
        kept: what its backward keeps of its forward.
        widest: what is there besides while its own backward works.
        gradients: of its weights, new ones made while the old ones are there.
    """

    fixed: int
    kept: int
    widest: int
    gradients: int


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
    """How many micro-batches a cell holds at once.

    Attributes:
        live: under way between forward and backward.
        kept: of them, those whose forward is kept.
        share: of the device's memory that is the cell's: 1, or less where cells share a device.
    """

    live: int
    kept: int
    share: float


def holdings(table: table_lib.Table, policies: Sequence[str]) -> list[Holding]:
    """Tell what each cell of a table holds at once, by the order of its slots alone."""
    live = [0] * table.num_cells
    most = [1] * table.num_cells
    for slot in table:
        if slot.phase == "F":
            live[slot.cell] += 1
            most[slot.cell] = max(most[slot.cell], live[slot.cell])
        elif slot.phase in ("B", "W"):
            live[slot.cell] -= 1
    homes = [table.device_of(k) for k in range(table.num_cells)]
    kept = recompute.reuse(table, policies, fuse=False).kept
    return [
        Holding(most[k], min(most[k], len(kept[k])), 1 / homes.count(homes[k]))
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
        self._layers = layers
        self._holdings = holdings
        self._limit = limit_bytes
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
        needs = self._needs(self._holdings[cell], start)
        return next(itertools.islice(needs, end - start - 1, None))

    def _reach(self, holding: Holding, start: int) -> int:
        limit = self._limit * holding.share
        fitting = itertools.takewhile(lambda need: need <= limit, self._needs(holding, start))
        return start + sum(1 for _ in fitting)

    def _needs(self, holding: Holding, start: int) -> Iterator[int]:
        """Yield the bytes of one layer from `start` on, of two, and so on."""
        crossing = self._crossing[start]
        read = [reader for reader, _, _ in crossing]
        fields = list(itertools.accumulate((size for _, size, _ in crossing), initial=0))
        values = list(itertools.accumulate((size for _, _, size in crossing), initial=0))
        times = max(holding.kept, 1)
        fixed = kept = widest = gradients = 0
        for end, layer in enumerate(self._layers[start:], start=start + 1):
            fixed += layer.fixed
            kept += layer.kept
            widest = max(widest, layer.widest)
            gradients += layer.gradients
            place = bisect.bisect_left(read, end)
            imports = fields[place] + holding.live * values[place]
            yield fixed + imports + times * kept + widest + gradients


def _crossing(
    values: Sequence[ValueBytes], num_layers: int, num_micro_batches: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield for each layer what comes from before it, by reader.

    As (next reader, bytes of a field in all micro-batches, bytes of another value in one).
    """
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
            times = 1 if value.shared else num_micro_batches
            is_field = value.producer < 0
            found.append((reader, times * value.size, 0) if is_field else (reader, 0, value.size))
        yield sorted(found)
