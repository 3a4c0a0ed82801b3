"""Mini-batches of translation: prepared records, a mixture of languages, padded or packed rows.

Fields (int32 unless told):
    source: [B, T] ids, ending in </s>; 0 is padding.
    target: [B, T] what the decoder reads, beginning with <s>.
    label: [B, T] target shifted by one, ending in </s>.
    weight: [B, T] float32, 1 on real labels, 0 on padding.
    language: [B] index of the row's pair of languages.
Packed rows hold several examples, which are told apart by:
    source_segment, target_segment: [B, T] from 1; 0 is padding.
    source_position, target_position: [B, T] from 0 in each segment.

A row that no example fills has </s> as its source and weighs nothing. </s> is counted in lengths.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import output
from lingvo_gpipe.input import Batches, Input, Program
from lingvo_gpipe.tasks.mt.decoding import search, serving
from lingvo_gpipe.tasks.mt.model import transformer
from lingvo_gpipe.tasks.mt.text import batches, mixture, preparation, records, vocabulary
from lingvo_gpipe.tasks.mt.text.batches import Plan, Planned, Units
from lingvo_gpipe.tasks.mt.text.records import Split

Array = np.ndarray[Any, Any]

_PREFETCH = 4
_TOKEN_FIELDS = ("source", "target", "label")
_PACKED_FIELDS = ("source_segment", "source_position", "target_segment", "target_position")


class Translation(Input):
    """Pairs of sentences from a folder of records.

    Training goes on from any number of mini-batches as if it had never stopped. `batch_size` and
    `eval_batch_size` count the tokens of a mini-batch on either side, padding included, so that
    the number of rows goes with their length. Training keeps to it; in an evaluation, where no
    sentence is too long, `multiple_of` rows may have more.
    """

    asset_names = (records.VOCABULARY, records.TARGET_TOKENS)

    class Params(Input.Params):
        """Fields of Translation."""

        batch_size = 4096
        data_dir: str = hyperparams.required("Folder of records that `prepare` made.")
        preparation: preparation.Preparation.Params | None = hyperparams.field(
            None, "How data_dir is made where it is not there yet; None: it must be there."
        )
        pairs: tuple[str, ...] = hyperparams.field(
            (), "Pairs of languages to train on, such as de:en; empty: all that are there."
        )
        temperature: float = hyperparams.field(
            5.0, "T of the languages' shares, D^(1/T): 1 is proportional, more is more equal."
        )
        max_length: int = hyperparams.field(
            128, "Training examples with more tokens on a side are left out; rows, when packed."
        )
        max_ratio: float | None = hyperparams.field(
            None,
            "Training examples of which one side has more than so many times the tokens of "
            "the other are left out; None: no bound.",
        )
        num_shapes: int = hyperparams.field(
            6, "Shapes of mini-batches at most: each is traced once, and pads less."
        )
        packing: bool = hyperparams.field(
            False, "Puts several examples into a row, which never see each other: one shape."
        )
        multiple_of: int = hyperparams.field(
            1, "Divides the rows of a mini-batch: as many as micro-batches make those equal."
        )
        epoch_examples: int | None = hyperparams.field(
            None, "Examples drawn in an epoch; None: as many as there are."
        )
        train_split: str = hyperparams.field("train", "Part of the data that is trained on.")
        vocabulary_hash: str | None = hyperparams.field(
            None, "Records of any other vocabulary are refused; None: taken from the records."
        )
        records: str | None = hyperparams.field(
            None, "Mark of the records, taken from them; a run that goes on with others is told."
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._recalled: tuple[vocabulary.Vocabulary, bool] | None = None
        for name, least in (("max_length", 2), ("num_shapes", 1), ("multiple_of", 1)):
            value = getattr(params, name)
            if value < least:
                raise errors.InputError(f"input.{name}={value} is too small. Use {least} or more")

    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Tell the fields of the longest mini-batch, from params alone."""
        params = self.params
        tokens = params.batch_size if training else params.eval_batch_size or params.batch_size
        rows = batches.rows_of(tokens, params.max_length, params.multiple_of)
        return _spec(rows, params.max_length, params.packing)

    @functools.cached_property
    def records(self) -> records.Records:
        """The records, prepared where they are not there yet and params say how.

        Raises:
            InputError: they are not there, or were made otherwise, or with another vocabulary.
        """
        folder = os.path.expanduser(self.params.data_dir)
        recipe = self.params.preparation
        if recipe is None:
            found = records.Records(folder)
        else:
            found = recipe.instantiate().run(folder, report=output.note)
        if self.params.vocabulary_hash is not None:
            found.check_vocabulary(self.params.vocabulary_hash)
        return found

    @property
    def vocabulary(self) -> vocabulary.Vocabulary:
        """The run's vocabulary where it was recalled, else the records'."""
        return self.records.vocabulary if self._recalled is None else self._recalled[0]

    @property
    def target_tokens(self) -> bool:
        """Whether sources begin with <2xx>."""
        return self.records.target_tokens if self._recalled is None else self._recalled[1]

    @functools.cached_property
    def pairs(self) -> tuple[str, ...]:
        """Pairs of languages, such as de:en, in the order of the field `language`."""
        there = self.records.pairs
        for pair in self.params.pairs:
            if pair not in there:
                near = errors.nearest(pair, there) or there[:3]
                raise errors.InputError(
                    f"{self.records.folder} has no pair {pair!r}; nearest {', '.join(near)}"
                )
        return tuple(self.params.pairs) or there

    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the endless mini-batches of training from number `position` on."""
        plan = self.plan(seed)
        split = self.records.split(self.params.train_split)
        epoch, _ = plan.locate(position)
        planned_first = plan.epoch(epoch)  # what the run begins with
        full = batches.fill(split.lengths + 1, plan.units, planned_first)
        shapes = plan.units.shapes
        told = ", ".join(f"{shape.rows} x {shape.length}" for shape in shapes)
        output.note(
            f"{len(planned_first)} mini-batches in epoch {epoch}, {1 - full:.1%} of them padding, "
            f"of {len(shapes)} shapes, each traced once: {told}"
        )

        def planned() -> Iterator[Planned]:
            return map(plan.batch, itertools.count(position))

        return self._batches(split, plan.units, planned, position)

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; none is too long here.

        Args:
            split: its name.
            batch_size: tokens of a mini-batch on either side; None: as the params say.
        """
        params = self.params
        tokens = batch_size or params.eval_batch_size or params.batch_size
        units = self._evaluated(split, tokens)
        return self._batches(self.records.split(split), units, lambda: iter(batches.once(units)))

    @functools.lru_cache(maxsize=4)  # noqa: B019 (TensorFlow keeps what a generator holds)
    def _evaluated(self, split: str, tokens: int) -> Units:
        """Return what an evaluation is planned of."""
        found = self.records.split(split)
        numbers, languages = self._chosen(found)
        if not len(numbers):
            raise errors.InputError(f"{self.records.folder}: split {split!r} has no examples")
        units = batches.by_length(
            numbers,
            found.lengths[numbers].max(1) + 1,
            languages,
            len(self.pairs),
            tokens=tokens,
            num_shapes=self.params.num_shapes,
            multiple_of=self.params.multiple_of,
        )
        largest = max(units.shapes, key=lambda shape: shape.rows * shape.length)
        if largest.rows * largest.length > tokens:
            output.note(
                f"split {split!r} has an example of {largest.length} tokens: a mini-batch of "
                f"{largest.rows} rows takes {largest.rows * largest.length}, not {tokens}, and "
                "the memory for them"
            )
        return units

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an input lives as long as its run)
    def plan(self, seed: int) -> Plan:
        """Return the plan of training's mini-batches; what is left out is told in the log.

        Raises:
            InputError: nothing is left to train on, or the least mini-batch is over `batch_size`.
        """
        params = self.params
        split = self.records.split(params.train_split)
        numbers, languages = self._trained
        common = {"tokens": params.batch_size, "multiple_of": params.multiple_of}
        lengths = split.lengths[numbers] + 1
        if params.packing:
            units = batches.packed(
                numbers,
                lengths,
                languages,
                len(self.pairs),
                length=params.max_length,
                seed=seed,
                **common,
            )
        else:
            units = batches.by_length(
                numbers,
                lengths.max(1),
                languages,
                len(self.pairs),
                num_shapes=params.num_shapes,
                **common,
            )
        longest = max(shape.length for shape in units.shapes)
        if params.batch_size < (least := params.multiple_of * longest):
            raise errors.InputError(
                f"input.batch_size={params.batch_size} is too small for mini-batches of "
                f"{params.multiple_of} rows (input.multiple_of) of {longest} tokens. Use {least} "
                "or more, or a smaller input.max_length"
            )
        return Plan(
            units,
            temperature=params.temperature,
            seed=seed,
            epoch_examples=params.epoch_examples,
        )

    def shares(self) -> dict[str, float]:
        """Return the share of each pair of languages in training, by the temperature's formula."""
        _, languages = self._trained
        sizes = np.bincount(languages, minlength=len(self.pairs)).tolist()
        shares = mixture.probabilities(sizes, self.params.temperature)
        return dict(zip(self.pairs, map(float, shares), strict=True))

    def complete(self, task_params: Any) -> None:
        """Give the model the vocabulary's true size, and the languages that it counts apart.

        Of which vocabulary the records are is remembered, or checked; their mark is remembered,
        unless the run was recalled. One pair alone is not counted apart: its numbers are those of
        the whole. A run that was recalled counts no languages.
        """
        layers = task_params.model.layers
        if self.params.packing and not transformer.is_packed(layers):
            raise errors.InputError(
                "input.packing=True puts several sentences into a row, but the model would let "
                "them see each other. Make it with translation_transformer(packed=True), or set "
                "input.packing=False"
            )
        pairs = self.pairs if self._recalled is None else ()
        transformer.set_vocabulary(layers, len(self.vocabulary))
        transformer.set_languages(layers, pairs if len(pairs) > 1 else ())
        task_params.set_path("input.vocabulary_hash", self.vocabulary.hash)
        if self._recalled is None:
            task_params.set_path("input.records", self._mark())

    def constants(self) -> dict[str, float]:
        """Return the shares of the pairs of languages in training."""
        return {f"sampling_share/{pair}": share for pair, share in self.shares().items()}

    def assets(self) -> dict[str, bytes]:
        """Return the vocabulary, a SentencePiece model, and whether sources begin with <2xx>."""
        return {
            records.VOCABULARY: self.vocabulary.proto,
            records.TARGET_TOKENS: f"{self.target_tokens}\n".encode(),
        }

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Take the vocabulary that a run keeps; see `Input.recall`.

        Raises:
            InputError: it is none.
        """
        proto, told = (assets[name] for name in self.asset_names)
        self._recalled = (
            vocabulary.Vocabulary(proto, "the kept vocabulary"),
            told.startswith(b"True"),
        )

    def serving(self, settings: search.Search | None = None) -> Program:
        """Return how an exported model translates: see `serving.program`.

        Args:
            settings: of the search; None: the default ones.
        """
        found = settings or search.Search()
        return serving.program(self.vocabulary, found, self.target_tokens)

    def _mark(self) -> str:
        """Return what tells the records from others: pairs, sentences and tokens of all splits."""
        told = [self.records.manifest[name] for name in ("pairs", "splits")]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def _trained(self) -> tuple[Array, Array]:
        """Numbers of the examples that are trained on, and the index of the pair of each."""
        split = self.records.split(self.params.train_split)
        numbers, languages = self._chosen(split)
        kept = self._kept(split.lengths[numbers])
        return numbers[kept], languages[kept]

    def _chosen(self, split: Split) -> tuple[Array, Array]:
        """Return the numbers of the chosen pairs' examples, and the index of the pair of each."""
        index = {pair: number for number, pair in enumerate(self.pairs)}
        spans = [span for span in split.spans if span.pair in index]
        if not spans:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        numbers = [np.arange(span.first, span.first + span.count) for span in spans]
        languages = [np.full(span.count, index[span.pair]) for span in spans]
        return np.concatenate(numbers), np.concatenate(languages)

    def _kept(self, lengths: Array) -> Array:
        """Tell which examples keep the bounds of length; what is left out is told in the log."""
        params = self.params
        kept = lengths.max(1) + 1 <= params.max_length
        long = int((~kept).sum())
        uneven = 0
        if params.max_ratio is not None:
            even = lengths.max(1) <= params.max_ratio * np.maximum(lengths.min(1), 1)
            uneven = int((kept & ~even).sum())
            kept &= even
        if long or uneven:
            logging.warning(
                "left out of %d training examples: %d longer than %d tokens, %d of uneven sides",
                len(kept),
                long,
                params.max_length,
                uneven,
            )
        if not kept.any():
            raise errors.InputError(
                f"{self.records.folder}: no training example is left: {long} of {len(kept)} are "
                f"longer than input.max_length={params.max_length}, {uneven} uneven"
            )
        return kept

    def _batches(
        self,
        split: Split,
        units: Units,
        planned: Callable[[], Iterator[Planned]],
        first: int = 0,
    ) -> Batches:
        packing = self.params.packing

        def made() -> Iterator[dict[str, Array]]:
            return (arrays(split, units, batch, packing) for batch in planned())

        dataset = tf.data.Dataset.from_generator(
            made, output_signature=_spec(None, None, packing)
        ).prefetch(_PREFETCH)
        return Batches(dataset, lambda _: None, first=first)

    def is_there(self) -> bool:
        """Tell whether the records are there, made as params say; see `Input.is_there`."""
        recipe, wanted = self.params.preparation, self.params.vocabulary_hash
        try:
            found = records.Records(os.path.expanduser(self.params.data_dir))
            if recipe is not None:
                recipe.instantiate().check(found)
            if wanted is not None:
                found.check_vocabulary(wanted)
        except errors.InputError:
            return False
        return True


def arrays(
    split: Split,
    units: Units,
    planned: Planned,
    packing: bool,
) -> dict[str, Array]:
    """Return the fields of a mini-batch.

    Args:
        split: that it is from.
        units: that it was planned of.
        planned: which mini-batch.
        packing: with the fields of packed rows.
    """
    rows, length = planned.shape.rows, planned.shape.length
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields: dict[str, Array] = {name: np.zeros((rows, length), np.int32) for name in names}
    fields["weight"] = np.zeros((rows, length), np.float32)
    fields["language"] = np.zeros(rows, np.int32)
    fields["language"][: len(planned.units)] = units.languages[planned.units]
    fields["source"][len(planned.units) :, 0] = vocabulary.END
    fields["target"][len(planned.units) :, 0] = vocabulary.BEGIN
    for row, unit in enumerate(planned.units):
        read = written = 0
        for segment, number in enumerate(units.of(int(unit)), 1):
            source, target = split.example(int(number))
            ends = (read + len(source) + 1, written + len(target) + 1)
            sides = (slice(read, ends[0]), slice(written, ends[1]))
            own = fields["source"][row, sides[0]]
            own[:-1], own[-1] = source, vocabulary.END
            own = fields["target"][row, sides[1]]
            own[0], own[1:] = vocabulary.BEGIN, target
            own = fields["label"][row, sides[1]]
            own[:-1], own[-1] = target, vocabulary.END
            fields["weight"][row, sides[1]] = 1.0
            if packing:
                for side, where in zip(("source", "target"), sides, strict=True):
                    fields[f"{side}_segment"][row, where] = segment
                    fields[f"{side}_position"][row, where] = np.arange(where.stop - where.start)
            read, written = ends
    return fields


def _spec(rows: int | None, length: int | None, packing: bool) -> dict[str, tf.TensorSpec]:
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields = {name: tf.TensorSpec([rows, length], tf.int32) for name in names}
    fields["weight"] = tf.TensorSpec([rows, length], tf.float32)
    fields["language"] = tf.TensorSpec([rows], tf.int32)
    return fields
