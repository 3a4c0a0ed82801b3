"""Layers of sequences: embedding (also in slices), positions, attention, a Transformer layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, composite, slices
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.layers.dense import Dense, Dropout, drop
from lingvo_gpipe.layers.feed_forward import BlockParams
from lingvo_gpipe.nests import Nest, SpecNest

# Standard deviation D^-1/2 for a table [V, D].
TABLE_INIT = "VarianceScaling"
TABLE_INIT_ARGS: dict[str, Any] = {
    "scale": 1.0,
    "mode": "fan_out",
    "distribution": "untruncated_normal",
}


class TableParams(Layer.Params):
    """Fields of an embedding's table."""

    vocabulary: int = hyperparams.required("Number of ids.")
    units: int = hyperparams.required("Features of an id.")
    scale: bool = hyperparams.field(False, "Multiplies by the square root of units.")
    table_init: str = hyperparams.field(TABLE_INIT, "Name of a Keras initializer.")
    table_init_args: dict[str, Any] = hyperparams.field(TABLE_INIT_ARGS, "Its arguments.")

    def table(self, ids: SpecNest, rows: int) -> VariableSpec:
        """Return the spec of the table, or of a slice of it.

        Args:
            ids: spec of the ids that are looked up.
            rows: rows of the table or slice.

        Raises:
            LayerError: the ids are not integers, or the initializer does not fit.
        """
        checks.positive(self, vocabulary=self.vocabulary, units=self.units, rows=rows)
        shape = checks.any_shape(self, ids, "[...]", "Read the field that holds the ids")
        if not ids.dtype.is_integer:
            raise errors.LayerError(
                f"{base.describe(self)}: expected integer ids, got {ids.dtype.name} "
                f"{list(shape)}. Read the field that holds the ids"
            )
        shapes = (self.vocabulary, self.units), (rows, self.units)
        name, arguments = slices.initializer(self, self.table_init, self.table_init_args, shapes)
        variable = self.policy.variable
        return VariableSpec(
            "table",
            (rows, self.units),
            variable,
            base.initializer(name, **arguments),
            compute=variable,
            # Each id has its row in one slice: a slice counts its share of the ids.
            gradient_rows=-(-math.prod(shape) * rows // self.vocabulary),
        )

    def value_ranges(self) -> dict[str, base.ValueRange]:
        """Return the range of the ids."""
        return {self.reads[0]: base.ValueRange(self.vocabulary, "vocabulary")}

    def scaled(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows of the table times √units, if `scale`."""
        return rows * tf.constant(math.sqrt(self.units), rows.dtype) if self.scale else rows


class Embedding(Layer):
    """ids: [...] integer in [0, vocabulary) → [..., units] in the compute dtype.

    Variable: table [vocabulary, units], which is read in the master dtype: the rows are cast, not
    the table, and gradients of a row that is read often are summed in the table's dtype. An id
    outside is refused before the step (`Analysis.check_values`). FLOPs: 0.

    In N slices it is the layers {name}_0, {name}_1, … (EmbeddingSlice), each with the rows of
    consecutive ids. Initial values are distributed as those of one table.
    """

    class Params(slices.SlicedParams, TableParams):
        """Fields of a table, and its slices."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            table = self.table(inputs[0], self.vocabulary)
            output = tf.TensorSpec((*inputs[0].shape, self.units), self.policy.compute)
            return Meta(output, (table,), activation_bytes=base.spec_bytes(output))

        def in_slices(self, layers: Sequence[Layer.Params]) -> tuple[EmbeddingSlice.Params, ...]:
            """See `SlicedParams`; the last slice multiplies the sum by √units if `scale`."""
            sizes, running = self.slice_sizes(), f"{self.name}_sum"
            fields = slices.fields_of_slices(self, layers, self.reads[:1], running, self.writes)
            parts = tuple(
                EmbeddingSlice.Params(
                    vocabulary=self.vocabulary,
                    units=self.units,
                    table_init=self.table_init,
                    table_init_args=self.table_init_args,
                    first=first,
                    rows=size,
                    **each,
                )
                for first, size, each in zip(slices.firsts(sizes), sizes, fields, strict=True)
            )
            parts[-1].scale = self.scale
            return parts

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        rows = tf.gather(theta["table"], checks.as_ids(inputs))
        return self.params.scaled(precision.cast(rows, self.policy.compute))


class EmbeddingSlice(Layer):
    """ids: [...] integer → [..., units] in the compute dtype: rows of its ids, zeros for others.

    It adds a second name that it reads, sum: [..., units]. One id has its row in one slice, so the
    sum is exact. With `scale` it multiplies the sum.

    Variable: table [rows, units], read in the master dtype as that of an Embedding. FLOPs: 0.
    """

    class Params(TableParams):
        first: int = hyperparams.required("The first id that it holds.")
        rows: int = hyperparams.required("Number of ids that it holds.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("ids", "ids, sum"))
            table, shape = self.table(inputs[0], self.rows), inputs[0].shape
            output = tf.TensorSpec((*shape, self.units), self.policy.compute)
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
        is_inside, places = slices.inside(ids, p.first, p.rows)
        rows = precision.cast(tf.gather(theta["table"], places), self.policy.compute)
        rows = tf.where(is_inside[..., tf.newaxis], rows, tf.zeros([], rows.dtype))
        for total in before:
            rows += precision.cast(total, rows.dtype)
        return p.scaled(rows)


class PositionalEncoding(Layer):
    """x: [B, T, D] floating → [B, T, D] in the compute dtype: x + sin and cos of t.

    Wavelengths go from 2π to 2π·10,000. The first half of D are sines, the second cosines
    (Lingvo's and tensor2tensor's order of Vaswani et al. 2017, section 3.5); an odd last feature
    gets 0. t counts from 0; a second name it reads, position: [B, T] integer, replaces it.
    FLOPs: 0.
    """

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, position"))
            shape = checks.shape(self, inputs[0], "[B, T, D]", "Put an Embedding before it")
            for position in inputs[1:]:
                positions = checks.any_shape(self, position, "[B, T]", "Set its field reads")
                if positions != shape[:2] or not position.dtype.is_integer:
                    raise errors.LayerError(
                        f"{base.describe(self)}: position is {position.dtype.name} "
                        f"{list(positions)}, expected integers {list(shape[:2])}. Set its field "
                        "reads"
                    )
            return Meta(tf.TensorSpec(shape, self.policy.compute))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        policy = self.policy
        x, *position = inputs if isinstance(inputs, tuple) else (inputs,)
        depth = x.shape[-1]
        half = depth // 2
        slowest = math.log(10_000.0)
        rates = [math.exp(-slowest * i / max(half - 1, 1)) for i in range(half)]
        times = position[0] if position else tf.range(base.sizes(x)[1])[tf.newaxis]
        times = tf.cast(times, policy.variable)
        angles = times[..., tf.newaxis] * tf.constant(rates, policy.variable)
        waves = tf.concat([tf.sin(angles), tf.cos(angles)], -1)
        waves = tf.pad(waves, [[0, 0], [0, 0], [0, depth - 2 * half]])
        return precision.cast(x, policy.compute) + precision.cast(waves, policy.compute)


class MultiHeadAttention(composite.Composite):
    """x: [B, T, units] floating → [B, T, units]: softmax(q·k / √head_dim)·v per head.

    It attends to x itself, or with `cross` to a second name, memory: [B, S, E] floating. A last
    name may be a mask: [B, S] or [B, T, S] of any dtype; positions where it is 0 are not attended
    to, and a row without any other position attends to all equally. The output has the compute
    dtype, the softmax is float32 at least.

    Children: query, key, value (Dense to heads·head_dim), output (Dense to units). FLOPs: theirs,
    and 2·B·T·S·heads·head_dim for each of the two products; `causal` saves none.
    """

    class Params(composite.Composite.Params):
        units: int = hyperparams.required("Features of x and of the output.")
        heads: int = hyperparams.required("Number of heads.")
        head_dim: int | None = hyperparams.field(None, "Features of a head; None: units / heads.")
        cross: bool = hyperparams.field(False, "Attends to the second name it reads.")
        causal: bool = hyperparams.field(False, "Position t attends to positions up to t alone.")
        dropout: float = hyperparams.field(0.0, "Rate of dropout on the attention weights.")
        use_bias: bool = hyperparams.field(True, "Biases of all four projections.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            forms = ("x, memory", "x, memory, mask") if self.cross else ("x", "x, mask")
            checks.arity(self, inputs, forms)
            batch, length, units = checks.shape(self, inputs[0], "[B, T, D]", "Embed before it")
            memory = inputs[1] if self.cross else inputs[0]
            rows, span, _ = checks.shape(self, memory, "[B, S, E]", "Its memory is a sequence")
            if units != self.units or rows != batch:
                raise errors.LayerError(
                    f"{base.describe(self)}: x of shape {[batch, length, units]} and memory of "
                    f"{memory.shape.as_list()}, expected [{batch}, T, {self.units}] and "
                    f"[{batch}, S, E]. Set its field units, or project x before"
                )
            if len(inputs) == len(forms[-1].split(",")):
                _check_mask(self, inputs[-1], (batch, length, span))
            checks.share(self, "dropout", self.dropout)
            wide = tf.TensorSpec((batch, length, self.projected_units()), self.policy.compute)
            call = composite.SpecCalls(self)
            call("query", inputs[0])
            call("key", memory)
            call("value", memory)
            meta = call.meta(call("output", wide))
            products = 2 * 2 * batch * length * span * wide.shape[-1]
            return dataclasses.replace(
                meta,
                flops_forward=meta.flops_forward + products,
                # Either operand of a product has a gradient, frozen or not.
                flops_backward=meta.flops_backward + 2 * products,
                activation_bytes=meta.activation_bytes
                + _kept_bytes(self, (batch, self.heads, length, span), wide),
            )

        def projected_units(self) -> int:
            """Return the features of all heads together.

            Raises:
                LayerError: the heads do not divide `units`, and `head_dim` is not set.
            """
            checks.positive(self, units=self.units, heads=self.heads)
            if self.head_dim is None and self.units % self.heads:
                raise errors.LayerError(
                    f"{base.describe(self)}: {self.heads} heads do not divide {self.units} "
                    "units. Set its field head_dim"
                )
            return self.heads * (self.head_dim or self.units // self.heads)

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            wide = self.projected_units()
            units = {"query": wide, "key": wide, "value": wide, "output": self.units}
            return {
                name: Dense.Params(units=count, use_bias=self.use_bias)
                for name, count in units.items()
            }

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        memory = others.pop(0) if self.params.cross else x
        allowed = self._allowed(base.sizes(x)[1], base.sizes(memory)[1], others)
        key, value = self.remember(theta, memory, ctx)
        return self.attend(theta, x, key, value, allowed, ctx)

    def remember(
        self, theta: Theta, memory: tf.Tensor, ctx: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return keys and values [B, heads, S, head_dim] of the attended sequence [B, S, E]."""
        key, value = (
            self._heads(self.child(name, theta, memory, ctx)) for name in ("key", "value")
        )
        return key, value

    def attend(
        self,
        theta: Theta,
        x: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        allowed: tf.Tensor | None,
        ctx: Context,
    ) -> tf.Tensor:
        """Return the attention of x to keys and values, [B, T, units].

        Args:
            theta: theta of the layer.
            x: [B, T, units], the positions that attend.
            key: [B, heads, S, head_dim]; see `remember`.
            value: [B, heads, S, head_dim].
            allowed: where x may attend, broadcastable to [B, heads, T, S]; None: everywhere.
            ctx: context of the layer.
        """
        p, policy = self.params, self.policy
        query = self._heads(self.child("query", theta, x, ctx))
        query *= tf.constant(query.shape[-1] ** -0.5, query.dtype)
        scores = precision.cast(tf.matmul(query, key, transpose_b=True), policy.variable)
        if allowed is not None:
            # Finite, so that a row without any position has no NaN.
            scores = tf.where(allowed, scores, tf.constant(-1e9, scores.dtype))
        weights = tf.nn.softmax(scores)
        if ctx.training:
            weights = drop(weights, p.dropout, ctx)
        mixed = tf.matmul(precision.cast(weights, policy.compute), value)
        wide = p.heads * mixed.shape[-1]
        joined = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), [*base.sizes(x)[:2], wide])
        return self.child("output", theta, joined, ctx)

    def _heads(self, x: tf.Tensor) -> tf.Tensor:
        """[B, T, heads·head_dim] → [B, heads, T, head_dim]."""
        heads = self.params.heads
        *outer, wide = base.sizes(x)
        return tf.transpose(tf.reshape(x, [*outer, heads, wide // heads]), (0, 2, 1, 3))

    def _allowed(
        self, length: base.Size, span: base.Size, masks: list[tf.Tensor]
    ) -> tf.Tensor | None:
        """Return where scores [B, N, T, S] count, broadcastable; None: everywhere."""
        allowed = None
        if self.params.causal:
            allowed = tf.range(span) <= tf.range(length)[:, tf.newaxis]
        for mask in masks:
            present = tf.cast(mask, tf.bool)
            present = (
                present[:, tf.newaxis, tf.newaxis]
                if mask.shape.rank == 2
                else present[:, tf.newaxis]
            )
            allowed = present if allowed is None else allowed & present
        return allowed


def _check_mask(
    params: MultiHeadAttention.Params, mask: SpecNest, scores: tuple[int, int, int]
) -> None:
    """Check a mask's shape against that of the scores, [B, T, S]."""
    batch, _, span = scores
    shape = checks.any_shape(params, mask, "[B, ...]", "Its mask is one tensor")
    if shape not in ((batch, span), scores):
        raise errors.LayerError(
            f"{base.describe(params)}: mask of shape {list(shape)}, expected {[batch, span]} or "
            f"{list(scores)}. Set its field reads, or reshape the mask"
        )


def _kept_bytes(
    params: MultiHeadAttention.Params, scores: tuple[int, ...], wide: tf.TensorSpec
) -> int:
    """Return the bytes of attention weights, their dropout, and the joined heads."""
    policy = params.policy
    kept = [tf.TensorSpec(scores, policy.variable), wide]
    if policy.compute != policy.variable:
        kept.append(tf.TensorSpec(scores, policy.compute))
    if params.dropout:
        kept += [tf.TensorSpec(scores, tf.bool), tf.TensorSpec(scores, policy.variable)]
    return base.spec_bytes(kept)


class TransformerLayer(composite.Composite):
    """x: [B, T, units] floating → [B, T, units] in the compute dtype.

    x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm self-attention. A second name
    may be its mask, [B, T] or [B, T, T]. Children: attention_norm, attention, feed_forward_norm,
    feed_forward (Dense, Dropout, Dense), and dropout after each branch. The feed-forward part may
    be in slices; see `BlockParams`.
    """

    class Params(BlockParams):
        activation: str = hyperparams.field("relu", "Keras activation in the feed-forward part.")
        causal: bool = hyperparams.field(False, "Position t attends to positions up to t alone.")

        @property
        def branches(self) -> tuple[str, ...]:
            """See `BlockParams`."""
            return ("attention", "feed_forward")

        def branch(self, name: str) -> Layer.Params:
            """See `BlockParams`."""
            if name == "attention":
                return MultiHeadAttention.Params(
                    units=self.units,
                    heads=self.heads,
                    causal=self.causal,
                    dropout=self.attention_dropout,
                    reads=self.reads,
                )
            return composite.Sequential.Params(
                layers=[
                    Dense.Params(units=self.hidden, activation=self.activation),
                    Dropout.Params(rate=self.dropout),
                    Dense.Params(units=self.units),
                ]
            )

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, *mask = inputs
            return super().flow(call, x, mask, ())

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, mask"))
            return super()._meta(*inputs)

    params: Params
