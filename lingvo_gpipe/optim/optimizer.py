"""An optimizer: an update rule, its learning rate, and groups of weights with other rates."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
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
        lazy: tuple[str, ...] = hyperparams.field(
            (),
            "Patterns of paths of tables, for SGD, Adam, AdamW and Nadam. A row whose gradient in "
            "an update is all zero keeps its weight and its row of each slot, and is not decayed. "
            "Unlike dense Adam, it keeps its momentum.",
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
            _matches("groups", pattern, paths)
        return {
            path: next(
                (f for pattern, f in self.params.groups if fnmatch.fnmatchcase(path, pattern)), 1.0
            )
            for path in paths
        }

    def lazy_paths(self, specs: Mapping[str, base.VariableSpec]) -> frozenset[str]:
        """Return the weights of which an update changes only the rows that have a gradient.

        Args:
            specs: of the weights, by path.

        Raises:
            ParamsError: a pattern matches no weight, one that has no rows, or one all of whose
                rows have a gradient in every update; or the rule needs whole weights.
        """
        if self.params.lazy and not self.rule.is_elementwise:
            raise errors.ParamsError(
                "optimizer.lazy: this optimizer does not compute each row by itself. Use SGD, "
                "Adam, AdamW or Nadam without clipnorm, or leave out `lazy`"
            )
        lazy: set[str] = set()
        for pattern in self.params.lazy:
            for path in _matches("lazy", pattern, specs):
                _check_table(pattern, specs[path], specs)
                lazy.add(path)
        return frozenset(lazy)


def _check_table(
    pattern: str, spec: base.VariableSpec, specs: Mapping[str, base.VariableSpec]
) -> None:
    where = f"optimizer.lazy: pattern {pattern!r} matches {spec.path}"
    if len(spec.shape) < 2:
        tables = [path for path, other in specs.items() if len(other.shape) > 1]
        raise errors.ParamsError(
            f"{where} of shape {list(spec.shape)}, which has no rows; nearest "
            f"{', '.join(_nearest(pattern, tables)) or 'none'}"
        )
    if spec.all_rows:
        raise errors.ParamsError(
            f"{where}, the kernel of a softmax over its rows: all of them have a gradient in "
            "every update, and the option would do nothing. Remove the pattern, or the tie"
        )


def _matches(field: str, pattern: str, paths: Iterable[str]) -> list[str]:
    paths = list(paths)
    matches = fnmatch.filter(paths, pattern)
    if not matches:
        raise errors.ParamsError(
            f"optimizer.{field}: pattern {pattern!r} matches no weight; nearest "
            f"{', '.join(_nearest(pattern, paths))}"
        )
    return matches


def _nearest(pattern: str, paths: Iterable[str]) -> list[str]:
    return errors.nearest(pattern.strip("*"), paths) or sorted(paths)[:3]
