"""Where a network is cut: as set in its Params, or by costs, within the memory of the devices."""

from __future__ import annotations

import dataclasses

from lingvo_gpipe.console import units
from lingvo_gpipe.errors import PartitionError
from lingvo_gpipe.network.cutting import capacity, layer_costs, partition
from lingvo_gpipe.network.params import stated_cuts
from lingvo_gpipe.network.wired_layers import WiredLayers
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
    links = layer_costs.links(layers)
    stated = stated_cuts(params)
    partition.check_cells(stated, len(layers.layers), table.num_cells, table.num_devices)
    if stated is not None:
        return partition.check_cuts(stated, len(layers.layers), table.num_cells)
    limit, within = params.device_memory, None
    if limit is not None:
        holdings = capacity.holdings(table, settings.policies)
        within = capacity.of_network(layers, holdings, units.parse_size(limit))
    reach = None if within is None else within.reach
    try:
        even = partition.partition(
            settings.costs[0],
            table.num_cells,
            cell_costs=dict(enumerate(settings.costs)),
            reach=reach,
            speeds=settings.speeds,
            link_costs=links,
        )
    except partition.NoCutFitsError as error:
        if limit is None or within is None:
            raise
        names = [layer.name for layer in layers.layers]
        text = capacity.no_cut_fits(limit, within, table.num_cells, names)
        raise PartitionError(text) from error
    if table.num_cells == table.num_devices or table.is_forward_only:
        return even
    again = [reuse.recomputations for reuse in settings.reuses]
    costs = shared_devices.CellCosts(settings.costs, again, settings.speeds, links, reach)
    return shared_devices.cut(table, costs, even)
