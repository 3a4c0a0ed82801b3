"""Models of KerasHub in a pipeline: outputs, losses and every gradient are those of Keras."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

from tests.lingvo_gpipe.keras_layers import whole_models

pytest.importorskip("keras_hub", reason="KerasHub is in the extra dev, not in the library")
from tests.keras_hub import toys

# The models that differ most from each other; `make keras-hub` compares all.
CHOSEN = (
    "AlbertMaskedLM",  # calls one block several times
    "BartSeq2SeqLM",  # encoder and decoder, a tied embedding
    "Gemma3CausalLM",  # places of images among words
    "MixtralCausalLM",  # routes to experts, and adds losses
    "RWKV7Backbone",  # a scan over time
)


@pytest.fixture(autouse=True)
def _policy() -> Iterator[None]:
    """Keras computes in the usual precision again, and forgets the names of the models."""
    yield
    set_precision("float32")
    keras.backend.clear_session()


def set_precision(name: str) -> None:
    keras.config.set_floatx(name)  # a model's Input casts to it
    keras.config.set_dtype_policy(name)


def worst_error(name: str) -> float:
    """Compare a model as three cells with the model itself; return the largest error."""
    backbone = toys.backbone_of(name)
    in_single = backbone in toys.SINGLE
    sizes = toys.SIZES.get(backbone, (3, 2))
    set_precision("float32" if in_single else "float64")
    # With other weights, an output of DepthAnything is zero everywhere, and Gemma4's gradients in
    # plain Keras differ by 3e-4 between a graph and none.
    keras.utils.set_random_seed(3)
    model = toys.model(name)
    whole_models.warm(model)
    return whole_models.check(
        model,
        toys.inputs(model, sum(sizes)),
        sizes=sizes,
        num_partitions=3,
        tolerance=1e-4 if in_single else 1e-8,
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name in CHOSEN else pytest.param(name, marks=pytest.mark.keras_hub_whole)
        for name in toys.names()
        if name not in toys.NOT_CONVERTED
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.*does not support masking",
    "ignore:`build\\(\\)` was called",
    "ignore:.*the loss that it adds compares examples",  # Mixtral; so does the reference
)
def test_a_model_of_keras_hub_has_the_gradients_of_keras(name: str) -> None:
    worst_error(name)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_lora_weights_of_a_backbone_alone_are_trained() -> None:
    model = toys.model("GemmaCausalLM")
    model.backbone.enable_lora(4)
    assert model.trainable_variables
    assert all("lora" in variable.path for variable in model.trainable_variables)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(0.1 * whole_models.random(*variable.shape, seed=number))
    whole_models.check(model, toys.inputs(model, 5), num_partitions=3, tolerance=1e-4)


def test_all_models_are_compared_but_a_few() -> None:
    assert {*CHOSEN, *toys.NOT_CONVERTED} <= set(toys.names())
    assert len(toys.NOT_CONVERTED) <= 10
