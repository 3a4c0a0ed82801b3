"""Where a network is cut: as set in its Params, or by costs, within the memory of the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import memory_formulas, replicas, wiring
from lingvo_gpipe.network.cutting import capacity, layer_costs, partition
from lingvo_gpipe.network.params import stated_cuts
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
    links = layer_costs.links(layers)
    stated = stated_cuts(params)
    partition.check_cells(stated, len(layers.layers), table.num_cells, table.num_devices)
    if stated is not None:
        return partition.check_cuts(stated, len(layers.layers), table.num_cells)
    reach = None
    if params.device_memory is None:
        even = partition.partition(
            settings.costs[0],
            table.num_cells,
            cell_costs=dict(enumerate(settings.costs)),
            speeds=settings.speeds,
            link_costs=links,
        )
    else:
        holdings = capacity.holdings(table, settings.policies)
        within = _capacity(layers, holdings, units.parse_size(params.device_memory))
        even = capacity.cuts_within(
            params.device_memory,
            within,
            settings.costs,
            [layer.name for layer in layers.layers],
            settings.speeds,
            links,
        )
        reach = within.reach
    if table.num_cells == table.num_devices or table.is_forward_only:
        return even
    again = [reuse.recomputations for reuse in settings.reuses]
    costs = shared_devices.CellCosts(settings.costs, again, settings.speeds, links, reach)
    return shared_devices.cut(table, costs, even)


def alone_bytes(layers: WiredLayers) -> list[int]:
    """Return what each layer needs of a device that holds nothing else, one micro-batch at a time.

    By formula; with several replicas, it is the need of the one that owns its largest weight.
    """
    one = capacity.Holding(near=1, far=1, inside=((1, 0),), share=1.0)
    within = _capacity(layers, [one], limit_bytes=0)
    return [within.need_bytes(0, n, n + 1) for n in range(len(layers.layers))]


def _capacity(
    layers: WiredLayers, holdings: Sequence[capacity.Holding], limit_bytes: int
) -> capacity.Capacity:
    """Return how many layers cells can hold in the memory of a device, by formula."""
    unbatched = layers.params.unbatched
    return capacity.Capacity(
        [_layer_bytes(layers, layer) for layer in layers.layers],
        [
            capacity.ValueBytes(
                base.spec_bytes(layers.specs[v.index]),
                v.producer,
                v.consumers,
                shared=v.producer == wiring.FIELD and v.name in unbatched,
            )
            for v in layers.wiring.versions
        ],
        holdings,
        len(replicas.shares(len(layers.sizes), layers.params.num_replicas)[0]),
        limit_bytes,
    )


def _layer_bytes(layers: WiredLayers, layer: LayerInfo) -> capacity.LayerBytes:
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
    weights = memory_formulas.weights(layers, (layer.index,))
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
    return capacity.LayerBytes(
        fixed=fixed,
        kept=held.kept,
        left=2 * held.left,
        widest=held.beside if layer.has_gradient else held.forward,
        gradients=weights.gradients,
        update=memory_formulas.update(layers, layer, slots),
        excess=excess,
    )
