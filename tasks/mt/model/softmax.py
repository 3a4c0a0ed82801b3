"""The softmax of translation: clipped logits, and metrics by language."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, heads
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest


class TranslationSoftmax(core.SequenceSoftmax):
    """`SequenceSoftmax` that clips logits in training and can also count by language.

    With `languages` it reads a fourth name: [B], each row's index into `languages`. The metrics
    language_log_perplexity and language_accuracy are vectors with an element for each language; NaN
    means that the language has no token.
    """

    class Params(core.SequenceSoftmax.Params):
        logit_clip: float | None = hyperparams.field(
            None,
            "Training clips logits to ± this value; beyond it they have no gradient. None: no "
            "clipping.",
        )
        languages: tuple[str, ...] = hyperparams.field(
            (), "Names of the languages that are counted separately."
        )

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            if self.logit_clip is not None and self.logit_clip <= 0.0:
                raise errors.LayerError(
                    f"{base.describe(self)}: logit_clip={self.logit_clip}. Use more than 0, such "
                    "as 50, or None"
                )
            meta = super()._meta(*inputs[:3])
            if len(inputs) == 1 or not self.languages:
                checks.arity(self, inputs, ("x", "x, label", "x, label, weight"))
                return meta
            checks.arity(self, inputs, ("x, label, weight, language",))
            names = ("language_log_perplexity", "language_accuracy")
            by_language = tuple(
                core.MetricSpec(self.metric_prefix + name, weighted_mean, labels=self.languages)
                for name in names
            )
            return dataclasses.replace(meta, metrics=(*meta.metrics, *by_language))

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the ranges of labels and languages."""
            ranges = super().value_ranges()
            if self.languages and len(self.reads) > 3:
                ranges[self.reads[3]] = base.ValueRange(len(self.languages), "languages")
            return ranges

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
            if p.languages:
                self._count_by_language(rows, labels[0], labels[2], ctx)
        return logits

    def _count_by_language(
        self, rows: heads.Rows, label: tf.Tensor, language: tf.Tensor, ctx: core.Context
    ) -> None:
        languages = tf.broadcast_to(language[:, tf.newaxis], tf.shape(label))
        languages = tf.reshape(languages, (-1,))

        def by_language(value: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(value, languages, len(self.params.languages))

        count = by_language(rows.weight)
        for name in ("log_perplexity", "accuracy"):
            total = by_language(tf.stop_gradient(getattr(rows, name)) * rows.weight)
            sums = {"total": total, "weight": count}
            ctx.add_sum(f"{self.params.metric_prefix}language_{name}", sums)


def weighted_mean(sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the means of summed (total, weight); NaN where the weight is 0."""
    return sums["total"] / sums["weight"]
