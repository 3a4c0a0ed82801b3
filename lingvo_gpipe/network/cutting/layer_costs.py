"""The costs that a partition balances: of each layer in each cell, and of data that a cut sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lingvo_gpipe import errors, nests
from lingvo_gpipe.layers import base
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers
from lingvo_gpipe.schedule import recompute


def by_cell(
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
        PartitionError: a cost is negative or not finite, or the number of costs is wrong.
    """
    stated = layers.params.costs
    if stated is not None:
        if len(stated) != len(layers.layers):
            raise errors.PartitionError(
                f"costs has {len(stated)} numbers for {len(layers.layers)} layers. Give one for "
                "each"
            )
        return (tuple(stated),) * len(reuses)
    rows = recompute.costs(reuses, [_flops(layer) for layer in layers.layers])
    of_layers = {
        layer.index: layer.params.cost for layer in layers.layers if layer.params.cost is not None
    }
    for n, cost in of_layers.items():
        if not 0 <= cost < math.inf:
            raise errors.PartitionError(f"{layers.layers[n].name} has cost={cost}. Use 0 or more")
    return tuple(tuple(of_layers.get(n, cost) for n, cost in enumerate(row)) for row in rows)


def _flops(layer: LayerInfo) -> recompute.Work:
    forward, backward = layer.meta.flops_forward, layer.meta.flops_backward
    if not layer.has_gradient:
        return recompute.Work(forward, 0.0, 0.0)
    return recompute.Work(forward, backward, forward)


def links(layers: WiredLayers) -> list[float] | None:
    """Return the cost of sending for a cut after each layer except the last; None: no cost.

    A cut sends the values that layers before it write and layers after it read, and their gradients
    back, for one micro-batch. Fields go directly to the cells that read them, wherever the cut is.

    Raises:
        PartitionError: `link_cost_per_byte` is negative or not finite.
    """
    per_byte = layers.params.link_cost_per_byte
    if not 0 <= per_byte < math.inf:
        raise errors.PartitionError(
            f"link_cost_per_byte={per_byte} is negative or not finite. Use 0 or more"
        )
    if per_byte == 0:
        return None
    sent = [0] * len(layers.layers)
    for version in layers.wiring.versions:
        if version.producer >= 0 and version.consumers:
            specs = nests.tensor_specs(layers.specs[version.index])
            size = base.spec_bytes(specs)
            if layers.layers[version.producer].has_gradient:
                size += base.spec_bytes(nests.floating(specs))
            for place in range(version.producer, version.consumers[-1]):
                sent[place] += size
    return [per_byte * size for size in sent[:-1]]
