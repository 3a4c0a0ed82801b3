"""How many layers fit a cell on a device of given memory, for each possible first layer.

The layers' formulas are used, before the network is cut. They count weights, gradients, optimizer
slots, imports, the tensors kept for micro-batches in flight, and the largest backward. Each of
these only grows with the number of layers. `plan` computes what the resulting cells need.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base, slices
from lingvo_gpipe.network import memory_formulas, replicas, wiring
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers
from lingvo_gpipe.schedule import recompute
from lingvo_gpipe.schedule.table import Table

_Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a layer adds to its cell, in the largest micro-batch.

    Attributes:
        fixed: weights, gradients, slots and copies of weights.
        kept: tensors of its forward that are kept for its backward.
        left: what slot I leaves for slot W, from the forward and from its own computation.
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
        size: bytes in the largest micro-batch; of a field, in all of them.
        producer: index of the layer that writes it; negative: a field of the mini-batch.
        consumers: indices of the layers that read it, ascending.
    """

    size: int
    producer: int
    consumers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """The largest number of micro-batches whose tensors a cell holds at once.

    Attributes:
        from_previous: for exports of the cell directly before it, until this cell last uses them.
        from_earlier: for exports of any earlier cell.
        in_cell: (forwards whose intermediate tensors exist, micro-batches of which a slot I left
            something for slot W), at the moments that may need most. The forwards are kept ones,
            those that a slot R has computed, and one that a backward recomputes.
        share: share of the device's memory: 1, or less if cells share a device.
    """

    from_previous: int
    from_earlier: int
    in_cell: frozenset[tuple[int, int]]
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
    in_cell: list[set[tuple[int, int]]] = [{(1, 0)} for _ in range(table.num_cells)]
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
            in_cell[k].add((num_kept[k] + (not is_kept), waiting))
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
            from_previous=min(M, max(most[max(0, k - 1) : k], default=0) + latest[k]),
            from_earlier=min(M, max(most[:k], default=0) + latest[k]),
            in_cell=frozenset(in_cell[k]),
            share=1 / devices.count(devices[k]),
        )
        for k in range(table.num_cells)
    ]


class Capacity:
    """How far a cell can reach from each layer within a number of bytes."""

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        values: Sequence[ValueBytes],
        holdings: Sequence[Holding],
        limit_bytes: int,
    ) -> None:
        """Make it.

        Args:
            layers: layers of the network, in order.
            values: values of the stream.
            holdings: per cell.
            limit_bytes: memory of a device.
        """
        self._holdings = holdings
        self._limit = limit_bytes
        self._bytes = np.array([dataclasses.astuple(layer) for layer in layers], np.int64).T
        # For each first layer of a cell, the values of earlier layers that it would receive, and
        # the layer that reads each of them next.
        self._entering: list[list[tuple[int, ValueBytes]]] = [[] for _ in layers]
        for value in values:
            for earlier, reader in itertools.pairwise((value.producer, *value.consumers)):
                for start in range(max(0, earlier + 1), reader + 1):
                    self._entering[start].append((reader, value))
        self._reaches: dict[tuple[Holding, int], int] = {}

    def reach(self, cell: int, start: int) -> int:
        """Return the largest end such that the cell can hold layers [start, end)."""
        key = self._holdings[cell], start
        if key not in self._reaches:
            needs, limit = self._needs(*key), self._limit * key[0].share
            self._reaches[key] = start + int(np.searchsorted(needs, limit, side="right"))
        return self._reaches[key]

    def need_bytes(self, cell: int, start: int, end: int) -> int:
        """Return the bytes that the cell needs if it holds layers [start, end)."""
        return int(self._needs(self._holdings[cell], start)[end - start - 1])

    @property
    def is_shared(self) -> bool:
        """Whether a device has several cells."""
        return any(holding.share < 1 for holding in self._holdings)

    def device_bytes(self, cell: int, start: int, end: int) -> int:
        """Return the same for its whole device, if each of its other cells needs as much."""
        return round(self.need_bytes(cell, start, end) / self._holdings[cell].share)

    def _needs(self, holding: Holding, start: int) -> _Bytes:
        """Return the bytes that a cell needs if it holds 1, 2, 3 … layers from `start` on."""
        fixed, kept, left, widest, gradients, update, excess = self._bytes[:, start:]
        imports = np.zeros_like(fixed)
        for reader, value in self._entering[start]:
            count = holding.from_previous if value.producer == start - 1 else holding.from_earlier
            imports[reader - start] += value.size * (1 if value.producer < 0 else count)
        all_kept, all_left = np.cumsum(kept), np.cumsum(left)
        in_cell = [
            forwards * all_kept + waiting * all_left for forwards, waiting in holding.in_cell
        ]
        step = np.cumsum(gradients + imports) + np.maximum.accumulate(widest)
        step += np.max(in_cell, axis=0)
        # Owners are balanced up to one weight.
        always = np.cumsum(fixed) + np.maximum.accumulate(excess)
        return always + np.maximum(step, np.maximum.accumulate(update))


def of_network(layers: WiredLayers, holdings: Sequence[Holding], limit_bytes: int) -> Capacity:
    """Return how many layers cells can hold in the memory of a device, by formula."""
    num_micro_batches = len(replicas.shares(len(layers.sizes), layers.params.num_replicas)[0])

    def value(version: wiring.Version) -> ValueBytes:
        size = base.spec_bytes(layers.specs[version.index])
        # The fields of all micro-batches are held from the first slot on.
        if version.producer == wiring.FIELD:
            size *= num_micro_batches
        return ValueBytes(size, version.producer, version.consumers)

    return Capacity(
        [_layer_bytes(layers, layer) for layer in layers.layers],
        list(map(value, layers.wiring.versions)),
        holdings,
        limit_bytes,
    )


def _layer_bytes(layers: WiredLayers, layer: LayerInfo) -> LayerBytes:
    """Return the bytes that a layer would add to its cell, by formula.

    Args:
        layers: layers of the network.
        layer: one of them.
    """
    per_weight, count = layers.params.slots_per_weight, layers.params.num_replicas
    most_micro_batches = len(replicas.shares(len(layers.sizes), count)[0])
    slots = {
        path: int(per_weight * layers.variables[path].size_bytes)
        for path in layers.owned_weights(layer.index)
    }
    # A tied weight needs no copy if its owner is in the same cell, which is not known here.
    weights = memory_formulas.variables(layers, (layer.index,))
    held = memory_formulas.activations(layers, layer)
    fixed, excess = weights.gradients + weights.copies, 0
    for path in dict.fromkeys(layer.paths.values()):
        spec = layers.variables[path]
        if layers.owner[path] != layer.index:
            continue
        at_owner = replicas.owned_bytes(spec, most_micro_batches, count, per_weight)
        elsewhere = spec.read_bytes if spec.read_dtype == spec.dtype else 0  # else in `copies`
        mean = (at_owner + (count - 1) * elsewhere) // count
        fixed += mean
        excess = max(excess, at_owner - mean)
    return LayerBytes(
        fixed=fixed,
        kept=held.kept,
        left=2 * held.left,
        widest=held.working if layer.has_gradient else held.forward,
        gradients=weights.gradients,
        update=memory_formulas.update(layers, (layer.index,), slots),
        excess=excess,
    )


def no_cut_fits(
    limit: str,
    within: Capacity,
    num_cells: int,
    names: Sequence[str],
    sliceable: Mapping[str, slices.SlicedParams],
) -> str:
    """Return what is too large where no cut fits, and the way out.

    The number of slices is a lower bound: every slice reads the whole input of its layer.

    Args:
        limit: memory of a device, such as 8GiB.
        within: how many layers the cells can hold in it.
        num_cells: number of cells.
        names: names of the layers.
        sliceable: name of a layer that more slices make smaller → the Params that it, or the layer
            whose slice it is, comes from.
    """
    spare = len(names) - num_cells
    alone = [
        min(
            within.device_bytes(k, n, n + 1)
            for k in range(max(0, n - spare), min(n, num_cells - 1) + 1)
        )
        for n in range(len(names))
    ]
    worst = max(range(len(names)), key=alone.__getitem__)
    if alone[worst] > units.parse_size(limit):
        needed = units.size(alone[worst])
        if within.is_shared:
            needed = f"a device of {needed}, which cells share"
        text = f"device_memory={limit}, but layer {names[worst]} alone needs {needed}. Use fewer "
        whole = sliceable.get(names[worst])
        if whole is None:
            return f"{text}examples, more micro-batches, or larger devices"
        num_slices = math.ceil(whole.num_slices * alone[worst] / units.parse_size(limit))
        return (
            f"{text}examples, more micro-batches, larger devices, or at least {num_slices} slices "
            f"of {whole.name} (model.slices)"
        )
    total = units.size(within.need_bytes(0, 0, len(names)))
    return (
        f"device_memory={limit}, but no cut into {num_cells} cells fits: in one cell, the layers "
        f"need {total}. Use more partitions, more micro-batches, or larger devices"
    )
