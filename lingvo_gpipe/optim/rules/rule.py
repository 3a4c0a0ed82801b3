"""Update rules as pure functions: slots of a weight, and the computation of new values."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim.division import Array, Division


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSpec:
    """A variable that an optimizer keeps for a weight, on the weight's device.

    Attributes:
        path: path of the weight.
        slot: name of the slot.
        shape: static.
        dtype: dtype of the slot.
        initial: the value that fills it at first; None: it begins as a copy of the weight.
        has_rows: whether its first dimension counts the rows of the weight; None: if the two are
            of equal length.
    """

    path: str
    slot: str
    shape: tuple[int, ...]
    dtype: tf.DType
    initial: float | None
    has_rows: bool | None = None

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

    @property
    def is_elementwise(self) -> bool:
        """Whether a new value depends on its own element, the rate and the step alone.

        Its operations must also round alike in every shape. Then `Optimizer.Params.lazy` computes
        some rows of a weight alone: `update` receives a weight, gradient and slots of fewer rows,
        whose number is None in the static shapes.
        """
        return False

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
        found: list[dict[str, Array]] = [{} for _ in division.after]
        for name in parts[0]:
            values = [part[name] for part in parts]
            if [value.shape for value in values] == division.shapes_before:
                new = division.divided(division.joined(values))
            elif not values[0].shape and all(np.array_equal(values[0], v) for v in values):
                new = [values[0]] * len(found)
            else:
                raise errors.ParamsError(
                    f"slot {name!r} of {list(values[0].shape)} numbers, of a weight of "
                    f"{list(division.shapes_before[0])}, can neither be joined nor divided. Start "
                    "from the weights alone (--mode=train --checkpoint), or write the optimizer "
                    "as a Rule with its own `redivided`"
                )
            for part, value in zip(found, new, strict=True):
                part[name] = value
        return found
