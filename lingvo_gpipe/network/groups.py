"""Groups of micro-batches: a mini-batch of very many runs as several, one after the other.

The graph of a step has a call for each slot, so it takes longer to build the more micro-batches it
has. Equal groups run one graph, whose gradients continue those of the groups before: an update of
groups is one of several mini-batches (`train.accumulate`), with the same micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, parts
from lingvo_gpipe.network.params import PipelineParams

_LEAST_SHARE = 4  # smaller groups than this part of the largest would fill and drain too often


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the mini-batches of a network run.

    Attributes:
        whole: params of the network.
        count: number of groups of a mini-batch of training.
        size: number of micro-batches of a group.
        params: params of the network that one group runs.
        fields: fields of the largest group, name → nest of `tf.TensorSpec`.
    """

    whole: PipelineParams
    count: int
    size: int
    params: PipelineParams
    fields: Mapping[str, SpecNest]

    def cut(self, batch: Mapping[str, Nest]) -> list[Mapping[str, Nest]]:
        """Return the groups of a mini-batch of any size, each name → nest of tensors."""
        if self.count == 1:
            return [batch]
        whole = self.whole
        num_examples = parts.num_examples(batch, whole.batch_dim, whole.unbatched)
        number = count(whole, num_examples)
        examples = [_examples(whole, num_examples, group, number) for group in range(number)]
        return [_taken(whole, batch, own) for own in examples]


def of(params: PipelineParams, fields: Mapping[str, SpecNest], *, in_parts: bool = False) -> Groups:
    """Return the groups in which a network runs the mini-batches of training.

    Args:
        params: params of the network.
        fields: the mini-batch's fields, name → nest of `tf.TensorSpec`.
        in_parts: whether each replica's host reads its own part of the mini-batch, which is then
            one group.
    """
    num_examples = micro_batches.batch_size(fields, params.batch_dim, params.unbatched)
    number = 1 if in_parts else count(params, num_examples)
    size = micro_batches.count_of(params, num_examples) // number
    if number == 1:
        return Groups(params, 1, size, params, fields)
    of_group = params.copy()
    if params.micro_batch_size is None:
        of_group.num_micro_batches = size
    largest = len(_examples(params, num_examples, 0, number))
    of_fields = micro_batches.resized(params, fields, largest)
    return Groups(params, number, size, of_group, of_fields)


def count(params: PipelineParams, num_examples: int) -> int:
    """Return the number of groups of a mini-batch: the fewest that have equally many micro-batches.

    A schedule that is written by hand has a fixed number of micro-batches, and a number without a
    fitting divisor cannot be divided: these are one group.

    Raises:
        PartitionError: `group_size` is less than one.
    """
    if params.group_size < 1:
        raise errors.PartitionError(
            f"group_size={params.group_size}, but a group has at least one micro-batch"
        )
    if params.schedule not in (*schedule.SCHEDULES, schedule.AUTO):
        return 1
    number = micro_batches.count_of(params, num_examples)
    most = params.group_size * params.num_replicas
    if number <= most:
        return 1
    sizes = range(most, max(most // _LEAST_SHARE, params.num_replicas) - 1, -1)
    return next((number // size for size in sizes if number % size == 0), 1)


def _examples(params: PipelineParams, num_examples: int, group: int, number: int) -> range:
    """Return the numbers of the examples of a group: those of consecutive micro-batches."""
    size = micro_batches.count_of(params, num_examples) // number
    first, end = (micro_batches.start(params, num_examples, g * size) for g in (group, group + 1))
    return range(first, end)


def _taken(params: PipelineParams, batch: Mapping[str, Nest], own: range) -> dict[str, Nest]:
    place = (slice(None),) * params.batch_dim + (slice(own.start, own.stop),)

    def sliced(leaf: tf.Tensor) -> tf.Tensor:
        with tf.device(leaf.device):
            return leaf[place]

    return {
        name: value if name in params.unbatched else tf.nest.map_structure(sliced, value)
        for name, value in batch.items()
    }
