"""An optimizer: an update rule, its learning rate, and groups of weights with other rates."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base
from lingvo_gpipe.optim.keras_rule import KerasRule
from lingvo_gpipe.optim.learning_rates import LearningRate
from lingvo_gpipe.optim.rule import Rule, SlotSpec


class Optimizer(hyperparams.Configurable):
    """An update rule, its learning rate, and groups of weights with other rates."""

    class Params(hyperparams.Configurable.Params):
        """Params of Optimizer."""

        name: str = hyperparams.field("Adam", "Class of keras.optimizers, such as SGD or AdamW.")
        config: dict[str, Any] = hyperparams.field(
            {}, "Arguments of that class other than the learning rate."
        )
        rule: Rule.Params | None = hyperparams.field(
            None, "A rule that is not of Keras, in place of name and config."
        )
        learning_rate: float | LearningRate.Params = hyperparams.required(
            "A constant, or a rate by the update, such as KerasLearningRate.Params(name, config)."
        )
        groups: tuple[tuple[str, float], ...] = hyperparams.field(
            (), "(pattern of weight paths, factor of their rate); the first that matches counts."
        )

    params: Params

    def __init__(self, params: Optimizer.Params) -> None:
        super().__init__(params)
        keras_rule = KerasRule.Params(name=params.name, config=params.config)
        self.rule: Rule = (params.rule or keras_rule).instantiate()
        self._learning_rate: LearningRate | None = None
        if not isinstance(params.learning_rate, float):
            self._learning_rate = params.learning_rate.instantiate()
        elif not math.isfinite(params.learning_rate):
            raise errors.ParamsError(
                f"optimizer.learning_rate={params.learning_rate} is not a finite number. Set a "
                "rate such as 0.001"
            )

    def slots(self, specs: Iterable[base.VariableSpec]) -> dict[tuple[str, str], SlotSpec]:
        """Return all slots of the weights of `specs` by (weight path, slot name).

        Specs that are tied, frozen or state have none. No variable is created.
        """
        return {
            (slot.path, slot.slot): slot
            for spec in specs
            if spec.is_trained and spec.tie is None
            for slot in self.rule.slots(spec.path, spec.shape, spec.dtype)
        }

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of update `step` (from 0), a float64 scalar tensor."""
        if self._learning_rate is None:
            return tf.constant(self.params.learning_rate, tf.float64)
        return self._learning_rate.at(step)

    def factors(self, paths: Iterable[str]) -> dict[str, float]:
        """Return the factor of the rate of each weight.

        Raises:
            ParamsError: a group's pattern matches no weight.
        """
        paths = list(paths)
        for pattern, _ in self.params.groups:
            _check_matches(pattern, paths)
        return {
            path: next(
                (f for pattern, f in self.params.groups if fnmatch.fnmatchcase(path, pattern)), 1.0
            )
            for path in paths
        }


def _check_matches(pattern: str, paths: Sequence[str]) -> None:
    if not fnmatch.filter(paths, pattern):
        raise errors.ParamsError(
            f"optimizer.groups: pattern {pattern!r} matches no weight; "
            f"{errors.suggestion(pattern.strip('*'), paths)}"
        )
