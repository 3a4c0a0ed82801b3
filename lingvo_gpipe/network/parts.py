"""A mini-batch in parts: the examples of each replica, read by that replica's own host.

A part is what a replica computes: the examples of its micro-batches, which are consecutive. So the
numbers of replicas and hosts change no micro-batch, and each example is in one part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import tensorflow as tf

from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import micro_batches, replicas
from lingvo_gpipe.network.params import PipelineParams


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaPart:
    """Which examples of each mini-batch are those of one replica.

    Attributes:
        replica: its number.
        num_replicas: R.
        num_micro_batches: M that the Params set, of all replicas.
    """

    replica: int
    num_replicas: int
    num_micro_batches: int

    @classmethod
    def of(cls, params: PipelineParams, replica: int) -> ReplicaPart:
        """Return the part of a replica of a network."""
        return cls(
            replica,
            params.num_replicas,
            params.num_micro_batches,
        )

    def examples(self, num_examples: int) -> range:
        """Return the numbers of its examples in a mini-batch of N.

        >>> ReplicaPart(1, 2, 4).examples(10)
        range(6, 10)
        """
        sizes = micro_batches.sizes(num_examples, self.num_micro_batches)
        share = replicas.shares(len(sizes), self.num_replicas)[self.replica]
        return range(sum(sizes[: share.start]), sum(sizes[: share.stop]))

    def cut(self, fields: Mapping[str, Nest]) -> dict[str, Nest]:
        """Return its examples of a whole mini-batch, name → nest of tensors."""
        examples = self.examples(micro_batches.batch_size(fields))
        return _taken(fields, lambda leaf: leaf[examples.start : examples.stop])


class InParts(Mapping[str, Nest]):
    """The fields of a mini-batch whose parts lie on different devices.

    A field that is looked up is joined, on the device of the first part. What computes on the
    mini-batch reads `parts` instead.

    Attributes:
        parts: fields of each part that has examples, in the order of the examples.
    """

    def __init__(self, parts: Sequence[dict[str, Nest]]) -> None:
        """Join parts.

        Args:
            parts: at least one; see the class.
        """
        self.parts = tuple(parts)

    def __getitem__(self, name: str) -> Nest:
        """Return a field of all examples."""
        values = [part[name] for part in self.parts]
        with tf.device(tf.nest.flatten(values[0])[0].device):
            return micro_batches.merge(values)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the fields."""
        return iter(self.parts[0])

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self.parts[0])


Batch: TypeAlias = "Mapping[str, Nest] | tuple[Mapping[str, Nest], ...]"
"""A mini-batch, name → nest of tensors; or its parts, as functions of tensors take them."""


def of_batch(batch: Batch) -> tuple[dict[str, Nest], ...]:
    """Return the parts of a mini-batch; one that is whole is a part."""
    if isinstance(batch, InParts):
        return batch.parts
    if isinstance(batch, tuple) and all(isinstance(part, Mapping) for part in batch):
        return tuple(map(dict, batch))
    return (cast("dict[str, Nest]", batch),)  # a user's mistake is refused where it is read


def _taken(
    fields: Mapping[str, Nest], of_leaf: Callable[[tf.Tensor], tf.Tensor]
) -> dict[str, Nest]:
    """Return what a function takes of each tensor, on its device."""

    def taken(leaf: tf.Tensor) -> tf.Tensor:
        with tf.device(leaf.device):
            return of_leaf(leaf)

    return {name: tf.nest.map_structure(taken, value) for name, value in fields.items()}


def take(batch: Mapping[str, Nest], rows: Sequence[int]) -> dict[str, Nest]:
    """Return a few examples of a mini-batch, in this order; no others leave their devices.

    Args:
        batch: name → nest of tensors.
        rows: their numbers.
    """
    taken, order, first = [], [], 0
    for part in of_batch(batch):
        size = num_examples(part)
        places = [place for place, row in enumerate(rows) if first <= row < first + size]
        if places:
            numbers = [rows[place] - first for place in places]
            gather = functools.partial(tf.gather, indices=numbers)
            taken.append(_taken(part, gather))
        order += places
        first += size
    if len(taken) == 1 and order == sorted(order):
        return taken[0]
    return {
        name: tf.nest.map_structure(
            lambda leaf: tf.gather(leaf, tf.argsort(order)),
            micro_batches.merge([part[name] for part in taken]),
        )
        for name in taken[0]
    }


def num_examples(batch: Batch) -> int:
    """Return the number of rows of a mini-batch."""
    return sum(micro_batches.batch_size(part) for part in of_batch(batch))
