"""An input of which only a part of each mini-batch is used: the examples of one replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe.input.reading import Reading
from lingvo_gpipe.network.parts import Part

if TYPE_CHECKING:
    from lingvo_gpipe.input.base import Input


class InputPart:
    """The part of each mini-batch that one replica computes, cut out of the whole one.

    Attributes:
        whole: the input.
        part: which examples.
    """

    def __init__(self, whole: Input, part: Part) -> None:
        self.whole = whole
        self.part = part

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return its part of the mini-batches of training; see `Input.batches`."""
        return _CutOut(self.whole.batches(seed, position), self.part)

    def evaluation(self, split: str, batch_size: int | None = None) -> Reading:
        """Return its part of the mini-batches of an evaluation; it may have no examples."""
        return _CutOut(self.whole.evaluation(split, batch_size), self.part)


class _CutOut(Reading):
    """Parts of mini-batches that are read whole."""

    is_cut = True

    def __init__(self, whole: Reading, part: Part) -> None:
        super().__init__()
        self._whole = whole
        self._part = part
        self.counts = whole.counts

    def __iter__(self) -> Iterator[dict[str, tf.Tensor]]:
        """Begin to read."""
        return map(self._part.cut, self._whole)
