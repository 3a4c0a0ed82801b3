"""A Keras model through a pipeline and back: its weights, its structure of a call, its dtype."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe import errors, keras_layers, pipelining
from lingvo_gpipe.keras_layers import from_keras_model
from lingvo_gpipe.layers import MeanSquaredError
from tests.lingvo_gpipe.keras_layers import whole_models


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0.2, 1.0, shape).astype("float32")


def two_sided() -> keras.Model:
    """A shared layer, an inner model with a batch norm, a frozen layer; two inputs, two outputs."""
    inside = keras.Input((6,))
    inner = keras.Model(
        inside, layers.BatchNormalization(momentum=0.5)(layers.Dense(6)(inside)), name="inner"
    )
    shared = layers.Dense(6, activation="tanh", name="shared")
    one, two = keras.Input((5,), name="one"), keras.Input((5,), name="two")
    joined = layers.Dropout(0.2)(inner(shared(one)) * shared(two))
    fixed = layers.Dense(4, name="fixed", trainable=False)(joined)
    return keras.Model([one, two], {"mean": layers.Dense(3)(fixed), "all": [fixed, joined]})


pipeline = functools.partial(whole_models.pipeline, num_partitions=2, num_micro_batches=2)


def train(pipe: Any, fields: dict[str, Any], steps: int) -> None:
    adam = keras.optimizers.Adam(0.05)
    for step in range(steps):
        result = pipe.value_and_gradients(fields, step=step)
        adam.apply_gradients([(result.gradients[path], w) for path, w in pipe.weights.items()])
        for path, value in pipe.merge_moments(result.moments).items():
            pipe.state[path].assign(value)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
def test_a_trained_model_goes_back_into_keras_and_its_optimizer_stays(tmp_path: Path) -> None:
    model = two_sided()
    a, b = random(6, 5), random(6, 5, seed=1)
    target = random(6, 3, seed=2)
    model.compile("adam")
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.optimizer.variables):
        variable.assign(tf.fill(variable.shape, number))
    optimizer = [v.numpy() for v in model.optimizer.variables]
    before = [v.numpy() for v in model.weights]

    network = from_keras_model(model)
    loss = MeanSquaredError.Params(reads=(network.outputs["mean"], "target"))
    pipe = pipeline(network, loss)
    fields = {"one": a, "two": b, "target": target}
    started = pipe.evaluate(fields, outputs=True).outputs
    np.testing.assert_allclose(started[network.outputs["mean"]], model([a, b])["mean"], atol=1e-6)
    train(pipe, fields, steps=3)
    assert network.to_keras(pipe.by_path) is model

    moved = {
        v.path
        for v, old in zip(model.weights, before, strict=True)
        if np.abs(v.numpy() - old).max() > 0.0
    }
    assert moved == {v.path for v in model.weights if not v.path.startswith("fixed")}
    predicted = model.predict([a, b], verbose=0)
    ours = pipe.evaluate(fields, outputs=True).outputs
    keras.tree.assert_same_structure(predicted, network.outputs)
    for name, theirs in zip(
        keras.tree.flatten(network.outputs), keras.tree.flatten(predicted), strict=True
    ):
        np.testing.assert_allclose(ours[name], theirs, atol=1e-6)
    for kept, variable in zip(optimizer, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(kept, variable)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict([a, b], verbose=0)["mean"], predicted["mean"])


def test_a_call_takes_and_returns_what_keras_does() -> None:
    model = two_sided()
    a, b = random(6, 5), random(6, 5, seed=1)
    network = from_keras_model(model)
    pipe = pipeline(network)
    expected = model([a, b])
    for given in ([a, b], (a, b), {"one": a, "two": b}):
        found = pipe(given)
        keras.tree.assert_same_structure(found, expected)
        for ours, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    with pytest.raises(errors.InputError) as caught:
        pipe([a, b, a])
    assert str(caught.value) == (
        "a call takes [one, two], got [a tensor, a tensor, a tensor]. Use that structure, or a "
        "dictionary of the fields one, two"
    )


def test_a_model_with_one_input_and_output_takes_and_returns_a_tensor() -> None:
    x = keras.Input((5,))
    for nest in (lambda y: y, lambda y: [y]):
        model = keras.Model(x, nest(layers.Dense(2)(layers.Dense(3)(x))))
        network = from_keras_model(model)
        found = pipeline(network)(random(4, 5))
        np.testing.assert_allclose(found, model(random(4, 5)), atol=1e-6)


def test_integers_are_numbers_where_the_model_has_floating_inputs() -> None:
    x = keras.Input((4, 4, 2), name="image")
    model = keras.Model(x, layers.Flatten()(layers.Conv2D(2, 3)(x)))
    images = np.random.default_rng(0).integers(0, 255, (4, 4, 4, 2))
    pipe = pipeline(from_keras_model(model))
    for dtype in ("uint8", "int64", "float64"):
        given = images.astype(dtype)
        pipe = pipeline(from_keras_model(model))
        np.testing.assert_allclose(pipe(given), model(given), rtol=1e-5)
    np.testing.assert_allclose(pipe([given]), model(given), rtol=1e-5)
    with pytest.raises(errors.InputError, match=r"a call takes image, got \{img: a tensor\}"):
        pipe({"img": given})


def test_inputs_that_keras_takes_as_a_dict() -> None:
    one, two = keras.Input((5,), name="one"), keras.Input((5,), name="two")
    model = keras.Model({"one": one, "two": two}, [layers.Dense(2)(one - two), one])
    network = from_keras_model(model, inputs={"two": "other"})
    assert network.inputs == {"one": "one", "two": "other"}
    pipe = pipeline(network)
    given = {"one": random(4, 5), "two": random(4, 5, seed=1)}
    found = pipe(given)
    assert isinstance(found, list)
    for ours, theirs in zip(found, model(given), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_layer_alone_gets_its_values_back() -> None:
    live = layers.Dense(3, name="top")
    live.build((None, 5))
    pipe = pipelining.PipeliningLayer.Params(
        layers=[keras_layers.from_keras(live), MeanSquaredError.Params()]
    ).instantiate()
    train(pipe, {"x": random(4, 5), "target": random(4, 3)}, steps=1)
    keras_layers.to_keras(live, pipe.by_path)
    np.testing.assert_array_equal(live.kernel, pipe.by_path["top/kernel"])


def test_values_that_do_not_fit_change_nothing() -> None:
    model = two_sided()
    network = from_keras_model(model)
    before = [v.numpy() for v in model.weights]
    values = {
        path: np.zeros(variable.shape)
        for name, layer in network.calls.items()
        for path, variable in (
            (f"{name}/{v.path.rsplit('/')[-1]}", v) for v in getattr(layer, "weights", ())
        )
    }
    missing = dict(values)
    del missing["fixed/bias"]
    with pytest.raises(errors.LayerError, match="there is no value 'fixed/bias' for the Keras m"):
        network.to_keras(missing)
    with pytest.raises(errors.LayerError, match=r"fixed/bias has shape \[7\], but that of the K"):
        network.to_keras({**values, "fixed/bias": np.zeros(7)})
    with pytest.raises(errors.LayerError, match="are path → value, got list"):
        network.to_keras([])  # type: ignore[arg-type]
    for old, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, variable)


def test_a_model_that_was_not_built_is_built_first() -> None:
    model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    network = from_keras_model(model)
    pipe = pipelining.PipeliningLayer.Params(layers=network.layers).instantiate()
    expected = pipe(random(4, 5))
    with pytest.raises(errors.LayerError, match=r"has no variables yet\. Call its build"):
        network.to_keras(pipe.by_path)
    model.build((None, 5))
    np.testing.assert_allclose(network.to_keras(pipe.by_path)(random(4, 5)), expected, atol=1e-6)


@pytest.mark.usefixtures("float64")
def test_the_dtype_is_that_of_the_model() -> None:
    x = keras.Input((5,))
    model = keras.Model(x, layers.Dense(3)(keras.ops.tanh(layers.Dense(4)(x))))
    images = np.random.default_rng(0).normal(size=(4, 5))
    target = np.random.default_rng(1).normal(size=(4, 3))
    network = from_keras_model(model)
    pipe = pipeline(network, MeanSquaredError.Params(reads=(network.outputs, "target")))
    result = pipe.value_and_gradients({network.inputs: images, "target": target})
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(tf.square(model(images) - target))
    assert result.loss.dtype == tf.float64
    assert float(result.loss) == pytest.approx(float(expected), rel=1e-14)
    gradients = tape.gradient(expected, [v.value for v in model.trainable_variables])
    for ours, theirs in zip(result.gradients.values(), gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
