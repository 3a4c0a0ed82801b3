"""An embedding in slices: each returns the rows that it holds, and a running sum adds them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe.layers import base, checks, sequence
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.layers.sliced import slices
from lingvo_gpipe.nests import Nest, SpecNest


class EmbeddingSlice(Layer):
    """ids: [...] integer → [..., units] in the compute dtype: rows of its ids, zeros for others.

    It adds a second name that it reads, sum: [..., units]. One id has its row in one slice, so the
    sum is exact. With `scale` it multiplies the sum.

    Variable: table [rows, units], read in the master dtype as that of an Embedding. FLOPs: 0.
    """

    class Params(sequence.Embedding.Params):
        first: int = hyperparams.required("The first id that it holds.")
        rows: int = hyperparams.required("Number of ids that it holds.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("ids", "ids, sum"))
            checks.positive(self, rows=self.rows, units=self.units)
            shape = self.ids_shape(inputs[0])
            policy = self.policy
            wanted = ((self.vocabulary, self.units), (self.rows, self.units))
            name, arguments = slices.initializer(
                self, self.table_init, self.table_init_args, wanted
            )
            table = VariableSpec(
                "table",
                wanted[1],
                policy.variable,
                base.initializer(name, **arguments),
                compute=policy.variable,
                # Each id has its row in one slice, so the slices share out those of one table.
                gradient_rows=-(-math.prod(shape) * self.rows // self.vocabulary),
            )
            output = tf.TensorSpec((*shape, self.units), policy.compute)
            mask = tf.TensorSpec(shape, tf.bool)
            return Meta(output, (table,), activation_bytes=base.spec_bytes([output, mask]))

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the ids of all slices, once."""
            return {} if self.first else super().value_ranges()

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        p = self.params
        ids, *before = inputs if isinstance(inputs, tuple) else (inputs,)
        found, places = slices.inside(ids, p.first, p.rows)
        rows = precision.cast(tf.gather(theta["table"], places), self.policy.compute)
        rows = tf.where(found[..., tf.newaxis], rows, tf.zeros([], rows.dtype))
        for total in before:
            rows += precision.cast(total, rows.dtype)
        if p.scale:
            rows *= tf.constant(math.sqrt(p.units), rows.dtype)
        return rows


class SlicedEmbedding(slices.Sliced):
    """ids: [...] integer in [0, vocabulary) → [..., units] in the compute dtype, as an Embedding.

    Layers: {name}_0, {name}_1, … (EmbeddingSlice), each with the rows of consecutive ids; the last
    one multiplies by √units if `scale`. Initial values are distributed as those of one table.
    """

    class Params(slices.Sliced.Params, sequence.Embedding.Params):
        """Fields of an Embedding, and its slices."""

        def slice_sizes(self) -> tuple[int, ...]:
            """Return the number of ids of each slice."""
            return slices.sizes(self, self.slices, self.vocabulary, "vocabulary")

        def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
            """See `Layer.Params`."""
            sizes = self.slice_sizes()
            ties = slices.ties(self, sizes, layers)
            return embedding_slices(self, sizes, ties, self.writes)

    params: Params


def embedding_slices(
    params: Layer.Params,
    sizes: tuple[int, ...],
    ties: Sequence[dict[str, str]],
    writes: tuple[str, ...],
) -> tuple[EmbeddingSlice.Params, ...]:
    """Return the slices of an embedding.

    Args:
        params: params of the embedding; the first name that it reads holds the ids.
        sizes: number of ids of each slice.
        ties: field `tie` of each.
        writes: what the last one writes.
    """
    fields: dict[str, Any] = {
        name: params.get(name) for name in ("vocabulary", "units", "table_init", "table_init_args")
    }
    names, running = slices.names(params, len(sizes)), f"{params.name}_sum"
    last = len(sizes) - 1
    return tuple(
        EmbeddingSlice.Params(
            name=names[number],
            first=first,
            rows=size,
            scale=number == last and params.get("scale"),
            reads=(params.reads[0], running) if number else (params.reads[0],),
            writes=writes if number == last else (running,),
            tie=ties[number],
            **fields,
            **slices.shared_fields(params, size / sum(sizes)),
        )
        for number, (first, size) in enumerate(zip(slices.firsts(sizes), sizes, strict=True))
    )
