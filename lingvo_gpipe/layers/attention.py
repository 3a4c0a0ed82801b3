"""Multi-head attention and a pre-norm Transformer layer, composed of the other layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, composition
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.layers.dense import Dense
from lingvo_gpipe.layers.dropout import Dropout, drop
from lingvo_gpipe.layers.normalization import LayerNorm
from lingvo_gpipe.nests import Nest, SpecNest


class MultiHeadAttention(Layer):
    """x: [B, T, units] → [B, T, units]: softmax(q·k / √head_dim)·v per head.

    It attends to x itself, or with `cross` to a second name, memory [B, S, E]. A last name may be
    a mask, [B, S] or [B, T, S]: where it is 0, nothing is attended to; a position that may attend
    to none attends to all equally. The softmax is float32 at least.

    Children: query, key, value (Dense to heads·head_dim), output (Dense to units). FLOPs: theirs,
    and 2·B·T·S·heads·head_dim for each of the two products; `causal` saves none.
    """

    class Params(Layer.Params):
        units: int = hyperparams.required("Features of x and of the output.")
        heads: int = hyperparams.required("Number of heads.")
        head_dim: int | None = hyperparams.field(None, "Features of a head; None: units / heads.")
        cross: bool = hyperparams.field(False, "Attends to the second name it reads.")
        causal: bool = hyperparams.field(False, "Position t attends to positions up to t alone.")
        dropout: float = hyperparams.field(0.0, "Rate of dropout on the attention shares.")
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
            children = self._projections()
            wide = tf.TensorSpec((batch, length, children["query"].units), self.policy.compute)
            reads = {"query": inputs[0], "key": memory, "value": memory, "output": wide}
            metas = [base.child_meta(self, name, children[name], reads[name]) for name in children]
            output = tf.TensorSpec((batch, length, units), wide.dtype)
            told = base.sum_metas(output, metas)
            products = 2 * 2 * batch * length * span * children["query"].units
            return dataclasses.replace(
                told,
                flops_forward=told.flops_forward + products,
                # Either operand of a product has a gradient, frozen or not.
                flops_backward=told.flops_backward + 2 * products,
                activation_bytes=told.activation_bytes
                + _kept_bytes(self, (batch, self.heads, length, span), wide),
            )

        def _projections(self) -> dict[str, Any]:
            """Return the self of the four children."""
            checks.positive(self, units=self.units, heads=self.heads)
            if self.head_dim is None and self.units % self.heads:
                raise errors.LayerError(
                    f"{base.describe(self)}: {self.heads} heads do not divide {self.units} "
                    "units. Set its field head_dim"
                )
            wide = self.heads * (self.head_dim or self.units // self.heads)
            units = {"query": wide, "key": wide, "value": wide, "output": self.units}
            return {
                name: Dense.Params(units=count, use_bias=self.use_bias)
                for name, count in units.items()
            }

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for name, child in params._projections().items():
            self.add_child(name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        memory = others.pop(0) if self.params.cross else x
        allowed = self._allowed(tf.shape(x)[1], tf.shape(memory)[1], others)
        key, value = self.remember(theta, memory, ctx)
        return self.attend(theta, x, key, value, allowed, ctx)

    def remember(
        self, theta: dict[str, Any], memory: tf.Tensor, ctx: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return keys and values [B, heads, S, head_dim] of what is attended to, [B, S, E]."""
        key, value = (
            self._heads(self.child(name, theta, memory, ctx)) for name in ("key", "value")
        )
        return key, value

    def attend(
        self,
        theta: dict[str, Any],
        x: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        allowed: tf.Tensor | None,
        ctx: Context,
    ) -> tf.Tensor:
        """Return what x [B, T, units] makes of keys and values.

        Args:
            theta: of the layer.
            x: what attends.
            key: see `remember`.
            value: see `remember`.
            allowed: where, broadcastable to [B, heads, T, S]; None: everywhere.
            ctx: of the layer.
        """
        p, policy = self.params, self.policy
        query = self._heads(self.child("query", theta, x, ctx))
        query *= tf.constant(query.shape[-1] ** -0.5, query.dtype)
        scores = precision.cast(tf.matmul(query, key, transpose_b=True), policy.variable)
        if allowed is not None:
            # Finite, so that a row without any position has no NaN.
            scores = tf.where(allowed, scores, tf.constant(-1e9, scores.dtype))
        shares = tf.nn.softmax(scores)
        if ctx.training:
            shares = drop(shares, p.dropout, ctx.seed)
        mixed = tf.matmul(precision.cast(shares, policy.compute), value)
        sides = tf.shape(x)[:2]
        wide = p.heads * mixed.shape[-1]
        joined = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), tf.concat([sides, [wide]], 0))
        return self.child("output", theta, joined, ctx)

    def _heads(self, x: tf.Tensor) -> tf.Tensor:
        """[B, T, heads·head_dim] → [B, heads, T, head_dim]."""
        heads = self.params.heads
        sides = tf.concat([tf.shape(x)[:2], [heads, x.shape[-1] // heads]], 0)
        return tf.transpose(tf.reshape(x, sides), (0, 2, 1, 3))

    def _allowed(
        self, length: tf.Tensor, span: tf.Tensor, masks: list[tf.Tensor]
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


def _check_mask(params: Any, mask: Any, sides: tuple[int, int, int]) -> None:
    batch, length, span = sides
    found = checks.any_shape(params, mask, "[B, ...]", "Its mask is one tensor")
    if found not in ((batch, span), (batch, length, span)):
        raise errors.LayerError(
            f"{base.describe(params)}: mask of shape {list(found)}, expected {[batch, span]} or "
            f"{list(sides)}. Set its field reads, or reshape the mask"
        )


def _kept_bytes(params: Any, scores: tuple[int, ...], wide: tf.TensorSpec) -> int:
    """Return the bytes of attention shares, their dropout, and the joined heads."""
    policy = precision.policy(params.dtype)
    kept = [tf.TensorSpec(scores, policy.variable), wide]
    if policy.compute != policy.variable:
        kept.append(tf.TensorSpec(scores, policy.compute))
    if params.dropout:
        kept += [tf.TensorSpec(scores, tf.bool), tf.TensorSpec(scores, policy.variable)]
    return base.spec_bytes(kept)


class TransformerLayer(Layer):
    """x: [B, T, units] → the same: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Pre-norm self-attention; a second name may be its mask. Children: attention_norm, attention,
    feed_forward_norm, feed_forward (Dense, Dropout, Dense), and dropout after each branch.
    """

    class Params(Layer.Params):
        units: int = hyperparams.required("Features of x and of the output.")
        heads: int = hyperparams.required("Number of attention heads.")
        hidden: int = hyperparams.required("Features in the middle of the feed-forward part.")
        activation: str = hyperparams.field("relu", "Keras activation in its middle.")
        causal: bool = hyperparams.field(False, "Position t attends to positions up to t alone.")
        dropout: float = hyperparams.field(0.0, "Rate after both branches and in the middle.")
        attention_dropout: float = hyperparams.field(0.0, "Rate on the attention shares.")

        def _parts(self) -> dict[str, Any]:
            dropout = Dropout.Params(rate=self.dropout)
            return {
                "attention_norm": LayerNorm.Params(),
                "attention": MultiHeadAttention.Params(
                    units=self.units,
                    heads=self.heads,
                    causal=self.causal,
                    dropout=self.attention_dropout,
                    reads=self.reads,
                ),
                "attention_dropout": dropout,
                "feed_forward_norm": LayerNorm.Params(),
                "feed_forward": composition.Sequential.Params(
                    layers=[
                        Dense.Params(units=self.hidden, activation=self.activation),
                        dropout,
                        Dense.Params(units=self.units),
                    ]
                ),
                "feed_forward_dropout": dropout,
            }

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, mask"))
            x, *mask = inputs
            parts = self._parts()
            metas: list[Meta] = []
            for name in parts:
                others = mask if name == "attention" else []
                value = metas[-1].outputs if metas and not name.endswith("norm") else x
                metas.append(base.child_meta(self, name, parts[name], value, *others))
            output = tf.TensorSpec(x.shape, self.policy.compute)
            return base.sum_metas(output, metas)

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for name, child in params._parts().items():
            self.add_child(name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *mask = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.compute)
        for part in ("attention", "feed_forward"):
            y = self.child(f"{part}_norm", theta, x, ctx)
            given = (y, *mask) if mask and part == "attention" else y
            y = self.child(part, theta, given, ctx)
            x += self.child(f"{part}_dropout", theta, y, ctx)
        return x
