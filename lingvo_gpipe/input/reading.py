"""Reading mini-batches one after the other, and what an error of reading says."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.nests import Batch

_Function = TypeVar("_Function", bound=Callable[..., Any])


Repair: TypeAlias = "Callable[[Iterator[Batch], dict[str, int]], Iterator[Batch]]"
"""(mini-batches as read, counts of a `Batches`, which it increases) → whole mini-batches."""


class Reading(abc.ABC):
    """Mini-batches that are read one after the other; an error of reading is a user's mistake.

    Attributes:
        counts: examples that could not be read so far, by what became of them (`replaced`,
            `left_out`); empty where the input allows none.
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
        dataset: dicts of tensors as they are read, before unreadable examples are replaced.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        explain: Callable[[int], str | None],
        repair: Repair | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: dataset of mini-batches.
            explain: returns what is wrong with the batch of a number; None: not known.
            repair: replaces or leaves out examples that cannot be read, and counts them.
            first: position of its first mini-batch; `explain` counts from there.
        """
        super().__init__()
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False  # an iterator's end may wait for it, up to a minute
        self.dataset = dataset.with_options(options)
        self._explain = explain
        self._repair = repair
        self._first = first

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read; unreadable examples are replaced or left out."""
        return self._read() if self._repair is None else self._repair(self._read(), self.counts)

    def _read(self) -> Iterator[Batch]:
        source = iter(self.dataset)
        number = 0
        while True:
            try:
                batch = next(source)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                text = self._explain(number) or plain(error)
                place = self._first + number
                raise errors.InputError(f"mini-batch {place} cannot be read: {text}") from error
            yield batch
            number += 1


def as_written(function: _Function) -> _Function:
    """Keep AutoGraph out of a function of a `tf.data.Dataset`.

    It would convert nothing, and writes each function that it converts to a temporary file, which
    a process that is killed leaves behind.
    """
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


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
