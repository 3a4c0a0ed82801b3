"""The softmax of translation: clipped logits, metrics by language, whole or in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.layers.objectives import heads
from lingvo_gpipe.layers.sliced import slices, softmax
from lingvo_gpipe.nests import Nest, SpecNest


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
    """`SequenceSoftmax` that clips logits in training and can also count by language.

    With `languages` it reads a fourth name: [B], each row's index into `languages`. The metrics
    language_log_perplexity and language_accuracy are vectors with an element for each language; NaN
    means that the language has no token.

    In N slices it is N + 1 layers, as `layers.SlicedSoftmax`: {name}_0, {name}_1, …, and {name}
    (TranslationLoss).
    """

    class Params(ByLanguageParams, core.SequenceSoftmax.Params):
        logit_clip: float | None = hyperparams.field(
            None,
            "Training clips logits to ± this value; beyond it they have no gradient. None: no "
            "clipping.",
        )
        slices: int | tuple[int, ...] = hyperparams.field(
            1, "Number of equal slices of the vocabulary, or the size of each; 1: not sliced."
        )

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            slices.check_whole(self, self.slices)
            self._check_clip()
            meta = core.SequenceSoftmax.Params._meta(self, *inputs[:3])
            return self.with_languages(meta, inputs)

        def slice_sizes(self) -> tuple[int, ...]:
            """Return the number of ids of each slice."""
            return slices.sizes(self, self.slices, self.vocabulary, "vocabulary")

        def consecutive(
            self, layers: Sequence[core.Layer.Params] = ()
        ) -> tuple[core.Layer.Params, ...]:
            """See `Layer.Params`."""
            if self.slices == 1:
                return (self,)
            self._check_clip()
            sizes, loss = self.slice_sizes(), TranslationLoss.Params
            return softmax.softmax_slices(self, sizes, layers, loss, languages=self.languages)

        def _check_clip(self) -> None:
            if self.logit_clip is not None and self.logit_clip <= 0.0:
                raise errors.LayerError(
                    f"{base.describe(self)}: logit_clip={self.logit_clip}. Use more than 0, such "
                    "as 50, or None"
                )

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the ranges of labels and languages."""
            return super().value_ranges() | self.language_range()

        def _inference(self, available: Collection[str]) -> Self:
            """Leave out labels, weights and languages."""
            del available
            return self.copy().set(reads=self.reads[:1], languages=())

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        p = self.params
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        logits = super().fprop(theta, x, ctx)
        if p.logit_clip is not None and ctx.training:
            logits = tf.clip_by_value(logits, -p.logit_clip, p.logit_clip)
        if labels:
            rows = heads.add_loss_and_metrics(p, ctx, logits, tuple(labels[:2]))
            heads.add_log_perplexity(p, ctx, rows)
            p.add_languages(rows, labels, ctx)
        return logits


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
        self, sums: softmax.Sums, labels: tuple[tf.Tensor, ...], ctx: core.Context
    ) -> heads.Rows:
        """See `SlicedLoss`."""
        rows = super().add_loss(sums, labels[:2], ctx)
        self.params.add_languages(rows, labels, ctx)
        return rows


def weighted_mean(sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the means of summed (total, weight); NaN where the weight is 0."""
    return sums["total"] / sums["weight"]
