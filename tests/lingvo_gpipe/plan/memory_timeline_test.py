"""Bytes by formula, held against hand and against traced programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.plan import memory_timeline, profiling

N, D = 512, 64


def network_of(depth: int, **fields: Any) -> memory_timeline.Network:
    """Return `depth` dense layers and a head, in one cell."""
    own = [layers.Dense.Params(name=f"d{n}", units=D, activation="relu") for n in range(depth)]
    params = pipelining.PipeliningLayer.Params(
        layers=[*own, layers.MeanSquaredError.Params()], **fields
    )
    specs = {name: tf.TensorSpec([N, D]) for name in ("x", "target")}
    return memory_timeline.Network(params, network.analyze(params, specs))


@pytest.mark.parametrize("num_frozen", [0, 5, 7])
def test_a_backward_keeps_of_frozen_layers_what_others_read_alone(num_frozen: int) -> None:
    net = network_of(8, frozen=tuple(f"d{n}/*" for n in range(num_frozen)))
    told = memory_timeline.estimate(net, 0)
    one = N * D * 4
    (traced,) = profiling.cell_bytes(net)
    # Of each layer its output, of the frozen ones the last one's, and the error's difference.
    kept = (8 - max(0, num_frozen - 1) + 1) * one
    # Besides, a layer of three tensors works, or the error, and there are gradients.
    gradients = (8 - num_frozen) * (D * D + D) * 4
    assert told.backward == kept + 3 * one + gradients
    assert 0 <= told.backward - traced.backward <= 3.1 * one
    # A kept forward is differentiated by frozen weights as well.
    assert told.residual == traced.residual == 9 * one


def test_an_update_holds_a_layers_new_values_and_its_largest_weight_again() -> None:
    net = network_of(2, frozen=("d0/*",))
    slots = dict.fromkeys(net.analysis.variables, 0) | {"d1/kernel": 100, "d0/kernel": 10**9}
    kernel, bias = D * D * 4, D * 4
    assert memory_timeline.update_bytes(net, slots) == [kernel + bias + 100 + kernel]


def test_cells_of_one_device_send_each_other_nothing_and_receive_once() -> None:
    # The first layer's output is read by the other three, of which two share a device.
    first = layers.Dense.Params(name="first", units=D, writes=("skip",))
    others = [
        layers.Dense.Params(name=f"d{n}", units=D, reads=("skip",), writes=(f"y{n}",))
        for n in range(3)
    ]
    end = layers.Concat.Params(name="end", reads=("y0", "y1", "y2"))
    params = pipelining.PipeliningLayer.Params(
        layers=[first, *others, end, layers.MeanSquaredError.Params()],
        num_partitions=2,
        cuts=(1, 1, 1, 3),
        schedule="0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0",
    )
    fields = {"x": tf.TensorSpec([N, D]), "target": tf.TensorSpec([N, 3 * D])}
    found = memory_timeline.links(memory_timeline.Network(params, network.analyze(params, fields)))
    one = N * D * 4
    assert [dataclasses.astuple(link) for link in found] == [
        (memory_timeline.INPUT, 0, one, 0, ("x",)),
        (memory_timeline.INPUT, 3, 3 * one, 0, ("target",)),
        (0, 1, one, one, ("skip",)),
        # Its value is there; the gradient of each cell comes back by itself.
        (0, 3, 0, one, ("skip",)),
        (2, 3, one, one, ("y1",)),
    ]
