"""Images that cannot be read: counted, named, and survived up to a share.

What is read fast leaves them out without a word. Here they are noticed by the gaps, looked at one
by one, and replaced in training, where a mini-batch stays a pure function of (seed, position).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.input import Batch

REPLACED, LEFT_OUT = "replaced", "left_out"
_NAMED = 5

# (index, epoch) → the example, or why it is broken. InputError: the params do not fit it.
Careful = Callable[[int, int], dict[str, tf.Tensor] | str]


class Broken:
    """The broken images of one split, as far as they were met."""

    def __init__(
        self, where: str, count: int, max_share: float, name: Callable[[int], str]
    ) -> None:
        """Begin with none.

        Args:
            where: what the split is called.
            count: its examples.
            max_share: of them that may be broken; one always may, unless it is 0.
            name: index → what its file or record is called.
        """
        self._where = where
        self._count = count
        self._max_share = max_share
        self._name = name
        self._reasons: dict[int, str] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._reasons

    def add(self, index: int, reason: str) -> None:
        """Put one down, once; the first are named in the log.

        Raises:
            InputError: there are too many now.
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
                f"{self._name(first)}: {why}. Mend or remove them, or allow more"
            )


def replaced(
    batches: Iterator[Batch],
    counts: dict[str, int],
    broken: Broken,
    careful: Careful,
    count: int,
) -> Iterator[Batch]:
    """Put the next readable index in the place of each that is broken.

    Args:
        batches: fields of the examples that were read, "place" [b] of each in the mini-batch, and
            "index" and "epoch" [B], of all that were wanted.
        counts: `REPLACED` goes up.
        broken: takes them down.
        careful: (index, epoch) → example.
        count: of examples in the split.
    """
    counts.setdefault(REPLACED, 0)
    for batch in batches:
        index, epoch = batch.pop("index"), batch.pop("epoch")
        place = batch.pop("place")
        if place.shape[0] == index.shape[0]:
            yield batch
            continue
        missing = sorted(set(range(len(index))) - set(place.numpy().tolist()))
        found = []
        for number in missing:
            wanted = int(index[number])
            own = _next_readable(wanted, int(epoch[number]), broken, careful, count)
            found.append(own)
            counts[REPLACED] += wanted in broken
        order = np.argsort([*place.numpy().tolist(), *missing])
        with tf.device("CPU:0"):
            yield {
                name: tf.gather(tf.concat([read, tf.stack([o[name] for o in found])], 0), order)
                for name, read in batch.items()
            }


def _next_readable(
    wanted: int, epoch: int, broken: Broken, careful: Careful, count: int
) -> dict[str, tf.Tensor]:
    for further in range(count):
        index = (wanted + further) % count
        if index not in broken:
            example = careful(index, epoch)
            if not isinstance(example, str):
                return example
            broken.add(index, example)
    raise errors.InputError(f"none of the {count} images can be read")


def left_out(
    batches: Iterator[Batch],
    counts: dict[str, int],
    broken: Broken,
    careful: Careful,
    count: int,
) -> Iterator[Batch]:
    """Name and count what is missing between the examples of an evaluation.

    Args:
        batches: fields of the examples that were read, and their "index" [b], rising.
        counts: `LEFT_OUT` goes up.
        broken: takes them down.
        careful: (index, epoch) → example.
        count: of examples in the split.
    """
    counts.setdefault(LEFT_OUT, 0)
    next_index = 0
    # What follows the last batch is a gap as well.
    for batch in _and_then(batches, {"index": tf.constant([count], tf.int64)}):
        rows = batch.pop("index").numpy().tolist()
        late = []
        for index in sorted(set(range(next_index, rows[-1] + 1)) - set(rows)):
            example = careful(index, 0)
            if isinstance(example, str):
                broken.add(index, example)
                counts[LEFT_OUT] += 1
            else:
                late.append(example)  # read at the second try
        next_index = rows[-1] + 1
        if late:
            yield {name: tf.stack([own[name] for own in late]) for name in late[0]}
        if batch:
            yield batch


def _and_then(batches: Iterator[Any], last: Any) -> Iterator[Any]:
    yield from batches
    yield last
