"""Memory by formula, compared with counts by hand and with traced programs."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.network import memory_formulas
from lingvo_gpipe.plan import activations

N, D = 512, 64


def network_of(depth: int, **fields: Any) -> network.Analysis:
    """Return `depth` dense layers and a head, in one cell."""
    own = [layers.Dense.Params(name=f"d{n}", units=D, activation="relu") for n in range(depth)]
    params = pipelining.PipeliningLayer.Params(
        layers=[*own, layers.MeanSquaredError.Params()], **fields
    )
    specs = {name: tf.TensorSpec([N, D]) for name in ("x", "target")}
    return network.analyze(params, specs)


@pytest.mark.parametrize("num_frozen", [0, 5, 7])
def test_a_backward_keeps_of_frozen_layers_only_what_others_read(num_frozen: int) -> None:
    frozen = tuple(f"d{n}/*" for n in range(num_frozen))
    analysis = network_of(8, frozen=frozen, fuse=False)
    estimate = memory_formulas.cell_bytes(analysis, analysis.cells[0])
    one = N * D * 4
    (traced,) = activations.traced(analysis)
    (kept_traced,) = activations.traced(network_of(8, frozen=frozen, fuse=False, recompute="never"))
    # The output of each trained layer and of the last frozen one, and the error's difference.
    kept = (8 - max(0, num_frozen - 1) + 1) * one
    # Besides, the three tensors of a layer or of the error at work, and gradients.
    gradients = (8 - num_frozen) * (D * D + D) * 4
    assert estimate.peaks["B"] == kept + 3 * one + gradients
    assert 0 <= estimate.peaks["B"] - traced.peaks["B"] <= 3.1 * one
    # The trace does not keep what the field `x` or a frozen layer's gradient would read.
    assert estimate.residual == kept
    assert 0 <= estimate.residual - kept_traced.residual <= one


def test_an_update_holds_a_layers_new_values_and_its_largest_weight_again() -> None:
    analysis = network_of(2, frozen=("d0/*",))
    slots = dict.fromkeys(analysis.variables, 0) | {"d1/kernel": 100, "d0/kernel": 10**9}
    kernel, bias = D * D * 4, D * 4
    updates = [memory_formulas.update(analysis, [n], slots) for n in range(len(analysis.layers))]
    # The first layer is frozen, and the error has no weights.
    assert updates == [0, kernel + bias + 100 + kernel, 0]
