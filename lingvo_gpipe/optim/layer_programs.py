"""Programs of the update: one layer's gradient norm, and its new weights, slots and averages.

A program is a traced function that is never inlined and reads no variable. Layers whose weights
have equal configurations share one trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import tensorflow as tf

if TYPE_CHECKING:
    from tensorflow.types.experimental import PolymorphicFunction

from lingvo_gpipe.optim import update_options
from lingvo_gpipe.optim.rule import Rule, RuleInputs

Norms: TypeAlias = "tuple[tf.Tensor, tf.Tensor]"
"""Squared norm of a gradient, weight decay included, and the loss of the weight decay."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightConfig:
    """What a program depends on of a weight; equal tuples of them share one program.

    Attributes:
        shape: shape of the weight.
        dtype: dtype of the weight.
        slots: name and shape of each.
        decay: coefficient of the weight decay.
        rate_factor: factor of the learning rate.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    slots: tuple[tuple[str, tuple[int, ...]], ...]
    decay: float
    rate_factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer on one device.

    Attributes:
        device: device of the weights.
        paths: paths of the weights.
        configs: configs of the weights, in the order of `paths`.
    """

    device: str
    paths: tuple[str, ...]
    configs: tuple[WeightConfig, ...]


class StepScalars(NamedTuple):
    """Scalars that are equal for all weights of an update.

    Attributes:
        rate: learning rate, float32, or float64 where a weight is.
        step: updates done before this one, int64.
        inverse: 1 / loss scale, float32; None without loss scaling.
        clip: factor of the gradient; None without clipping.
        finite: whether the update may change anything; None without the guard.
        average_decay: share of the old average in the new one; None without averages.
    """

    rate: tf.Tensor
    step: tf.Tensor
    inverse: tf.Tensor | None
    clip: tf.Tensor | None
    finite: tf.Tensor | None
    average_decay: tf.Tensor | None


class LayerPrograms:
    """The traced programs of an update, shared by layers of equal configurations."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._traced: dict[tuple[str, tuple[WeightConfig, ...]], PolymorphicFunction] = {}

    @property
    def num_traces(self) -> int:
        """Traces so far."""
        return sum(p.experimental_get_tracing_count() for p in self._traced.values())

    def norms(
        self,
        layer: LayerWeights,
        weights: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        inverse: tf.Tensor | None,
        dtype: tf.DType,
    ) -> Norms:
        """Compute the squared norm of a layer's gradient and the loss of its weight decay.

        Args:
            layer: the layer.
            weights: values, in the order of `layer.paths`.
            gradients: of the weights.
            inverse: 1 / loss scale; None without loss scaling.
            dtype: dtype of both results.
        """
        program = self._program("norms", layer, lambda: _norm_function(layer.configs, dtype))
        with tf.device(layer.device):
            norms: Norms = program(list(weights), list(gradients), inverse)
            return norms

    def update(
        self,
        layer: LayerWeights,
        values: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        scalars: StepScalars,
    ) -> list[tf.Tensor]:
        """Compute a layer's new weights, slots and averages, in the order of `values`.

        Args:
            layer: the layer.
            values: values of the weights, then of their slots, then of their averages.
            gradients: of the weights.
            scalars: scalars of this update.
        """
        program = self._program(
            "update", layer, lambda: _update_function(self._rule, layer.paths, layer.configs)
        )
        new: list[tf.Tensor] = program(list(values), list(gradients), scalars)
        return new

    def _program(
        self, what: str, layer: LayerWeights, build: Callable[[], Callable[..., object]]
    ) -> PolymorphicFunction:
        key = (what, layer.configs)
        if key not in self._traced:
            self._traced[key] = tf.function(
                build(), autograph=False, experimental_attributes={"_noinline": True}
            )
        return self._traced[key]


def choose(finite: tf.Tensor | None, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Return `new` if `finite`, else `old`."""
    if finite is None:
        return new
    # With a scalar condition this operation passes one buffer on; tf.where would write a third.
    return tf.raw_ops.Select(condition=finite, x=new, y=old)


def _real(value: tf.Tensor) -> tf.Tensor:
    """Return real numbers of the same absolute values."""
    return tf.abs(value) if value.dtype.is_complex else value


def _norm_function(
    configs: tuple[WeightConfig, ...], dtype: tf.DType
) -> Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], tf.Tensor | None], Norms]:
    """Return (weights, gradients, 1 / loss scale) → norms."""

    def norms(
        weights: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], inverse: tf.Tensor | None
    ) -> Norms:
        square = loss = tf.zeros([], dtype)
        for config, value, gradient in zip(configs, weights, gradients, strict=True):
            whole = _whole_gradient(config, value, gradient, inverse)
            square += tf.cast(tf.reduce_sum(tf.square(_real(whole))), dtype)
            if config.decay:
                half = tf.cast(tf.nn.l2_loss(_real(value)), dtype)
                loss += tf.constant(config.decay, dtype) * half
        return square, loss

    return norms


def _update_function(
    rule: Rule, paths: Sequence[str], configs: tuple[WeightConfig, ...]
) -> Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], StepScalars], list[tf.Tensor]]:
    """Return (weights, slots, averages; gradients; scalars) → new values in the same order."""

    def update(
        values: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        scalars: StepScalars,
    ) -> list[tf.Tensor]:
        rest = iter(values)
        weights = [next(rest) for _ in configs]
        slots = [{name: next(rest) for name, _ in config.slots} for config in configs]
        old_averages = list(rest)
        new_weights: list[tf.Tensor] = []
        new_slots: list[tf.Tensor] = []
        for path, config, weight, gradient, old_slots in zip(
            paths, configs, weights, gradients, slots, strict=True
        ):
            rate = scalars.rate if config.rate_factor == 1.0 else scalars.rate * config.rate_factor
            whole = _whole_gradient(config, weight, gradient, scalars.inverse)
            if scalars.clip is not None:
                whole *= tf.cast(scalars.clip, whole.dtype)
            inputs = RuleInputs(path, weight, whole, old_slots, rate, scalars.step)
            new, changed = rule.update(inputs)
            new_weights.append(choose(scalars.finite, new, weight))
            new_slots += [choose(scalars.finite, changed[n], old) for n, old in old_slots.items()]
        new_averages = [
            choose(scalars.finite, update_options.averaged(old, new, scalars.average_decay), old)
            for old, new in zip(old_averages, new_weights, strict=False)
        ]
        return new_weights + new_slots + new_averages

    return update


def _whole_gradient(
    config: WeightConfig, weight: tf.Tensor, gradient: tf.Tensor, inverse: tf.Tensor | None
) -> tf.Tensor:
    """Return the gradient with the loss scale divided out and weight decay added."""
    if inverse is not None:
        gradient *= tf.cast(inverse, gradient.dtype)
    return gradient + config.decay * weight if config.decay else gradient
