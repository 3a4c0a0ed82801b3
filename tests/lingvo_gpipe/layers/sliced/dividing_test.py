"""A network's field `slices` divides layers by name, as their own fields do."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers, network, pipelining
from lingvo_gpipe.layers.sliced import dividing
from lingvo_gpipe.tasks.lm import transformer as lm
from lingvo_gpipe.tasks.mt.model import transformer as mt

SIZES = {"units": 8, "heads": 2, "hidden": 12, "vocabulary": 11}
TOKENS = tf.TensorSpec((4, 5), tf.int32)
FIELDS = {"target": TOKENS, "label": TOKENS, "weight": tf.TensorSpec((4, 5))}


def network_of(flat: list[Any], **settings: Any) -> Any:
    return pipelining.PipeliningLayer.Params(layers=flat, **settings)


def language(slices: Any, **settings: Any) -> Any:
    return network_of(lm.language_model(2, **SIZES), slices=slices, **settings)


def translation(**fields: Any) -> list[Any]:
    sizes = mt.TranslationTransformer(
        num_layers=2, hidden=12, heads=2, vocabulary=11, units=8, tie="softmax", **fields
    )
    return mt.translation_transformer(sizes)


@pytest.mark.parametrize(
    ("by_name", "of_the_model"),
    [
        ({"embedding": 3, "softmax": 3}, {"vocabulary_slices": 3}),
        ({"softmax": (4, 7), "embedding": (4, 7)}, {"vocabulary_slices": (4, 7)}),
        ({"layer_*": 2}, {"feed_forward_slices": 2}),
        ({"layer_1": 1, "layer_*": 1, "embedding": 1}, {}),
    ],
    ids=str,
)
def test_a_language_model_is_divided_as_by_its_own_fields(by_name: Any, of_the_model: Any) -> None:
    wanted = network_of(lm.language_model(2, **SIZES, **of_the_model))
    assert network.layer_params(language(by_name)) == network.layer_params(wanted)


@pytest.mark.parametrize(
    ("by_name", "of_the_model"),
    [
        ({"*_embedding": 3, "softmax": 3}, {"vocabulary_slices": 3}),
        ({"*coder_[01]": (5, 7)}, {"feed_forward_slices": (5, 7)}),
    ],
    ids=str,
)
def test_a_translation_model_is_divided_as_by_its_own_fields(
    by_name: Any, of_the_model: Any
) -> None:
    found = network.layer_params(network_of(translation(), slices=by_name))
    assert found == network.layer_params(network_of(translation(**of_the_model)))


def test_the_first_pattern_that_matches_counts() -> None:
    names = [p.name for p in network.layer_params(language({"layer_1": 3, "layer_*": 2}))]
    assert [name for name in names if name.startswith("layer_0_")] == [
        "layer_0_0",
        "layer_0_1",
        "layer_0_end",
    ]
    assert "layer_1_2" in names


def test_ready_cells_count_the_slices() -> None:
    flat = lm.language_model(2, **SIZES)
    params = pipelining.PipeliningLayer.Params(
        cells=[flat[:3], flat[3:]], num_partitions=2, slices={"embedding": 2, "softmax": 3}
    )
    assert network.analyze(params, FIELDS).cuts == (4, 5)


def test_the_field_goes_to_text_and_back() -> None:
    params = language({})
    params.override("slices={'softmax': 3, 'embedding': (4, 7)}")
    assert hyperparams.from_text(params.to_text()) == params
    assert len(network.layer_params(params)) == 2 + 1 + 2 + 4


def test_a_tie_needs_both_in_equal_slices() -> None:
    params = network_of(translation(), slices={"softmax": 3})
    with pytest.raises(errors.LayerError, match=r"and target_embedding is not sliced\. Set their"):
        network.layer_params(params)


def test_a_pattern_without_a_layer_is_refused() -> None:
    text = "slices: pattern 'sofmax' matches no layer; nearest of those that can be divided: softm"
    with pytest.raises(errors.LayerError, match=text):
        network.layer_params(language({"sofmax": 2}))


def test_a_layer_that_cannot_be_divided_is_refused() -> None:
    text = r"^position \(PositionalEncoding\): it cannot be divided into slices\. Embeddings, "
    with pytest.raises(errors.LayerError, match=text):
        network.layer_params(language({"position": 2}))


def test_undivided_params_do_not_depend_on_slices() -> None:
    for whole, *others in (
        (lm.language_model(2, **SIZES), lm.language_model(2, **SIZES, vocabulary_slices=3)),
        (
            translation(),
            translation(vocabulary_slices=2),
            translation(feed_forward_slices=(5, 7)),
        ),
    ):
        for other in others:
            assert whole != other
            assert list(map(dividing.undivided, whole)) == list(map(dividing.undivided, other))
    assert dividing.undivided(layers.Dropout.Params()) == layers.Dropout.Params()
