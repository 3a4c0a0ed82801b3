"""Transformer-L has exactly the parameters of the paper's Table 1."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, network, pipelining
from lingvo_gpipe.plan import describe
from lingvo_gpipe.tasks.lm import transformer

COUNTS = {
    3: 282_178_816,
    13: 785_761_536,
    103: 5_318_006_016,
    415: 21_029_786_880,
    1663: 83_876_910_336,
}
IDS = tf.TensorSpec((32, 1024), tf.int32)
FIELDS = {"target": IDS, "label": IDS, "weight": tf.TensorSpec((32, 1024))}


def closed_form(num_layers: int, d: int = 2048, f: int = 8192, vocabulary: int = 32_000) -> int:
    attention = 4 * (d * d + d)
    feed_forward = 2 * d * f + f + d
    norms = 2 * 2 * d
    return num_layers * (attention + feed_forward + norms) + 2 * vocabulary * d + vocabulary


@pytest.mark.parametrize("num_layers", COUNTS)
def test_parameters_are_the_paper_s(num_layers: int) -> None:
    assert closed_form(num_layers) == COUNTS[num_layers]
    params = pipelining.PipeliningLayer.Params(
        layers=transformer.language_model(num_layers),
        num_partitions=max(1, num_layers // 13),
        num_micro_batches=32,
    )
    text = describe.describe_network(params, FIELDS)
    assert f"parameters: {COUNTS[num_layers]}" in text.splitlines()


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
    assert f"parameters: {COUNTS[3]}" in text.splitlines()
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
