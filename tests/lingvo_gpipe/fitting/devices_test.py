"""No device but those of its cell ever holds a layer's weights, their slots or their update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.fitting import PipelinedModel

_DEVICES = ("/device:CPU:1", "/device:CPU:2", "/device:CPU:3")  # CPU:0 stands for the host
# TensorFlow places these later, where the value or its reader is; zeros hold nothing of a weight.
_PLACED_LATER = ("Placeholder", "ReadVariableOp", "Const", "Fill")


def built_on_the_host() -> keras.Model:
    """Return a model whose kernels have shapes of their own."""
    with tf.device("/device:CPU:0"):
        x = inputs = keras.Input([6])
        for units in (33, 34, 35, 36):
            x = keras.layers.Dense(units, activation="tanh")(x)
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))


def step(model: PipelinedModel) -> None:
    random = np.random.default_rng(0)
    model.train_on_batch(random.normal(size=(8, 6)), np.arange(8) % 3)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            lambda: keras.optimizers.AdamW(global_clipnorm=1.0, use_ema=True), id="average"
        ),
        pytest.param(
            lambda: keras.optimizers.Adam(clipnorm=1.0, gradient_accumulation_steps=2),
            id="accumulation",
        ),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)),
            id="loss scale",
        ),
    ],
)
def test_an_update_stays_on_the_device_of_each_weight(
    optimizer: Callable[[], keras.optimizers.Optimizer],
) -> None:
    model = PipelinedModel(built_on_the_host(), 3, 2, devices=_DEVICES)
    model.compile(optimizer(), "sparse_categorical_crossentropy")
    step(model)
    homes = {tuple(v.shape): v.value.device[-13:] for v in model.model.weights if v.shape[0] > 6}
    assert set(homes.values()) == set(_DEVICES)
    for slot in model.optimizer.variables:
        assert slot.value.device[-13:] == homes.get(tuple(slot.shape), slot.value.device[-13:])
    (update,) = model._update._traced.values()
    graph = update.graph.as_graph_def()
    bodies = [update.graph.get_operations()]
    for function in graph.library.function:
        name = function.signature.name
        bodies.append(update.graph._get_function(name).graph.get_operations())
    placed = 0
    for operation in (operation for body in bodies for operation in body):
        for output in operation.outputs:
            shape = tuple(output.shape) if output.shape.rank else ()
            if shape in homes and operation.type not in _PLACED_LATER:
                assert operation.device[-13:] == homes[shape], operation
                placed += 1
    assert placed > 20


def test_the_host_frees_the_weights_when_training_begins() -> None:
    plain = built_on_the_host()
    on_the_host = [weakref.ref(variable.value) for variable in plain.weights]
    model = PipelinedModel(plain, 3, 2, devices=_DEVICES)
    model.compile("adam", "sparse_categorical_crossentropy")
    step(model)
    gc.collect()
    assert not any(reference() for reference in on_the_host)
