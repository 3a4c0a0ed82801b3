"""Images that cannot be read: counted, reported, and tolerated up to a share.

The fast reader skips them silently. The functions here find the gaps, read each missing example
alone, and replace the broken ones in training, so that a mini-batch stays a pure function of (seed,
position).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.input import Batch

REPLACED, LEFT_OUT = "replaced", "left_out"
_NAMED = 5

# (index, epoch) → the example, or why it is broken. Raises InputError where the Params are wrong.
ReadOne: TypeAlias = "Callable[[int, int], dict[str, tf.Tensor] | str]"


class Broken:
    """The broken images of one split that were found so far."""

    def __init__(
        self, where: str, count: int, max_share: float, name: Callable[[int], str]
    ) -> None:
        """Start with none.

        Args:
            where: name of the split in messages.
            count: number of its examples.
            max_share: share of them that may be broken; above 0, one always may.
            name: index → name of its file or record.
        """
        self._where = where
        self._count = count
        self._max_share = max_share
        self._name = name
        self._reasons: dict[int, str] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._reasons

    def add(self, index: int, reason: str) -> None:
        """Record a broken image, once; the first ones are named in the log.

        Raises:
            InputError: there are too many.
        """
        if index in self._reasons:
            return
        self._reasons[index] = reason
        number = len(self._reasons)
        if number <= _NAMED:
            logging.warning("broken image %s: %s", self._name(index), reason)
        if number == _NAMED:
            logging.warning("further broken images of %s are counted only", self._where)
        if number > math.ceil(self._max_share * self._count):
            first, why = next(iter(self._reasons.items()))
            raise errors.InputError(
                f"{self._where}: at least {number} of {self._count} images cannot be read, more "
                f"than input.max_broken_share={self._max_share:g} allows; the first is "
                f"{self._name(first)}: {why}. Repair or remove them, or allow more"
            )


def replaced(
    batches: Iterator[Batch],
    counts: dict[str, int],
    broken: Broken,
    read_one: ReadOne,
    count: int,
) -> Iterator[Batch]:
    """Replace each broken example by the next readable one.

    Args:
        batches: fields of the examples that were read, their "place" [b] in the mini-batch, and
            "index" and "epoch" [B] of all examples of the mini-batch.
        counts: `REPLACED` is counted here.
        broken: records them.
        read_one: (index, epoch) → example.
        count: number of examples in the split.
    """
    counts.setdefault(REPLACED, 0)
    for batch in batches:
        index, epoch = batch.pop("index"), batch.pop("epoch")
        place = batch.pop("place")
        if place.shape[0] == index.shape[0]:
            yield batch
            continue
        missing = sorted(set(range(len(index))) - set(place.numpy().tolist()))
        others = []
        for number in missing:
            wanted = int(index[number])
            others.append(_next_readable(wanted, int(epoch[number]), broken, read_one, count))
            counts[REPLACED] += wanted in broken
        order = np.argsort([*place.numpy().tolist(), *missing])
        with tf.device("CPU:0"):
            yield {
                name: tf.gather(
                    tf.concat([read, tf.stack([other[name] for other in others])], 0), order
                )
                for name, read in batch.items()
            }


def _next_readable(
    wanted: int, epoch: int, broken: Broken, read_one: ReadOne, count: int
) -> dict[str, tf.Tensor]:
    for further in range(count):
        index = (wanted + further) % count
        if index not in broken:
            example = read_one(index, epoch)
            if not isinstance(example, str):
                return example
            broken.add(index, example)
    raise errors.InputError(f"none of the {count} images can be read")


def left_out(
    batches: Iterator[Batch],
    counts: dict[str, int],
    broken: Broken,
    read_one: ReadOne,
    count: int,
) -> Iterator[Batch]:
    """Report and count the examples that are missing in an evaluation.

    Args:
        batches: fields of the examples that were read, and their "index" [b], ascending.
        counts: `LEFT_OUT` is counted here.
        broken: records them.
        read_one: (index, epoch) → example.
        count: number of examples in the split.
    """
    counts.setdefault(LEFT_OUT, 0)
    next_index = 0
    # An end marker, so that a gap after the last batch is found too.
    end: Batch = {"index": tf.constant([count], tf.int64)}
    for batch in itertools.chain(batches, [end]):
        rows = batch.pop("index").numpy().tolist()
        late = []
        for index in sorted(set(range(next_index, rows[-1] + 1)) - set(rows)):
            example = read_one(index, 0)
            if isinstance(example, str):
                broken.add(index, example)
                counts[LEFT_OUT] += 1
            else:
                late.append(example)  # readable at the second attempt
        next_index = rows[-1] + 1
        if late:
            yield {name: tf.stack([example[name] for example in late]) for name in late[0]}
        if batch:
            yield batch
