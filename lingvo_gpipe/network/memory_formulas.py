"""What one layer holds, by formula: cuts and the plan calculate with the same numbers.

A layer's Meta has what its backward keeps (`Meta.activation_bytes`); the bytes of its inputs and
outputs follow from their specs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from lingvo_gpipe.layers import base
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a layer's tensors, in one micro-batch.

    Attributes:
        forward: the most that its forward holds at once.
        residual: what stays where the cell's forward is kept: TensorFlow keeps all inputs of a
            kept call for its gradient, frozen weights too.
        kept: what a backward that computes the forward again keeps of it.
        beside: what is held besides while the layer's backward runs.
    """

    forward: int
    residual: int
    kept: int
    beside: int


def activations(layers: WiredLayers, layer: LayerInfo, *, keeps_all: bool = False) -> Activations:
    """Return the bytes of a layer's tensors, in the largest micro-batch.

    Args:
        layers: of the network.
        layer: one of them.
        keeps_all: whether what layers without a gradient compute is kept as well.
    """
    wiring = layers.wiring
    has_gradient = layer.has_gradient or keeps_all
    inputs = sum(base.spec_bytes(layers.specs[v]) for v in wiring.reads[layer.index])
    outputs = base.spec_bytes(layer.meta.outputs)
    inside = layer.meta.activation_bytes
    residual = outputs if layer.params.recompute else inside
    recomputed = inside if layer.params.recompute and has_gradient else 0
    # Of a layer without a gradient, only what layers with one read is kept.
    read = sum(
        base.spec_bytes(layers.specs[v])
        for v in wiring.writes[layer.index]
        if any(
            keeps_all or layers.layers[reader].has_gradient
            for reader in wiring.versions[v].consumers
        )
    )
    return Activations(
        forward=inputs + max(inside, outputs),
        residual=residual,
        kept=residual if has_gradient else read,
        beside=inputs + outputs + recomputed,
    )


def update(weights: Collection[tuple[int, int]]) -> int:
    """Return the most bytes that the update of a layer holds besides what exists before it.

    They are the new values of its weights and slots, and its largest weight once more, for
    intermediate results.

    Args:
        weights: for each trained weight its bytes, and those of its slots and its average.

    >>> update([(4, 8), (10, 20)])
    52
    """
    return sum(map(sum, weights)) + max((size for size, _ in weights), default=0)
