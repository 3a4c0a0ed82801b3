"""Selecting the examples of training and evaluation: pairs, limits of length, mini-batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from lingvo_gpipe import errors
from lingvo_gpipe.console import output
from lingvo_gpipe.tasks.mt.text import batches, mixture
from lingvo_gpipe.tasks.mt.text.batches import BatchPlan, Examples, Units
from lingvo_gpipe.tasks.mt.text.records import Array, Records, Split

if TYPE_CHECKING:
    from lingvo_gpipe.tasks.mt.input import Translation


class BatchPlanner:
    """Plans the mini-batches of an input from its records."""

    def __init__(self, records: Records, params: Translation.Params) -> None:
        self._records = records
        self._params = params

    @functools.cached_property
    def pairs(self) -> tuple[str, ...]:
        """Pairs of languages, such as de:en, in the order of the field `language`.

        Raises:
            InputError: the records lack a pair of the params.
        """
        available = self._records.pairs
        for pair in self._params.pairs:
            if pair not in available:
                near = errors.nearest(pair, available) or available[:3]
                raise errors.InputError(
                    f"{self._records.folder} has no pair {pair!r}; nearest {', '.join(near)}"
                )
        return tuple(self._params.pairs) or available

    def shares(self) -> dict[str, float]:
        """Return the share of each pair of languages in training, by the temperature's formula."""
        sizes = self._training.sizes.tolist()
        shares = mixture.probabilities(sizes, self._params.temperature)
        return dict(zip(self.pairs, map(float, shares), strict=True))

    @functools.lru_cache(maxsize=2)  # noqa: B019 (a planner lives as long as its run)
    def training(self, seed: int) -> BatchPlan:
        """Return the plan of training; the number of dropped examples is logged.

        Raises:
            InputError: no example is left, or `batch_size` is too small for one mini-batch.
        """
        params = self._params
        if params.packing:
            units = batches.packed(
                self._training,
                tokens=params.batch_size,
                length=params.max_length,
                seed=seed,
                multiple_of=params.multiple_of,
            )
        else:
            units = batches.by_length(
                self._training,
                tokens=params.batch_size,
                num_shapes=params.num_shapes,
                multiple_of=params.multiple_of,
            )
        longest = max(shape.length for shape in units.shapes)
        if params.batch_size < (least := params.multiple_of * longest):
            raise errors.InputError(
                f"input.batch_size={params.batch_size} is too small for mini-batches of "
                f"{params.multiple_of} rows (input.multiple_of) of {longest} tokens. Use {least} "
                "or more, or a smaller input.max_length"
            )
        return BatchPlan(
            units,
            temperature=params.temperature,
            seed=seed,
            epoch_examples=params.epoch_examples,
        )

    @functools.lru_cache(maxsize=4)  # noqa: B019 (TensorFlow keeps the generators that use it)
    def evaluation(self, split: str, tokens: int) -> Units:
        """Return the units of an evaluation, all examples of the chosen pairs.

        Args:
            split: name of the split.
            tokens: number of tokens of a mini-batch; one with a very long example may have more.

        Raises:
            InputError: the split has no example.
        """
        examples = self._chosen(self._records.split(split))
        if not len(examples.numbers):
            raise errors.InputError(f"{self._records.folder}: split {split!r} has no examples")
        units = batches.by_length(
            examples,
            tokens=tokens,
            num_shapes=self._params.num_shapes,
            multiple_of=self._params.multiple_of,
        )
        largest = max(units.shapes, key=lambda shape: shape.rows * shape.length)
        if largest.rows * largest.length > tokens:
            output.note(
                f"split {split!r} has an example of {largest.length} tokens: a mini-batch of "
                f"{largest.rows} rows takes {largest.rows * largest.length}, not {tokens}, and "
                "the memory for them"
            )
        return units

    @functools.cached_property
    def _training(self) -> Examples:
        """The examples that are trained on."""
        examples = self._chosen(self._records.split(self._params.train_split))
        kept = self._within_limits(examples.lengths)
        return Examples(
            examples.numbers[kept],
            examples.lengths[kept],
            examples.languages[kept],
            examples.num_languages,
        )

    def _chosen(self, split: Split) -> Examples:
        """Return the examples of the chosen pairs."""
        index = {pair: number for number, pair in enumerate(self.pairs)}
        spans = [span for span in split.spans if span.pair in index]
        numbers = [np.arange(span.first, span.first + span.count) for span in spans]
        languages = [np.full(span.count, index[span.pair]) for span in spans]
        none = np.zeros(0, np.int64)
        chosen = np.concatenate([none, *numbers])
        lengths = split.lengths[chosen] + 1  # with </s>
        return Examples(chosen, lengths, np.concatenate([none, *languages]), len(index))

    def _within_limits(self, lengths: Array) -> Array:
        """Return which examples are within the limits of length; log the number of the others.

        Args:
            lengths: [n, 2], with end tokens.

        Raises:
            InputError: no example is within them.
        """
        params = self._params
        kept = lengths.max(1) <= params.max_length
        long = int((~kept).sum())
        uneven = 0
        if params.max_ratio is not None:
            without_end = lengths - 1
            even = without_end.max(1) <= params.max_ratio * np.maximum(without_end.min(1), 1)
            uneven = int((kept & ~even).sum())
            kept &= even
        if long or uneven:
            logging.warning(
                "left out of %d training examples: %d longer than %d tokens, %d of uneven lengths",
                len(kept),
                long,
                params.max_length,
                uneven,
            )
        if not kept.any():
            raise errors.InputError(
                f"{self._records.folder}: no training example is left: {long} of {len(kept)} are "
                f"longer than input.max_length={params.max_length}, {uneven} of uneven lengths"
            )
        return kept
