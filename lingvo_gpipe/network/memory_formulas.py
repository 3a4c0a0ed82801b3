"""Memory by formula: of layers and of cells. Cuts and the plan calculate with the same numbers.

A layer's Meta has what its backward keeps (`Meta.activation_bytes`); the bytes of its inputs and
outputs follow from their specs. `graphs.traced_memory` reads traced functions instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lingvo_gpipe.layers import base
from lingvo_gpipe.network.cell import Cell
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers


@dataclasses.dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes that some layers hold for their variables, whatever the size of the mini-batch.

    Attributes:
        variables: of the variables that the layers own, frozen ones and statistics included.
        gradients: of the gradients of their trained weights; a weight that is tied to a layer
            outside counts here too.
        copies: of weights in another compute dtype, and of those that layers outside own.
    """

    variables: int
    gradients: int
    copies: int


def weights(layers: WiredLayers, indices: Collection[int]) -> WeightBytes:
    """Return the bytes of the variables of some layers, which lie in one cell.

    Args:
        layers: of the network.
        indices: of the layers in question.
    """
    variables = gradients = copies = 0
    paths = dict.fromkeys(path for n in indices for path in layers.layers[n].paths.values())
    for path in paths:
        spec, is_owned = layers.variables[path], layers.owner[path] in indices
        variables += spec.size_bytes if is_owned else 0
        gradients += spec.size_bytes if spec.is_trained else 0
        copies += spec.read_bytes if not is_owned or spec.read_dtype != spec.dtype else 0
    return WeightBytes(variables, gradients, copies)


def update(layers: WiredLayers, layer: LayerInfo, slot_bytes: Mapping[str, int]) -> int:
    """Return the most bytes that the update of a layer holds besides what exists before it.

    They are the new values of the weights that it owns and of their slots, and the largest of
    these weights once more, for intermediate results.

    Args:
        layers: of the network.
        layer: one of them.
        slot_bytes: path → bytes of the weight's optimizer slots and of its average.
    """
    owned = layers.owned_weights(layer.index)
    sizes = [layers.variables[path].size_bytes for path in owned]
    return sum(sizes) + sum(slot_bytes[path] for path in owned) + max(sizes, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a layer's tensors, in one micro-batch.

    Attributes:
        forward: the most that its forward holds at once.
        residual: what stays where the cell's forward is kept: TensorFlow keeps all inputs of a
            kept call for its gradient, frozen weights too.
        kept: what a backward that computes the forward again holds of it.
        beside: what the layer's backward holds in addition to `kept`.
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


@dataclasses.dataclass(frozen=True, slots=True)
class CellBytes:
    """Bytes that a cell holds for one micro-batch while a slot runs; its imports do not count.

    Attributes:
        forward: the most that a forward holds at once, exports included.
        backward: the most that a backward holds that computes its forward again; new accumulators
            and the gradients of the imports included.
        fused: the most that forward and backward hold as one program.
        kept_forward: the most that a kept forward holds, `residual` included.
        residual: what a kept forward leaves for its backward.
        kept_backward: the most that a backward from a kept forward holds, besides `residual`.
        is_estimate: whether some of these are by formula.
    """

    forward: int
    backward: int
    fused: int
    kept_forward: int
    residual: int
    kept_backward: int
    is_estimate: bool

    def at_least(self, other: CellBytes) -> CellBytes:
        """Return the larger one of each number; an estimate if one of the two is."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return CellBytes(*map(max, pairs))


def cell_bytes(layers: WiredLayers, cell: Cell) -> CellBytes:
    """Return the bytes of a cell by the formulas of its layers, for the largest micro-batch."""
    held = [activations(layers, layers.layers[n]) for n in cell.layers]
    forward = max(layer.forward for layer in held)
    residual = sum(layer.residual for layer in held)
    # The gradients are new accumulators, made while the old ones exist.
    kept_backward = max(layer.beside for layer in held) + weights(layers, cell.layers).gradients
    backward = max(forward, sum(layer.kept for layer in held) + kept_backward)
    return CellBytes(
        forward=forward,
        backward=backward,
        fused=backward,
        kept_forward=max(forward, residual),
        residual=residual,
        kept_backward=kept_backward,
        is_estimate=True,
    )
