"""Arguments and results of a cell's programs, as nests for `tf.nest`; mini-batches cut for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe import precision
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network.cut_fields import CutFields


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


class CutInputs:
    """What the calls of a pass read of the mini-batch, cut on each device that reads it."""

    def __init__(
        self,
        fields: CutFields,
        seeds: Sequence[tf.Tensor],
        readers: Iterable[tuple[str, Sequence[int]]],
    ) -> None:
        """Cut.

        Args:
            fields: fields of the micro-batches.
            seeds: for each micro-batch, int32 [2]; they cross to a device as one tensor.
            readers: device of each cell, and the versions that the cell imports.
        """
        self._fields: dict[str, dict[int, list[Nest]]] = {}
        self._seeds: dict[str, list[tf.Tensor]] = {}
        stacked = tf.stack(seeds)
        for device, imports in readers:
            with tf.device(device):
                if device not in self._seeds:
                    self._seeds[device] = tf.unstack(stacked)
                here = self._fields.setdefault(device, {})
                for version in imports:
                    if version in fields and version not in here:
                        here[version] = fields.of_version(version)

    def fields(self, device: str, micro_batch: int) -> dict[int, Nest]:
        """Return the fields of a micro-batch that are read on a device, by version."""
        return {version: cut[micro_batch] for version, cut in self._fields[device].items()}

    def seed(self, device: str, micro_batch: int) -> tf.Tensor:
        """Return the seed of a micro-batch on a device, int32 [2]."""
        return self._seeds[device][micro_batch]


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
