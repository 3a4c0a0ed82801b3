"""Costs of layers and of the links between them."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import layers, network
from lingvo_gpipe.network import wired_layers
from lingvo_gpipe.network.cutting import layer_costs


def test_a_value_without_a_gradient_is_sent_one_way() -> None:
    params = network.PipelineParams(
        layers=[layers.Dense.Params(units=n, trainable=n != 3) for n in (3, 5, 7)],
        link_cost_per_byte=0.5,
    )
    wired = wired_layers.wire(params, {"x": tf.TensorSpec((1, 2))})
    assert layer_costs.links(wired) == [0.5 * 4 * 3, 0.5 * 2 * 4 * 5]
