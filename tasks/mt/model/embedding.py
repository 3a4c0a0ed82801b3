"""Embedding of ids and their positions, whole or in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, composite, slices
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.mt.model.incremental_layer import Cache


class EmbeddingPositions(core.Composite):
    """x: [B, T, units] → [B, T, units]: x plus sinusoidal positions, then dropout.

    If it reads a second name, this holds the positions; otherwise they count from 0 in each row.
    """

    class Params(core.Composite.Params):
        dropout: float = hyperparams.field(0.0, "Rate after the positions are added.")

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`."""
            return {
                "position": core.PositionalEncoding.Params(),
                "dropout": core.Dropout.Params(rate=self.dropout),
            }

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            return call("dropout", call("position", *inputs))

        def _inference(self) -> Self:
            """Count positions from 0: in inference each row is one sentence."""
            return self.copy().set(reads=self.reads[:1])

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
        position = self.children["position"]
        x = position.run({}, (inputs, time[:, tf.newaxis]), ctx.child("position"))
        return self.child("dropout", theta, x, ctx), {"time": time + 1}


class TokenEmbedding(EmbeddingPositions):
    """ids: [B, T] → [B, T, units]: table · √units plus sinusoidal positions, then dropout.

    If it reads a second name, this holds the positions; otherwise they count from 0 in each row.
    Variable: embedding/table [vocabulary, units].

    In N slices it is N + 1 layers: {name}_0, {name}_1, … (TokenEmbeddingSlice) hold the table, and
    {name} (EmbeddingPositions) does the rest.
    """

    class Params(slices.SlicedParams, EmbeddingPositions.Params):
        vocabulary: int = hyperparams.required("Number of ids.")
        units: int = hyperparams.required("Features of an id.")

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`."""
            table = core.Embedding.Params(vocabulary=self.vocabulary, units=self.units, scale=True)
            return {"embedding": table, **super().parts()}

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            ids, *position = inputs
            return super().flow(call, call("embedding", ids), *position)

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("ids", "ids, position"))
            checks.any_shape(self, inputs[0], "[B, T]", "It reads ids of sentences")
            return super()._meta(*inputs)

        def in_slices(self, layers: Sequence[core.Layer.Params]) -> tuple[core.Layer.Params, ...]:
            """See `SlicedParams`."""
            total = f"{self.name}_sum"
            table = core.Embedding.Params(
                name=self.name,
                vocabulary=self.vocabulary,
                units=self.units,
                scale=True,
                slices=self.slices,
                reads=self.reads[:1],
                writes=(total,),
                **slices.shared_fields(self, 1.0),
            )
            ties = slices.ties(self, self.slice_sizes(), layers)
            last = EmbeddingPositions.Params(
                name=self.name,
                dropout=self.dropout,
                reads=(total, *self.reads[1:]),
                writes=self.writes,
                **slices.shared_fields(self, 0.0),
            )
            return (*map(_named_as_whole, table.in_slices(layers), ties), last)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the ids."""
            return {self.reads[0]: base.ValueRange(self.vocabulary, "vocabulary")}

    params: Params

    def extend(
        self, theta: Theta, cache: Cache, inputs: Nest, ctx: core.Context
    ) -> tuple[Nest, Cache]:
        """See `IncrementalLayer.extend`."""
        return super().extend(theta, cache, self.child("embedding", theta, inputs, ctx), ctx)


class TokenEmbeddingSlice(core.Composite):
    """ids: [B, T] → [B, T, units]: a slice of TokenEmbedding's table; see `EmbeddingSlice`.

    Variable: embedding/table [rows, units].
    """

    class Params(core.Composite.Params):
        slice: core.EmbeddingSlice.Params = hyperparams.required("The slice.")

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`."""
            return {"embedding": self.slice.copy().set(reads=self.reads)}

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the ids."""
            return self.slice.value_ranges()

    params: Params


def _named_as_whole(
    part: core.EmbeddingSlice.Params, tie: dict[str, str]
) -> TokenEmbeddingSlice.Params:
    """Return a slice whose table has the path of the whole one, below its own name."""
    return TokenEmbeddingSlice.Params(
        name=part.name,
        slice=part.copy().set(name="embedding", cost=None),
        reads=part.reads,
        writes=part.writes,
        tie=tie,
        **slices.shared_fields(part, 1.0),
    )
