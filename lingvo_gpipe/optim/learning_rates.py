"""Learning rates that change with the number of the update."""

from __future__ import annotations

import abc
import math
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.optim import checks, keras_objects


class LearningRate(hyperparams.Configurable):
    """A learning rate by the number of the update; subclasses define `at`."""

    class Params(hyperparams.Configurable.Params):
        """Params of a learning rate."""

    @abc.abstractmethod
    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float64 scalar, of update `step` (int64 scalar, from 0)."""


class KerasLearningRate(LearningRate):
    """A learning rate of `keras.optimizers.schedules`."""

    class Params(LearningRate.Params):
        """Params of KerasLearningRate."""

        name: str = hyperparams.required("Keras class, such as CosineDecay.")
        config: dict[str, Any] = hyperparams.field({}, "Arguments of that class.")

    def __init__(self, params: KerasLearningRate.Params) -> None:
        super().__init__(params)
        module = keras.optimizers.schedules
        self._keras_rate = keras_objects.make(
            module, module.LearningRateSchedule, params.name, dict(params.config)
        )

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate of update `step`, a float64 scalar that Keras computed in float32."""
        return tf.cast(self._keras_rate(step), tf.float64)


class InverseSquareRoot(LearningRate):
    """A linear rise, then a fall with the root: factor · d^−½ · min(s^−½, s · warmup^−1.5).

    s is the number of updates done, plus 1. The highest rate, at s = warmup, is
    factor / √(d · warmup).

    Source: Vaswani et al. 2017, section 5.3, with a factor, as Lingvo's `TransformerSchedule`.

    >>> learning_rate = InverseSquareRoot.Params().instantiate()
    >>> steps = (0, 19_999, 39_999, 159_999)
    >>> [f"{float(learning_rate.at(tf.constant(step))):.3g}" for step in steps]
    ['1.17e-08', '0.000234', '0.000469', '0.000234']
    """

    class Params(LearningRate.Params):
        """Params of InverseSquareRoot."""

        factor: float = hyperparams.field(3.0, "Factor on the whole.")
        units: int = hyperparams.field(1024, "d, the model dimension.")
        warmup_steps: int = hyperparams.field(40_000, "Updates of the rise.")

    params: Params

    def __init__(self, params: InverseSquareRoot.Params) -> None:
        super().__init__(params)
        checks.check(
            params,
            factor=(0.0 <= params.factor < math.inf, "0 or more"),
            units=(params.units >= 1, "1 or more"),
            warmup_steps=(params.warmup_steps >= 1, "1 or more"),
        )

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float64 scalar, of update `step` (int64 scalar, from 0)."""
        params = self.params
        s = tf.cast(step, tf.float64) + 1.0
        return (
            params.factor * params.units**-0.5 * tf.minimum(s**-0.5, s * params.warmup_steps**-1.5)
        )


class WarmupStaircase(LearningRate):
    """A linear rise from 0, then stairs down, peak · decay^⌊step / decay_steps⌋, to a floor.

    The stairs are counted from update 0, as in the reference, and not from the end of the rise:
    where the rise takes n stairs, the rate reaches `peak` and then falls at once to peak · decay^n.

    Source: tensorflow/tpu, models/official/amoeba_net.

    >>> learning_rate = WarmupStaircase.Params(
    ...     peak=1.0, warmup_steps=6, decay=0.5, decay_steps=2.0
    ... ).instantiate()
    >>> [round(float(learning_rate.at(tf.constant(step))), 3) for step in (0, 3, 5, 6, 8)]
    [0.0, 0.5, 0.833, 0.125, 0.062]
    """

    class Params(LearningRate.Params):
        """Params of WarmupStaircase."""

        peak: float = hyperparams.required("Rate at the top of the rise.")
        warmup_steps: int = hyperparams.field(0, "Updates of the rise; 0: no rise.")
        decay: float = hyperparams.required("Factor from one stair to the next.")
        decay_steps: float = hyperparams.required("Updates on one stair; may be a fraction.")
        floor: float = hyperparams.field(0.0, "Lowest rate, as a share of `peak`.")

    params: Params

    def __init__(self, params: WarmupStaircase.Params) -> None:
        super().__init__(params)
        checks.check(
            params,
            peak=(0.0 <= params.peak < math.inf, "0 or more"),
            warmup_steps=(params.warmup_steps >= 0, "0 or more"),
            decay=(0.0 <= params.decay < math.inf, "0 or more"),
            decay_steps=(params.decay_steps > 0.0, "more than 0"),
            floor=(0.0 <= params.floor < math.inf, "0 or more"),
        )

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float64 scalar, of update `step` (int64 scalar, from 0)."""
        params = self.params
        # Float32 does not hold every step of a long run.
        step = tf.cast(step, tf.float64)
        rate = params.peak * params.decay ** tf.floor(step / params.decay_steps)
        if params.warmup_steps:
            rise = params.peak * step / params.warmup_steps
            rate = tf.where(step < params.warmup_steps, rise, rate)
        return tf.maximum(rate, params.floor * params.peak)
