"""The small image networks: their weights, and each layer in a separate cell."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import network, pipelining
from lingvo_gpipe.plan import describe
from lingvo_gpipe.tasks.image.model import convnet

FIELDS = {"image": tf.TensorSpec([4, 8, 8, 1]), "label": tf.TensorSpec([4], tf.int32)}


def analyzed(flat: list[Any], partitions: int) -> network.Analysis:
    params = pipelining.PipeliningLayer.Params(layers=flat, num_partitions=partitions)
    return network.analyze(params, FIELDS)


def test_a_conv_net_has_the_weights_of_its_formula() -> None:
    flat = convnet.conv_net([[5, 6], [7]], classes=3, dense_units=8, dropout=0.1)
    convolutions = 9 * (1 * 5 + 5 * 6 + 6 * 7)
    norms = 2 * (5 + 6 + 7)
    # Two pools leave 2 × 2.
    heads = 2 * 2 * 7 * 8 + 8 + 8 * 3 + 3
    counts = describe.counts(analyzed(flat, 1))
    assert counts.parameters == convolutions + norms + heads
    assert counts.statistics == norms


def test_an_mlp_has_the_weights_of_its_formula() -> None:
    counts = describe.counts(analyzed(convnet.mlp([9, 5], classes=3, dropout=0.1), 1))
    assert counts.parameters == 64 * 9 + 9 + 9 * 5 + 5 + 5 * 3 + 3


@pytest.mark.parametrize(
    "flat",
    [
        convnet.conv_net([[4], [4]], classes=3, dense_units=8, dropout=0.1),
        convnet.mlp([9, 5], classes=3, dropout=0.1),
    ],
)
def test_the_networks_are_cut_between_any_two_layers(flat: list[Any]) -> None:
    assert analyzed(flat, len(flat)).cuts == (1,) * len(flat)
