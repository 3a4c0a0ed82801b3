"""Groups of micro-batches: a mini-batch of very many runs as several, one after the other.

The graph of a step has a call for each slot, so it takes longer to build the more micro-batches it
has. All groups have the same shape, so one traced graph runs each in turn, adding to the gradients.
An update of groups is one of several mini-batches (`train.accumulate`), with the micro-batches of
the whole one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, parts
from lingvo_gpipe.network.params import PipelineParams

_LEAST_SHARE = 4  # smaller groups than this part of the largest would fill and drain too often


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A part of a mini-batch.

    Attributes:
        fields: name → nest of tensors.
        first: number of its first micro-batch in the mini-batch.
        num_micro_batches: M of the whole mini-batch; None: the group is the whole one.
    """

    fields: Mapping[str, Nest]
    first: int
    num_micro_batches: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """How the mini-batches of a network run.

    Attributes:
        whole: params of the network.
        size: most micro-batches of a group; None: each mini-batch is one group.
        count: number of groups of a mini-batch of training.
        params: params of the network that runs one group.
        fields: fields of the largest group of a mini-batch of training, name → nest of
            `tf.TensorSpec`.
    """

    whole: PipelineParams
    size: int | None
    count: int
    params: PipelineParams
    fields: Mapping[str, SpecNest]

    def divided(self, batch: Mapping[str, Nest]) -> list[Group]:
        """Return the groups of a mini-batch of any size."""
        whole = self.whole
        if self.size is None or isinstance(batch, parts.InParts):
            return [Group(batch, 0, None)]
        sizes = micro_batches.sizes_of(whole, batch)
        if len(sizes) <= self.size:
            return [Group(batch, 0, None)]
        groups, start = [], 0
        for first in range(0, len(sizes), self.size):
            end = start + sum(sizes[first : first + self.size])
            fields = parts.consecutive(batch, range(start, end), whole.unbatched)
            groups.append(Group(fields, first, len(sizes)))
            start = end
        return groups


def make(
    params: PipelineParams, fields: Mapping[str, SpecNest], *, in_parts: bool = False
) -> Groups:
    """Return the groups in which a network runs its mini-batches.

    Where it is built for a mini-batch of so few examples that all micro-batches are one group, all
    its mini-batches are.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.
        in_parts: whether each replica's host reads its own part of the mini-batch, which is then
            one group.

    Raises:
        PartitionError: `group_size` is less than one.
    """
    size = None if in_parts else size_of(params)
    if size is None:
        return Groups(params, None, 1, params, fields)
    sizes = micro_batches.sizes_of(params, fields)
    if len(sizes) <= params.group_size * params.num_replicas:
        return Groups(params, None, 1, params, fields)
    fields_of_group = micro_batches.resized(params, fields, sum(sizes[:size]))
    params_of_group = params.copy().set(num_micro_batches=size)
    return Groups(params, size, math.ceil(len(sizes) / size), params_of_group, fields_of_group)


def size_of(params: PipelineParams) -> int | None:
    """Return the most micro-batches of a group; None: each mini-batch is one group.

    Groups have equally many, so that the network that runs them has one number. A schedule that is
    written by hand has a fixed number of micro-batches, and a number without a fitting divisor
    cannot be divided: their mini-batches are one group.

    Raises:
        PartitionError: `group_size` is less than one.
    """
    if params.group_size < 1:
        raise errors.PartitionError(
            f"group_size={params.group_size}, but a group has at least one micro-batch"
        )
    number, num_replicas = params.num_micro_batches, params.num_replicas
    if params.schedule not in (*schedule.SCHEDULES, schedule.AUTO) or num_replicas < 1:
        return None
    most = params.group_size * num_replicas
    if number <= most:
        return None
    sizes = range(most, max(most // _LEAST_SHARE, num_replicas) - 1, -1)
    return next((size for size in sizes if number % size == 0), None)
