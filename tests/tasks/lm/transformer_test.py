"""Transformer-L: what a token sees, slices, and what cells send."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, network, pipelining
from lingvo_gpipe.plan import describe
from lingvo_gpipe.tasks.lm import transformer

IDS = tf.TensorSpec((32, 1024), tf.int32)
FIELDS = {"target": IDS, "label": IDS, "weight": tf.TensorSpec((32, 1024))}


def test_a_token_sees_those_before_it_alone() -> None:
    layers = transformer.language_model(2, units=8, heads=2, hidden=12, vocabulary=11, dropout=0.1)
    assert [p.name for p in layers][2] == "dropout"
    pipe = pipelining.PipeliningLayer.Params(layers=layers).instantiate()
    target = tf.constant([[2, 5, 7, 9, 4], [2, 5, 7, 3, 6]])
    batch = {"target": target, "label": target, "weight": tf.ones((2, 5))}
    logits = pipe(batch, training=False)
    assert logits.shape == (2, 5, 11)
    differs = tf.reduce_any(logits[0] != logits[1], -1).numpy()
    assert differs.tolist() == [False, False, False, True, True]


def test_everything_in_slices_has_the_parameters_of_the_whole_model() -> None:
    params = pipelining.PipeliningLayer.Params(
        layers=transformer.language_model(3),
        slices={"embedding": 8, "softmax": 8, "layer_*": (4096, 2048, 2048)},
        num_partitions=16,
        num_micro_batches=32,
    )
    text = describe.describe_network(params, FIELDS)
    assert "parameters: 282178816" in text.splitlines()
    assert len(network.layer_params(params)) == 8 + 1 + 3 * 5 + 9


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(errors.LayerError, match=r"language_model: num_layers=0. Use 1 or more"):
        transformer.language_model(0)


def test_the_boundary_between_cells_is_x_alone() -> None:
    params = pipelining.PipeliningLayer.Params(
        layers=transformer.language_model(103), num_partitions=8
    )
    analysis = network.analyze(params, FIELDS)
    for route in analysis.cells[1:-1]:
        assert {analysis.wiring.versions[v].name for v in route.imports} == {"x"}
