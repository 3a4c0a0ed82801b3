"""Update rules as pure functions: the slots of a weight, and its new value and slots."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams

Array: TypeAlias = np.ndarray[Any, Any]
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


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """An axis along which a weight is divided, and the sizes of its slices before and after.

    Attributes:
        shape: of the whole weight.
        axis: the axis.
        before: sizes of the slices that a checkpoint has.
        after: sizes of the slices that are wanted.
    """

    shape: Shape
    axis: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def slice_shape(self, size: int) -> Shape:
        """Return the shape of a slice."""
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the whole weight, or a slot of its shape."""
        return np.concatenate(parts, self.axis) if len(parts) > 1 else parts[0]

    def divided(self, whole: Array) -> list[Array]:
        """Return the wanted slices of the whole weight, or of a slot of its shape."""
        return np.split(whole, list(itertools.accumulate(self.after[:-1])), self.axis)


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

    def redivided(
        self, parts: Sequence[Mapping[str, Array]], division: Division
    ) -> list[dict[str, Array]]:
        """Return the slots of other slices of a weight.

        This one joins and divides slots of the weight's shape, and keeps equal scalars.

        Args:
            parts: slots of each slice that there is, by name.
            division: of the weight.

        Raises:
            ParamsError: a slot is neither.
        """
        shapes = [division.slice_shape(size) for size in division.before]
        slots: list[dict[str, Array]] = [{} for _ in division.after]
        for name in parts[0]:
            values = [part[name] for part in parts]
            if [value.shape for value in values] == shapes:
                new = division.divided(division.joined(values))
            elif not values[0].shape and all(np.array_equal(values[0], v) for v in values):
                new = [values[0]] * len(slots)
            else:
                raise errors.ParamsError(
                    f"slot {name!r} of {list(values[0].shape)} numbers, of a weight of "
                    f"{list(shapes[0])}, can neither be joined nor divided. Start "
                    "from the weights alone (--mode=train --checkpoint), or write the optimizer "
                    "as a Rule with its own `redivided`"
                )
            for part, value in zip(slots, new, strict=True):
                part[name] = value
        return slots
