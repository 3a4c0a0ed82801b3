"""What depends on the micro-batches is found in layers of any origin, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import hyperparams, keras_layers, layers, network
from lingvo_gpipe.execution import micro_batch_dependence
from lingvo_gpipe.layers import base

FIELDS = {"x": tf.TensorSpec([8, 4]), "label": tf.TensorSpec([8], tf.int32)}


class Noise(layers.Identity):
    """x: [B, D] → x plus noise, from a loop."""

    class Params(layers.Identity.Params):
        reads_seed: bool = hyperparams.field(True, "Reads ctx.seed.")
        is_used: bool = hyperparams.field(True, "Returns what it draws.")

    params: Params

    def fprop(self, theta: base.Theta, inputs: Any, ctx: layers.Context) -> Any:
        del theta
        if not self.params.reads_seed:
            return inputs
        seed = ctx.fold(3)

        def body(n: Any, x: Any) -> Any:
            return n + 1, x + tf.random.stateless_normal([4], seed)

        _, noisy = tf.while_loop(lambda n, _: n < 2, body, (0, inputs), maximum_iterations=2)
        return noisy if self.params.is_used else inputs


class NoiseMetric(Noise):
    """x: [B, D] → x; only its metric is drawn."""

    class Params(Noise.Params):
        def _meta(self, *inputs: Any) -> base.Meta:
            return base.Meta(inputs[0], metrics=(base.MetricSpec("noise", lambda total: total),))

    def fprop(self, theta: base.Theta, inputs: Any, ctx: layers.Context) -> Any:
        ctx.add_sum("noise", tf.reduce_sum(super().fprop(theta, inputs, ctx)))
        return inputs


class Compares(Noise):
    """x: [B, D] → x; says that it compares the examples of a mini-batch."""

    class Params(Noise.Params):
        reads_seed = False

        def _meta(self, *inputs: Any) -> base.Meta:
            return base.Meta(inputs[0], undivided="compares examples")


def reason(*inside: base.Layer.Params, **model: Any) -> str | None:
    """Return what is found in a network with these layers."""
    params = network.PipelineParams(
        layers=[
            layers.Dense.Params(name="first", units=4, activation="relu"),
            *inside,
            layers.Softmax.Params(name="head", classes=3),
        ],
        **model,
    )
    return micro_batch_dependence.reason(network.analyze(params, FIELDS))


def keras_block(rate: float) -> Any:
    """Return two Keras layers in one."""
    block = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(rate)])
    return keras_layers.from_keras(block, name="inside")


DRAWS = "inside draws random numbers for each micro-batch"
STATISTICS = "inside takes statistics of each micro-batch"


# Functions, since Keras layers begin TensorFlow.
DEPENDING: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: layers.Dropout.Params(rate=0.2), DRAWS),
    "user": (Noise.Params, DRAWS),
    "user recomputed": (lambda: Noise.Params(recompute=True), DRAWS),
    "metric": (NoiseMetric.Params, DRAWS),
    "keras dropout": (lambda: keras_block(0.2), DRAWS),
    "keras noise": (lambda: keras_layers.from_keras(keras.layers.GaussianNoise(0.1)), DRAWS),
    "comparison": (Compares.Params, "inside compares examples"),
    "batch norm": (layers.BatchNorm.Params, STATISTICS),
    "recomputed norm": (lambda: layers.BatchNorm.Params(recompute=True), STATISTICS),
    "keras norm": (
        lambda: keras_layers.from_keras(keras.layers.BatchNormalization()),
        STATISTICS,
    ),
}
INDEPENDENT: dict[str, Callable[[], Any]] = {
    "dropout of nothing": lambda: layers.Dropout.Params(rate=0.0),
    "no seed": lambda: Noise.Params(reads_seed=False),
    "seed without use": lambda: Noise.Params(is_used=False),
    "seed without use, recomputed": lambda: Noise.Params(is_used=False, recompute=True),
    "keras dropout of nothing": lambda: keras_block(0.0),
    "layer norm": layers.LayerNorm.Params,
    "frozen norm": lambda: layers.BatchNorm.Params(trainable=False),
}


@pytest.mark.parametrize("case", DEPENDING)
def test_draws_and_statistics_are_found(case: str) -> None:
    layer, expected = DEPENDING[case]
    assert reason(layer().set(name="inside")) == expected


@pytest.mark.parametrize("case", INDEPENDENT)
def test_nothing_is_found_where_results_are_those_of_examples(case: str) -> None:
    assert reason(INDEPENDENT[case]().set(name="inside")) is None


def test_the_first_layer_is_named_and_equal_layers_are_traced_once() -> None:
    traced = []

    class Counted(Noise):
        """x: [B, D] → x, and it counts its traces."""

        class Params(Noise.Params):
            pass

        def fprop(self, theta: base.Theta, inputs: Any, ctx: layers.Context) -> Any:
            traced.append(self.params.name)
            return super().fprop(theta, inputs, ctx)

    plain = [Counted.Params(name=f"plain_{n}", reads_seed=False) for n in range(5)]
    drawn = Counted.Params(name="drawn")
    assert reason(*plain, drawn, layers.BatchNorm.Params()) == DRAWS.replace("inside", "drawn")
    assert traced == ["plain_0", "drawn"]


def test_a_layer_like_a_frozen_one_is_looked_at() -> None:
    norms = [layers.BatchNorm.Params(name=f"norm_{n}") for n in range(2)]
    found = STATISTICS.replace("inside", "norm_1")
    assert reason(*norms, frozen=("norm_0/*",)) == found
    assert reason(*norms, frozen=("norm_*",)) is None
