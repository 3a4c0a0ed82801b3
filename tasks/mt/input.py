"""Mini-batches of translation: prepared records, a mixture of languages, padded or packed rows.

Fields (int32 unless stated otherwise):
    source: [B, T] ids, ending in </s>; 0 is padding.
    target: [B, T] the decoder's input, beginning with <s>.
    label: [B, T] target shifted by one, ending in </s>.
    weight: [B, T] float32, 1 on real labels, 0 on padding.
    language: [B] index of the row's pair of languages.
Packed rows hold several examples, distinguished by two more fields each:
    source_segment, target_segment: [B, T] number of the example, from 1; 0 is padding.
    source_position, target_position: [B, T] from 0 in each segment.

A row without an example has </s> as its source and weight 0. Lengths include </s>.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.console import output
from lingvo_gpipe.input import Batches, Input
from lingvo_gpipe.input.serving import Program
from lingvo_gpipe.tasks.mt.decoding import search, serving
from lingvo_gpipe.tasks.mt.model import transformer
from lingvo_gpipe.tasks.mt.text import batches, preparation, records
from lingvo_gpipe.tasks.mt.text.batches import BatchPlan, Examples, PlannedBatch, Units
from lingvo_gpipe.tasks.mt.text.records import Array, Split
from lingvo_gpipe.tasks.mt.text.vocabulary import BEGIN, END, Vocabulary

if TYPE_CHECKING:
    from lingvo_gpipe import task

_PREFETCH = 4
_TOKEN_FIELDS = ("source", "target", "label")
_PACKED_FIELDS = ("source_segment", "source_position", "target_segment", "target_position")


class Translation(Input):
    """Sentence pairs from a folder of records.

    Training continues after any number of mini-batches as if it had never stopped. `batch_size` and
    `eval_batch_size` are the tokens of a mini-batch in sources and in targets, with padding, so the
    number of rows depends on their length. Training never exceeds them. An evaluation drops no long
    sentence, so it may exceed them with `multiple_of` long rows.
    """

    asset_names: tuple[str, ...] = (records.VOCABULARY, records.TARGET_TOKENS)

    class Params(Input.Params):
        """Fields of Translation."""

        batch_size = hyperparams.field(
            4096,
            "Tokens in a mini-batch of training, in sources and in targets, padding included.",
        )
        eval_batch_size = hyperparams.field(
            None, "Tokens in a mini-batch of evaluation; None: those of training."
        )
        data_dir: str = hyperparams.required("Folder of records, as `prepare` makes them.")
        preparation: preparation.Preparation.Params | None = hyperparams.field(
            None, "How data_dir is made if it does not exist; None: it must exist."
        )
        pairs: tuple[str, ...] = hyperparams.field(
            (), "Pairs of languages to train on, such as de:en; empty: all of the records."
        )
        temperature: float = hyperparams.field(
            5.0, "T of the languages' shares, D^(1/T): 1 is proportional, larger is more equal."
        )
        max_length: int = hyperparams.field(
            128,
            "Training examples with more tokens in source or target are dropped; with packing, the "
            "length of rows.",
        )
        max_ratio: float | None = hyperparams.field(
            None,
            "Training examples in which one sentence has more than this many times the tokens of "
            "the other are dropped; None: no limit.",
        )
        num_shapes: int = hyperparams.field(
            6, "Maximum number of mini-batch shapes. Each is traced once; more mean less padding."
        )
        packing: bool = hyperparams.field(
            False,
            "Several examples share a row, without attending to each other; there is one shape.",
        )
        multiple_of: int = hyperparams.field(
            1, "Divides the rows of a mini-batch: set it to the number of micro-batches."
        )
        train_split: str = hyperparams.field("train", "Part of the data that is trained on.")
        vocabulary_hash: str | None = hyperparams.field(
            None, "Records of another vocabulary are refused; None: filled in from the records."
        )

        def synthetic(self, task_params: task.Task.Params) -> Input.Params:
            """Return params of synthetic sentences; see `Input.Params`."""
            from lingvo_gpipe.tasks.mt import synthetic

            return synthetic.params_like(self, task_params)

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._restored: tuple[Vocabulary, bool] | None = None  # what `recall` received
        for name, least in (("max_length", 2), ("num_shapes", 1), ("multiple_of", 1)):
            value = getattr(params, name)
            if value < least:
                raise errors.InputError(f"input.{name}={value} is too small. Use {least} or more")

    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Return the fields of the longest mini-batch, from params alone."""
        params = self.params
        tokens = params.batch_size if training else params.eval_batch_size or params.batch_size
        rows = batches.rows_of(tokens, params.max_length, params.multiple_of)
        return _specs(rows, params.max_length, params.packing)

    @functools.cached_property
    def records(self) -> records.Records:
        """The records; made first if they do not exist and `preparation` is set.

        Raises:
            InputError: they do not exist, or were made by other params or another vocabulary.
        """
        folder = os.path.expanduser(self.params.data_dir)
        recipe = self.params.preparation
        if recipe is None:
            prepared = records.Records(folder)
        else:
            prepared = recipe.instantiate().run(folder, report=output.note)
        if self.params.vocabulary_hash is not None:
            prepared.check_vocabulary(self.params.vocabulary_hash)
        return prepared

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that `recall` received, else the records'."""
        return self.records.vocabulary if self._restored is None else self._restored[0]

    @property
    def target_tokens(self) -> bool:
        """Whether sources begin with <2xx>."""
        return self.records.target_tokens if self._restored is None else self._restored[1]

    @functools.cached_property
    def pairs(self) -> tuple[str, ...]:
        """Pairs of languages, such as de:en, in the order of the field `language`.

        Raises:
            InputError: the records lack a pair of the params.
        """
        available = self.records.pairs
        for pair in self.params.pairs:
            if pair not in available:
                near = errors.suggestion(pair, available)
                raise errors.InputError(f"{self.records.folder} has no pair {pair!r}; {near}")
        return tuple(self.params.pairs) or available

    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the endless mini-batches of training from number `position` on."""
        plan = self.plan(seed)
        split = self.records.split(self.params.train_split)
        epoch, _ = plan.locate(position)
        shapes = plan.units.shapes
        sizes = ", ".join(f"{shape.rows} x {shape.length}" for shape in shapes)
        output.note(
            f"{len(plan.epoch(epoch))} mini-batches in epoch {epoch}, of {len(shapes)} shapes, "
            f"each traced once: {sizes}"
        )

        def planned() -> Iterator[PlannedBatch]:
            return map(plan.batch, itertools.count(position))

        return self._batches(split, plan.units, planned, position)

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; no length is dropped.

        Args:
            split: its name.
            batch_size: tokens of a mini-batch in sources and in targets; None: as in the params.
        """
        params = self.params
        tokens = batch_size or params.eval_batch_size or params.batch_size
        units = self._evaluated(split, tokens)
        return self._batches(self.records.split(split), units, lambda: iter(batches.once(units)))

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an input lives as long as its run)
    def plan(self, seed: int) -> BatchPlan:
        """Return the plan of training; the number of dropped examples is logged.

        Raises:
            InputError: no example is left, or `batch_size` is too small for one mini-batch.
        """
        params = self.params
        if params.packing:
            units = batches.packed(
                self._trained,
                tokens=params.batch_size,
                length=params.max_length,
                seed=seed,
                multiple_of=params.multiple_of,
            )
        else:
            units = batches.by_length(
                self._trained,
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
        return BatchPlan(units, temperature=params.temperature, seed=seed)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (TensorFlow keeps the generators that use it)
    def _evaluated(self, split: str, tokens: int) -> Units:
        """Return the units of an evaluation, all examples of the chosen pairs."""
        examples = self._chosen(self.records.split(split))
        if not len(examples.numbers):
            raise errors.InputError(f"{self.records.folder}: split {split!r} has no examples")
        return batches.by_length(
            examples,
            tokens=tokens,
            num_shapes=self.params.num_shapes,
            multiple_of=self.params.multiple_of,
        )

    @functools.cached_property
    def _trained(self) -> Examples:
        """The examples that are trained on; the number of the others is logged.

        Raises:
            InputError: no example is within the limits of length.
        """
        params = self.params
        examples = self._chosen(self.records.split(params.train_split))
        lengths = examples.lengths
        short = lengths.max(1) <= params.max_length
        even = np.ones_like(short)
        if params.max_ratio is not None:
            without_end = lengths - 1
            even = without_end.max(1) <= params.max_ratio * np.maximum(without_end.min(1), 1)
        within = short & even
        long, uneven = int((~short).sum()), int((short & ~even).sum())
        if not within.any():
            raise errors.InputError(
                f"{self.records.folder}: no training example is left: {long} of {len(within)} are "
                f"longer than input.max_length={params.max_length}, {uneven} of uneven lengths"
            )
        if long or uneven:
            logging.warning(
                "left out of %d training examples: %d longer than %d tokens, %d of uneven lengths",
                len(within),
                long,
                params.max_length,
                uneven,
            )
        return Examples(
            examples.numbers[within],
            lengths[within],
            examples.languages[within],
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

    def complete(self, task_params: task.Task.Params) -> None:
        """Set the model's vocabulary size and the languages that it counts separately.

        The vocabulary's hash is stored in the params. A single pair is not counted separately,
        because its numbers are the totals. Of a recalled run, the languages are not known: they
        stay as they are.
        """
        layers = task_params.model.layers
        if self.params.packing and not transformer.is_packed(layers):
            raise errors.InputError(
                "input.packing=True puts several sentences into a row, but the model would let "
                "them see each other. Set packed=True in its TranslationTransformer, or set "
                "input.packing=False"
            )
        transformer.set_vocabulary(layers, len(self.vocabulary))
        task_params.set_path("input.vocabulary_hash", self.vocabulary.hash)
        if self._restored is None:
            transformer.set_languages(layers, self.pairs if len(self.pairs) > 1 else ())

    def assets(self) -> dict[str, bytes]:
        """Return the vocabulary, a SentencePiece model, and whether sources begin with <2xx>."""
        return {
            records.VOCABULARY: self.vocabulary.proto,
            records.TARGET_TOKENS: f"{self.target_tokens}\n".encode(),
        }

    def fingerprint(self, split: str | None = None) -> dict[str, str]:
        """Return the vocabulary's hash and one of the records' numbers of sentences and tokens."""
        counts = [self.records.manifest[name] for name in ("pairs", "splits")]
        text = json.dumps(counts, sort_keys=True).encode()
        return {
            **super().fingerprint(split),
            "records": hashlib.sha256(text).hexdigest()[:16],
        }

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Use the vocabulary that a run stored; see `Input.recall`.

        Raises:
            InputError: it is not a vocabulary.
        """
        proto, target_tokens = assets[records.VOCABULARY], assets[records.TARGET_TOKENS]
        self._restored = (
            Vocabulary(proto, "the stored vocabulary"),
            target_tokens.startswith(b"True"),
        )

    def serving(self, settings: search.Search | None = None) -> Program:
        """Return how an exported model translates: see `serving.program`.

        Args:
            settings: settings of the search; None: the defaults.
        """
        return serving.program(self.vocabulary, settings or search.Search(), self.target_tokens)

    def _batches(
        self,
        split: Split,
        units: Units,
        planned: Callable[[], Iterator[PlannedBatch]],
        first: int = 0,
    ) -> Batches:
        packing = self.params.packing
        dataset = tf.data.Dataset.from_generator(
            lambda: (_fields(split, units, batch, packing) for batch in planned()),
            output_signature=_specs(None, None, packing),
        ).prefetch(_PREFETCH)
        return Batches(dataset, first=first)


def _specs(rows: int | None, length: int | None, packing: bool) -> dict[str, tf.TensorSpec]:
    """Return the specs of the fields; with `packing` also those of packed rows."""
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields = {name: tf.TensorSpec([rows, length], tf.int32) for name in names}
    fields["weight"] = tf.TensorSpec([rows, length], tf.float32)
    fields["language"] = tf.TensorSpec([rows], tf.int32)
    return fields


def _fields(split: Split, units: Units, planned: PlannedBatch, packing: bool) -> dict[str, Array]:
    """Return the fields of a mini-batch.

    Args:
        split: split of the examples.
        units: units of the plan.
        planned: the mini-batch.
        packing: whether to include the fields of packed rows.
    """
    rows, length = planned.shape.rows, planned.shape.length
    names = (*_TOKEN_FIELDS, *(_PACKED_FIELDS if packing else ()))
    fields: dict[str, Array] = {name: np.zeros((rows, length), np.int32) for name in names}
    fields["weight"] = np.zeros((rows, length), np.float32)
    fields["language"] = np.zeros(rows, np.int32)
    fields["language"][: len(planned.units)] = units.languages[planned.units]
    fields["source"][len(planned.units) :, 0] = END
    fields["target"][len(planned.units) :, 0] = BEGIN
    for row, unit in enumerate(planned.units):
        source_start = target_start = 0
        for segment, number in enumerate(units.of(int(unit)), 1):
            source, target = split.example(int(number))
            source_end = source_start + len(source) + 1
            target_end = target_start + len(target) + 1
            source_slice = slice(source_start, source_end)
            target_slice = slice(target_start, target_end)
            ids = fields["source"][row, source_slice]
            ids[:-1], ids[-1] = source, END
            ids = fields["target"][row, target_slice]
            ids[0], ids[1:] = BEGIN, target
            ids = fields["label"][row, target_slice]
            ids[:-1], ids[-1] = target, END
            fields["weight"][row, target_slice] = 1.0
            if packing:
                for name, where in (("source", source_slice), ("target", target_slice)):
                    fields[f"{name}_segment"][row, where] = segment
                    fields[f"{name}_position"][row, where] = np.arange(where.stop - where.start)
            source_start, target_start = source_end, target_end
    return fields
