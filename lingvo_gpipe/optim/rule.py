"""Update rules as pure functions: the slots of a weight, and its new value and slots."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import hyperparams

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSpec:
    """A variable that an optimizer keeps for a weight, on the weight's device.

    Attributes:
        path: path of the weight.
        slot: name of the slot.
        shape: static.
        dtype: dtype of the slot.
        initial: the value that fills it at first; None: it begins as a copy of the weight.
    """

    path: str
    slot: str
    shape: tuple[int, ...]
    dtype: tf.DType
    initial: float | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the slot."""
        return math.prod(self.shape) * self.dtype.size


@dataclasses.dataclass(frozen=True, slots=True)
class RuleInputs:
    """What an update of one weight reads.

    Attributes:
        path: path of the weight.
        weight: its value.
        gradient: with the weight's shape and dtype.
        slots: values by slot name.
        rate: the learning rate, a float32 scalar, or float64 where a weight of the network is.
        step: updates done before this one, an int64 scalar.
    """

    path: str
    weight: tf.Tensor
    gradient: tf.Tensor
    slots: Mapping[str, tf.Tensor]
    rate: tf.Tensor
    step: tf.Tensor


class Rule(hyperparams.Configurable):
    """An update rule of one weight; subclasses define `slots` and `update`, both pure."""

    class Params(hyperparams.Configurable.Params):
        """Params of a rule."""

    @abc.abstractmethod
    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Return the slots of the weight at `path`."""

    @abc.abstractmethod
    def update(self, inputs: RuleInputs) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight, and the new slots by name.

        Weights with slots of equal names, shapes and dtypes share one trace: `inputs.path` is the
        path of the first of them, and nothing else may depend on it.
        """
