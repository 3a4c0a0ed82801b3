"""Arguments and results of a cell's programs, as nests for `tf.nest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe import precision
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.nests import Nest


class CellInputs(NamedTuple):
    """Arguments of every program of a cell, in any phase.

    Attributes:
        weights: the cell's `weights` in the compute dtype.
        untrained: the cell's `untrained`: frozen weights in the compute dtype, and statistics.
        imports: version → nest, for every version in the cell's `imports`.
        seed: int32 [2], seed of the micro-batch.
        step: int64 scalar.
    """

    weights: Sequence[tf.Tensor]
    untrained: Sequence[tf.Tensor]
    imports: dict[int, Nest]
    seed: tf.Tensor
    step: tf.Tensor


class BackwardInputs(NamedTuple):
    """What a backward program is called with in addition to `CellInputs`.

    Attributes:
        exports: version in the cell's `exports_with_gradient` → gradients of its floating leaves.
        loss_factors: for each loss of the cell, the derivative of the update's loss by its sum.
        accumulators: for each weight, the tensor to which its gradient is added; empty: the
            gradients themselves are returned.
    """

    exports: dict[int, list[tf.Tensor]]
    loss_factors: Sequence[tf.Tensor]
    accumulators: Sequence[tf.Tensor] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class CellOutputs:
    """What a forward call returns.

    Attributes:
        exports: version → nest of tensors.
        collected: losses, sums and moments of the micro-batch.
    """

    exports: dict[int, Nest]
    collected: Collected

    def as_nest(self) -> Nest:
        """Return both as one nest, so that `tf.nest` can pack it."""
        return self.exports, self.collected.as_nest()

    @classmethod
    def of_nest(cls, nest: Nest) -> CellOutputs:
        """Return the outputs whose `as_nest` is `nest`."""
        exports, collected_nest = nest
        collected = Collected()
        collected.update(collected_nest)
        return cls(exports, collected)


@dataclasses.dataclass(frozen=True, slots=True)
class CellGradients:
    """What a backward call returns.

    Attributes:
        imports: version → gradients of its floating leaves.
        weights: for each trained weight of the cell, its accumulator plus the gradient of this
            micro-batch, or the gradient itself if there were no accumulators.
        left: of I, what W reads, by its name in their trace.
    """

    imports: dict[int, list[tf.Tensor]]
    weights: list[tf.Tensor]
    left: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


def in_read_dtype(spec: base.VariableSpec, value: tf.Tensor) -> tf.Tensor:
    """Return a variable's value in the dtype in which its layer reads it."""
    return precision.cast(value, spec.read_dtype)
