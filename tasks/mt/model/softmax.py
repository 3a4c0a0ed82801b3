"""The softmax of translation: metrics by language, whole or in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, heads, sequence_softmax
from lingvo_gpipe.nests import SpecNest


class ByLanguageParams(heads.LabelledParams):
    """Fields of heads that also count by language."""

    languages: tuple[str, ...] = hyperparams.field(
        (), "Names of the languages that are counted separately."
    )

    def with_languages(self, meta: core.Meta, inputs: Sequence[SpecNest]) -> core.Meta:
        """Return a head's Meta with the metrics of the languages.

        Args:
            meta: without them.
            inputs: what the head reads.

        Raises:
            LayerError: it reads another number of names.
        """
        if len(inputs) == 1 or not self.languages:
            checks.arity(self, tuple(inputs), ("x", "x, label", "x, label, weight"))
            return meta
        checks.arity(self, tuple(inputs), ("x, label, weight, language",))
        names = ("language_log_perplexity", "language_accuracy")
        by_language = tuple(
            core.MetricSpec(self.metric_prefix + name, weighted_mean, labels=self.languages)
            for name in names
        )
        return dataclasses.replace(meta, metrics=(*meta.metrics, *by_language))

    def language_range(self) -> dict[str, base.ValueRange]:
        """Return the range of the languages."""
        if not self.languages or len(self.reads) < 4:
            return {}
        return {self.reads[3]: base.ValueRange(len(self.languages), "languages")}

    def add_languages(
        self, rows: heads.Rows, labels: Sequence[tf.Tensor], ctx: core.Context
    ) -> None:
        """Add the metrics of the languages, if any are counted.

        Args:
            rows: loss and hit of each label.
            labels: label [B, T], weight, and language [B] if languages are counted.
            ctx: to which they are added.
        """
        if not self.languages:
            return
        label, _, language = labels
        languages = tf.broadcast_to(language[:, tf.newaxis], tf.shape(label))
        languages = tf.reshape(languages, (-1,))

        def by_language(value: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(value, languages, len(self.languages))

        count = by_language(rows.weight)
        for name in ("log_perplexity", "accuracy"):
            total = by_language(tf.stop_gradient(getattr(rows, name)) * rows.weight)
            sums = {"total": total, "weight": count}
            ctx.add_sum(f"{self.metric_prefix}language_{name}", sums)


class TranslationSoftmax(core.SequenceSoftmax):
    """`SequenceSoftmax` that can also count by language.

    With `languages` it reads a fourth name: [B], each row's index into `languages`. The metrics
    language_log_perplexity and language_accuracy are vectors with an element for each language; NaN
    means that the language has no token.

    In N slices the last of its layers is a TranslationLoss.
    """

    class Params(ByLanguageParams, core.SequenceSoftmax.Params):
        """Fields of both."""

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            meta = core.SequenceSoftmax.Params._meta(self, *inputs[:3])
            return self.with_languages(meta, inputs)

        def loss_of_slices(self) -> TranslationLoss.Params:
            """See `SequenceSoftmax`."""
            return TranslationLoss.Params(languages=self.languages)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the ranges of labels and languages."""
            return super().value_ranges() | self.language_range()

        def _inference(self) -> Self:
            """Leave out labels, weights and languages."""
            return self.copy().set(reads=self.reads[:1], languages=())

    params: Params

    def add_loss(
        self, logits: tf.Tensor, labels: tuple[tf.Tensor, ...], ctx: core.Context
    ) -> heads.Rows:
        """See `SoftmaxHead`."""
        rows = super().add_loss(logits, labels[:2], ctx)
        self.params.add_languages(rows, labels, ctx)
        return rows


class TranslationLoss(core.SlicedLoss):
    """The loss after the slices of a TranslationSoftmax: `SlicedLoss` that counts by language."""

    class Params(ByLanguageParams, core.SlicedLoss.Params):
        """Fields of both."""

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            meta = core.SlicedLoss.Params._meta(self, *inputs[:3])
            return self.with_languages(meta, inputs)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the ranges of labels and languages."""
            return super().value_ranges() | self.language_range()

    params: Params

    def add_loss(
        self, sums: sequence_softmax.Sums, labels: tuple[tf.Tensor, ...], ctx: core.Context
    ) -> heads.Rows:
        """See `SlicedLoss`."""
        rows = super().add_loss(sums, labels[:2], ctx)
        self.params.add_languages(rows, labels, ctx)
        return rows


def weighted_mean(sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the means of summed (total, weight); NaN where the weight is 0."""
    return sums["total"] / sums["weight"]
