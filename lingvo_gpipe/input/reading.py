"""Reading mini-batches one after the other, whole or in parts; what an error of reading says."""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.nests import Batch
from lingvo_gpipe.network.parts import ReplicaPart


class Reading(abc.ABC):
    """Mini-batches that are read one after the other; an error of reading is a user's mistake.

    Attributes:
        counts: number of examples that could not be read so far, by what became of them (`replaced`
            in training, `left_out` in evaluation); empty: all could be read.
        is_cut: whether it returns parts of mini-batches that are read whole; the counts are theirs.
    """

    is_cut = False

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Mapping[str, tf.Tensor]]:
        """Begin to read."""


class Batches(Reading):
    """Mini-batches of a `tf.data.Dataset`.

    Attributes:
        dataset: dicts of tensors.
    """

    def __init__(self, dataset: tf.data.Dataset, *, first: int = 0) -> None:
        """Wrap `dataset`.

        Args:
            dataset: dataset of mini-batches.
            first: position of its first mini-batch, from which errors count.
        """
        super().__init__()
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False  # an iterator's end may wait for it, up to a minute
        self.dataset = dataset.with_options(options)
        self._first = first

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read."""
        source = iter(self.dataset)
        position = self._first
        while True:
            try:
                batch = next(source)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                raise errors.InputError(
                    f"mini-batch {position} cannot be read: {plain(error)}"
                ) from error
            yield batch
            position += 1


class CutOut(Reading):
    """The part of each mini-batch that one replica computes, cut out of the whole one.

    A part of the last mini-batch of an evaluation may have no examples.
    """

    is_cut = True

    def __init__(self, whole: Reading, part: ReplicaPart) -> None:
        """Cut `part` out of the mini-batches of `whole`."""
        super().__init__()
        self._whole = whole
        self._part = part
        self.counts = whole.counts

    def __iter__(self) -> Iterator[dict[str, tf.Tensor]]:
        """Begin to read."""
        return map(self._part.cut, self._whole)


# What TensorFlow says about its graphs, before and after the message itself.
_ABOUT_GRAPHS = re.compile(
    r"Graph execution error:|Detected at node |  File |<stack tr|\s*\[\[|\s*$"
)
_PREFIX = re.compile(r"Error in user-defined function passed to .*? with iterator: \S+: ")
_ASSERTION = re.compile(r"assertion failed: \[(.*?)\].*")


def plain(error: tf.errors.OpError) -> str:
    """Return the line of TensorFlow's message that says what is wrong."""
    lines = [line for line in error.message.splitlines() if not _ABOUT_GRAPHS.match(line)]
    line = errors.without_graph_names((lines or [error.message.strip()])[0])
    return _ASSERTION.sub(r"\1", _PREFIX.sub("", line)).strip().rstrip(".")
