"""Memory of layers and of cells by formula; cuts and the plan use the same numbers.

The Meta of a layer has the bytes that are kept for its backward (`Meta.activation_bytes`); the
bytes of its inputs and outputs follow from their specs. `graphs.traced_memory` reads traced
functions instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from lingvo_gpipe.layers import base
from lingvo_gpipe.network import replicas
from lingvo_gpipe.network.cell import Cell
from lingvo_gpipe.network.wired_layers import LayerInfo, WiredLayers


@dataclasses.dataclass(frozen=True, slots=True)
class VariableBytes:
    """Bytes that some layers hold for their variables, for any size of the mini-batch.

    Attributes:
        variables: variables that the layers own, frozen ones and statistics included.
        gradients: gradients of their trained weights, including weights that are tied to other
            layers; of those that they own also what other replicas send, and the sum of earlier
            mini-batches if an update has several.
        copies: copies of weights in another compute dtype, and of weights that other layers or
            other replicas own.
        slots: optimizer slots and averages of variables that the layers own.
    """

    variables: int
    gradients: int
    copies: int
    slots: int


def variables(
    layers: WiredLayers,
    indices: Collection[int],
    slot_bytes: Mapping[str, int] | None = None,
    owned_by_others: Collection[str] = (),
    *,
    num_replicas: int = 1,
    accumulate: int = 1,
) -> VariableBytes:
    """Return the bytes of the variables of some layers in one cell.

    Args:
        layers: layers of the network of one replica.
        indices: indices of the layers in question.
        slot_bytes: path → bytes of the variable's optimizer slots and of its average; None: none.
        owned_by_others: paths of variables that another replica owns.
        num_replicas: R.
        accumulate: mini-batches of an update.
    """
    owned_bytes = gradients = copies = slots = 0
    paths = dict.fromkeys(path for n in indices for path in layers.layers[n].paths.values())
    for path in paths:
        spec = layers.variables[path]
        is_owned = layers.owner[path] in indices and path not in owned_by_others
        gradients += spec.size_bytes if spec.is_trained else 0
        copies += spec.read_bytes if not is_owned or spec.read_dtype != spec.dtype else 0
        if is_owned:
            owned_bytes += spec.size_bytes
            slots += (slot_bytes or {}).get(path, 0)
            gradients += replicas.received_bytes(spec, len(layers.sizes), num_replicas)
            gradients += spec.size_bytes if spec.is_trained and accumulate > 1 else 0
    return VariableBytes(owned_bytes, gradients, copies, slots)


def update(
    layers: WiredLayers,
    indices: Collection[int],
    slot_bytes: Mapping[str, int],
    owned_by_others: Collection[str] = (),
) -> int:
    """Return the largest number of bytes that the update of some layers needs while it runs.

    A device updates layer after layer. For each, these are new values of the weights that it owns
    and of their slots, and the size of the largest of these weights once more, for intermediate
    results.

    Args:
        layers: layers of the network.
        indices: indices of the layers in question.
        slot_bytes: see `variables`; of all trained weights.
        owned_by_others: see `variables`.
    """
    largest = 0
    for index in indices:
        paths = [path for path in layers.owned_weights(index) if path not in owned_by_others]
        sizes = [layers.variables[path].size_bytes for path in paths]
        new = sum(sizes) + sum(slot_bytes[path] for path in paths)
        largest = max(largest, new + max(sizes, default=0))
    return largest


@dataclasses.dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of a layer's tensors, in one micro-batch.

    Attributes:
        forward: the most that its forward holds at once.
        kept: what a backward reads of it.
        left: what slot I leaves of `kept` for slot W; the gradients that it leaves are as large.
        working: what the layer's backward holds in addition to `kept`.
    """

    forward: int
    kept: int
    left: int
    working: int


def activations(layers: WiredLayers, layer: LayerInfo) -> Activations:
    """Return the bytes of a layer's tensors, in the largest micro-batch.

    Args:
        layers: layers of the network.
        layer: one of them.
    """
    wiring = layers.wiring
    inputs = sum(base.spec_bytes(layers.specs[v]) for v in wiring.reads[layer.index])
    outputs = base.spec_bytes(layer.meta.outputs)
    inside = layer.meta.activation_bytes
    residual = outputs if layer.params.recompute else inside
    recomputed = inside if layer.params.recompute and layer.has_gradient else 0
    # Of a layer without a gradient, only values that layers with a gradient read are kept.
    read = sum(
        base.spec_bytes(layers.specs[v])
        for v in wiring.writes[layer.index]
        if any(layers.layers[reader].has_gradient for reader in wiring.versions[v].consumers)
    )
    kept = residual if layer.has_gradient else read
    return Activations(
        forward=inputs + max(inside, outputs),
        kept=kept,
        left=kept if layers.is_trained[layer.index] else 0,
        working=inputs + outputs + recomputed,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CellBytes:
    """Bytes that a cell holds for one micro-batch; imports do not count.

    Attributes:
        peaks: name of a program (see `Cell.program`) → peak while it runs, its results included,
            without what other programs have left for it.
        residual: what the programs K and R leave for the backward.
        left_residual: tensors of the forward that slot I leaves for slot W.
        left_gradients: tensors that slot I has computed and leaves for slot W.
        is_estimate: whether any of these is by formula.
    """

    peaks: Mapping[str, int]
    residual: int = 0
    left_residual: int = 0
    left_gradients: int = 0
    is_estimate: bool = False

    def at_least(self, other: CellBytes) -> CellBytes:
        """Return the larger value of each number; an estimate if one of the two is."""
        return CellBytes(
            {name: max(peak, other.peaks.get(name, 0)) for name, peak in self.peaks.items()},
            max(self.residual, other.residual),
            max(self.left_residual, other.left_residual),
            max(self.left_gradients, other.left_gradients),
            self.is_estimate or other.is_estimate,
        )


def cell_bytes(layers: WiredLayers, cell: Cell) -> CellBytes:
    """Return the bytes of a cell by the formulas of its layers, for the largest micro-batch."""
    held = [activations(layers, layers.layers[n]) for n in cell.layers]
    forward = max(layer.forward for layer in held)
    residual = sum(layer.kept for layer in held)
    gradients = variables(layers, cell.layers).gradients
    # The gradients become new accumulators, which are made while the old ones exist.
    working = max(layer.working for layer in held)
    backward = max(forward, residual + working + gradients)
    left = sum(layer.left for layer in held)
    kept = max(forward, residual)
    peaks = {
        "F": forward,
        "K": kept,
        "R": kept,
        "B": backward,
        "FB": backward,
        "BK": working + gradients,
        "I": max(forward, residual + left + working),
        "IK": left + working,
        "W": gradients,
    }
    return CellBytes(peaks, residual, left, left, is_estimate=True)
