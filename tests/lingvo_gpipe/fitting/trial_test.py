"""What people tried with `PipelinedModel` beside plain `fit`: files, mistakes, their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.fitting import PipelinedModel

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
LABELS = {"price": X[:, :1] * 40, "kind": X[:, 1:2]}


def two_outputs() -> keras.Model:
    """Return a model whose outputs were made in another order than it lists their layers."""
    inputs = keras.Input([6], name="features")
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden")(inputs)
    price = keras.layers.Dense(1, name="price")(hidden)
    kind = keras.layers.Dense(1, name="kind")(hidden)
    return keras.Model({"features": inputs}, {"price": price, "kind": kind})


def fitted(model: keras.Model) -> Any:
    keras.utils.set_random_seed(1)
    model.compile("adam", "mse")
    model.fit({"features": X}, LABELS, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.filterwarnings("ignore:__array__")
def test_a_saved_optimizer_goes_on_in_keras(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    plain = two_outputs()
    twin = keras.models.clone_model(plain)
    twin.set_weights(plain.get_weights())
    fitted(plain)
    fitted(PipelinedModel(twin, 2, 2)).save(tmp_path / "trained.keras")
    loaded = keras.models.load_model(tmp_path / "trained.keras")
    paths = [
        [v.path.split("/")[-1] for v in model.optimizer.variables] for model in (plain, loaded)
    ]
    assert paths[0] == paths[1]
    for one, other in zip(plain.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_missing_input_is_named(method: str) -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam", "mse")
    with pytest.raises(errors.InputError, match="has an input 'features', but the data has 'x'"):
        getattr(model, method)({"x": X}, *([LABELS] if method == "fit" else []), verbose=0)


def test_a_wrong_number_of_features_is_named() -> None:
    model = PipelinedModel(two_outputs(), 2)
    model.compile("adam", "mse")
    with pytest.raises(errors.InputError, match=r"input 'features' has shape \(12, 4\), but the"):
        model.fit({"features": X[:, :4]}, LABELS, verbose=0)


def test_a_learning_rate_without_a_config_trains() -> None:
    class Warm(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.01 * keras.ops.cast(step + 1, "float32")

    model = PipelinedModel(two_outputs(), 2, schedule="auto")
    model.compile(keras.optimizers.Adam(Warm()), "mse")
    model.fit({"features": X}, LABELS, verbose=0)


def test_layers_and_symbolic_tensors_are_those_of_the_model() -> None:
    plain = two_outputs()
    model = PipelinedModel(plain, 2)
    assert model.layers == plain.layers
    assert model.output["kind"] is plain.output["kind"]
    keras.Model(model.input, model.get_layer("hidden").output)
