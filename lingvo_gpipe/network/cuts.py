"""Where a network is cut: as set in its Params, or by costs, within the memory of the devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lingvo_gpipe.console import units
from lingvo_gpipe.errors import PartitionError
from lingvo_gpipe.layers import slices
from lingvo_gpipe.network import capacity, partition
from lingvo_gpipe.network.params import PipelineParams, divided
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers
from lingvo_gpipe.schedule import recompute, shared_devices
from lingvo_gpipe.schedule.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class CellSettings:
    """What is known about the cells before the layers are assigned to them.

    Attributes:
        table: the schedule of training.
        policies: recompute policy of each cell.
        reuses: for each cell, how its backward gets the forward.
        costs: for each cell, the cost of each layer of the network in it.
        speeds: for each cell, the speed of its device.
    """

    table: Table
    policies: tuple[str, ...]
    reuses: tuple[recompute.CellReuse, ...]
    costs: tuple[tuple[float, ...], ...]
    speeds: tuple[float, ...]


def choose(layers: WiredLayers, settings: CellSettings) -> tuple[int, ...]:
    """Return the number of layers in each cell.

    Raises:
        PartitionError: the cuts in the Params do not fit, or no cut fits the devices' memory.
    """
    params, table = layers.params, settings.table
    stated = params.cuts
    _check(stated, len(layers.layers), table)
    if stated is not None:
        return tuple(stated)
    limit, within = params.device_memory, None
    if limit is not None:
        holdings = capacity.holdings(table, settings.policies)
        within = capacity.of_network(layers, holdings, units.parse_size(limit))
    reach = None if within is None else within.reach
    try:
        even = partition.partition(settings.costs, reach=reach, speeds=settings.speeds)
    except partition.NoCutFitsError as error:
        if limit is None or within is None:
            raise
        names = [layer.name for layer in layers.layers]
        text = capacity.no_cut_fits(limit, within, table.num_cells, names, _sliceable(params))
        raise PartitionError(text) from error
    if table.num_cells == table.num_devices or table.is_forward_only:
        return even
    again = [reuse.recomputations for reuse in settings.reuses]
    costs = shared_devices.CellCosts(settings.costs, again, settings.speeds, reach)
    return shared_devices.cut(table, costs, even)


def _sliceable(params: PipelineParams) -> dict[str, slices.SlicedParams]:
    """Return name of a layer or slice → Params, where more slices would make it smaller."""
    return {
        part.name: layer
        for layer, parts in divided(params)
        if isinstance(layer, slices.SlicedParams)
        for part in parts
        # Of a layer in slices, other parts have names without a number, and stay as large.
        if layer.slices == 1 or part.name.removeprefix(f"{layer.name}_").isdecimal()
    }


def _check(cuts: Sequence[int] | None, num_layers: int, table: Table) -> None:
    """Refuse cuts that do not fit the table or the layers, and a table of more cells than layers.

    Raises:
        PartitionError: so; an automatic cut refuses a table with one cell on each device itself.
    """
    num_cells, has_several = table.num_cells, table.num_cells > table.num_devices
    wanted = f"num_partitions={table.num_devices}"
    if has_several:
        wanted = f"the schedule's table has {num_cells} cells on {wanted}"
    if cuts is None:
        if has_several and num_layers < num_cells:
            raise PartitionError(
                f"{wanted}, but there are {num_layers} layers. Lower num_partitions or "
                f"cells_per_device, or give a table of at most {num_layers} cells"
            )
        return
    shown = f"cuts={list(cuts)}"
    if len(cuts) != num_cells:
        setting = f"num_partitions={len(cuts)}"
        if has_several:
            setting = f"cells_per_device or a table of {len(cuts)} cells"
        raise PartitionError(
            f"{shown} has {len(cuts)} cells, but {wanted}. Give each cell's number of layers, or "
            f"cuts=None to cut by cost, or set {setting}"
        )
    for cell, count in enumerate(cuts):
        if count < 1:
            raise PartitionError(
                f"{shown}: cell {cell} has {count} layers. Give each cell a whole number from 1"
            )
    if sum(cuts) != num_layers:
        raise PartitionError(
            f"{shown} sums to {sum(cuts)}, but there are {num_layers} layers. Change it by "
            f"{num_layers - sum(cuts):+d}"
        )


def cell_speeds(device_speeds: Sequence[float], devices: Sequence[int]) -> list[float]:
    """Return the speed of the device of each cell.

    Args:
        device_speeds: speed of each device; empty: all equal.
        devices: per cell, the number of its device.

    Raises:
        PartitionError: there is not one number above 0 for each device.

    >>> cell_speeds((1.0, 2.0), devices=[0, 1, 0])
    [1.0, 2.0, 1.0]
    """
    num_devices = 1 + max(devices)
    if not device_speeds:
        return [1.0] * len(devices)
    if len(device_speeds) != num_devices or not all(
        0 < speed < math.inf for speed in device_speeds
    ):
        raise PartitionError(
            f"device_speeds={list(device_speeds)}, but num_partitions={num_devices}. Give a "
            "number above 0 for each, or none where all are equally fast"
        )
    return [device_speeds[device] for device in devices]


def costs_by_cell(
    layers: WiredLayers, reuses: Sequence[recompute.CellReuse]
) -> tuple[tuple[float, ...], ...]:
    """Return for each cell the cost of each layer in it: its FLOPs, or the cost in its Params.

    Layers without a gradient, such as frozen first layers, have no backward. If such a layer is in
    a cell with trained layers, its recomputation is not counted. A cost set in Params is the same
    in every cell.

    Args:
        layers: layers of the network.
        reuses: for each cell, how its backward gets the forward.

    Raises:
        PartitionError: a cost is negative or not finite.
    """
    rows = recompute.costs(reuses, [_flops(layer) for layer in layers.layers])
    of_layers = {
        layer.index: layer.params.cost for layer in layers.layers if layer.params.cost is not None
    }
    for n, cost in of_layers.items():
        if not 0 <= cost < math.inf:
            raise PartitionError(f"{layers.layers[n].name} has cost={cost}. Use 0 or more")
    return tuple(tuple(of_layers.get(n, cost) for n, cost in enumerate(row)) for row in rows)


def _flops(layer: LayerInfo) -> recompute.Work:
    forward, backward = layer.meta.flops_forward, layer.meta.flops_backward
    if not layer.has_gradient:
        return recompute.Work(forward, 0.0, 0.0, forward)
    return recompute.Work(forward, backward, forward, forward + backward)
