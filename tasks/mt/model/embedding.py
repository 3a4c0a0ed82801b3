"""Embedding of ids and their positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, composite
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.mt.model.incremental_layer import Cache


class TokenEmbedding(core.Composite):
    """ids: [B, T] → [B, T, units]: table · √units plus sinusoidal positions, then dropout.

    If it reads a second name, this holds the positions; otherwise they count from 0 in each row.
    Variable: embedding/table [vocabulary, units].
    """

    class Params(core.Composite.Params):
        vocabulary: int = hyperparams.required("Number of ids.")
        units: int = hyperparams.required("Features of an id.")
        dropout: float = hyperparams.field(0.0, "Rate after the positions are added.")

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`."""
            return {
                "embedding": core.Embedding.Params(
                    vocabulary=self.vocabulary, units=self.units, scale=True
                ),
                "position": core.PositionalEncoding.Params(),
                "dropout": core.Dropout.Params(rate=self.dropout),
            }

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            ids, *position = inputs
            return call("dropout", call("position", call("embedding", ids), *position))

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("ids", "ids, position"))
            checks.any_shape(self, inputs[0], "[B, T]", "It reads ids of sentences")
            return super()._meta(*inputs)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the ids."""
            return {self.reads[0]: base.ValueRange(self.vocabulary, "vocabulary")}

        def _inference(self, available: Collection[str]) -> Self:
            """Count positions from 0 if inference does not provide them."""
            served = self.copy()
            if not set(served.reads[1:]) <= set(available):
                served.reads = served.reads[:1]
            return served

    params: Params
    per_source = ()

    def begin(
        self, theta: Theta, inputs: Nest, rows: int | tf.Tensor, length: int, ctx: core.Context
    ) -> Cache:
        """See `IncrementalLayer.begin`."""
        del theta, inputs, length, ctx
        return {"time": tf.zeros([rows], tf.int32)}

    def extend(
        self, theta: Theta, cache: Cache, inputs: Nest, ctx: core.Context
    ) -> tuple[Nest, Cache]:
        """See `IncrementalLayer.extend`."""
        time = cache["time"]
        x = self.child("embedding", theta, inputs, ctx)
        position = self.children["position"]
        x = position.run({}, (x, time[:, tf.newaxis]), ctx.child("position"))
        return self.child("dropout", theta, x, ctx), {"time": time + 1}
