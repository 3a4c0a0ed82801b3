"""Decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import checks, composite
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.mt.model.block import Block
from lingvo_gpipe.tasks.mt.model.incremental_layer import Cache
from lingvo_gpipe.tasks.mt.model.mixture import Mixture


class DecoderLayer(Block):
    """x: [B, T, units] → x plus self-attention, plus attention to the source, plus feed-forward.

    Reads x, memory [B, S, units], target and source. Position t attends to target positions up to
    t. Branches: attention, memory_attention, feed_forward.

    With per-layer transparent attention it reads, instead of memory, the embedded source and the
    output of every encoder layer, and attends to a mixture of them (children mixture, memory_norm).
    """

    class Params(Block.Params):
        reads = ("x", "memory", "target", "source")
        shares_dropout: float = hyperparams.field(0.1, "Rate on its mixture's vector.")

        @property
        def branches(self) -> tuple[str, ...]:
            """See `Block`."""
            return ("attention", "memory_attention", "feed_forward")

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`."""
            parts: dict[str, core.Layer.Params] = {}
            if len(self.reads) > 4:
                parts["mixture"] = Mixture.Params(shares_dropout=self.shares_dropout)
                parts["memory_norm"] = core.LayerNorm.Params()
            return parts | super().parts()

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`.

            Args:
                call: see there.
                *inputs: x, all memories, and the masks of both attentions.
            """
            x, *memories, mask, memory_mask = inputs
            memory = self.memory(call, memories)
            return super().flow(call, x, (mask,), (memory, memory_mask), ())

        def memory(self, call: composite.Calls, memories: Sequence[Nest]) -> Nest:
            """Return what is attended to: the encoder's output, or a mixture of its layers."""
            if "mixture" not in call.parts:
                return memories[0]
            return call("memory_norm", call("mixture", *memories))

        def branch(self, name: str) -> core.Layer.Params:
            """See `BlockParams`."""
            if name == "attention":
                return self._attention().set(causal=True)
            if name == "memory_attention":
                return self._attention().set(cross=True, reads=("x", "memory", "mask"))
            return super().branch(name)

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            if len(inputs) < 4:
                checks.arity(self, inputs, ("x, memory, target, source",))
            x, *memories, target, source = inputs
            masks = (self._mask_spec(target, x), self._mask_spec(source, x))
            return super()._meta(x, *memories, *masks)

    params: Params
    per_source = ("memory_key", "memory_value", "present")

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, *memories, target, source = inputs
        masks = (self._mask(target, target), self._mask(source, target))
        return self.run_parts(theta, ctx, x, *memories, *masks)

    def _attention_of(self, branch: str) -> core.MultiHeadAttention:
        return cast(core.MultiHeadAttention, self.children[branch])

    def begin(
        self, theta: Theta, inputs: Nest, rows: int | tf.Tensor, length: int, ctx: core.Context
    ) -> Cache:
        """See `IncrementalLayer.begin`.

        Keys and values are [rows, heads, length, head_dim]. Those of the source have its length and
        are stored once for all hypotheses of a sentence.
        """
        _, *memories, _, source = inputs
        memory_key, memory_value = self._attention_of("memory_attention").remember(
            theta["memory_attention"],
            self.params.memory(composite.Calls(self, theta, ctx), memories),
            ctx.child("memory_attention"),
        )
        p = self.params
        empty = tf.zeros((rows, p.heads, length, p.head_dim), self.policy.compute)
        return {
            "time": tf.zeros([rows], tf.int32),
            "key": empty,
            "value": empty,
            "memory_key": memory_key,
            "memory_value": memory_value,
            "present": source != 0,
        }

    def extend(
        self, theta: Theta, cache: Cache, inputs: Nest, ctx: core.Context
    ) -> tuple[Nest, Cache]:
        """See `IncrementalLayer.extend`."""
        x, time = inputs[0], cache["time"]
        positions = tf.range(cache["key"].shape[2])
        is_current = (positions == time[:, tf.newaxis])[:, tf.newaxis, :, tf.newaxis]
        allowed = {
            "attention": (positions <= time[:, tf.newaxis])[:, tf.newaxis, tf.newaxis],
            "memory_attention": cache["present"][:, tf.newaxis, tf.newaxis],
        }
        new = dict(cache, time=time + 1)
        x = precision.cast(x, self.policy.compute)
        for branch in self.params.branches:
            y = self.child(f"{branch}_norm", theta, x, ctx)
            if branch not in self.children:
                return (x, y), new
            if branch in allowed:
                attention = self._attention_of(branch)
                branch_theta, branch_ctx = theta[branch], ctx.child(branch)
                names = ("memory_key", "memory_value")
                if branch == "attention":
                    names = ("key", "value")
                    added = attention.remember(branch_theta, y, branch_ctx)
                    for name, value in zip(names, added, strict=True):
                        new[name] = tf.where(is_current, value, cache[name])
                key, value = (new[name] for name in names)
                # The hypotheses of a sentence are positions that attend to the same keys.
                shape = tf.shape(y)
                y = tf.reshape(y, (tf.shape(key)[0], -1, y.shape[-1]))
                y = attention.attend(branch_theta, y, key, value, allowed[branch], branch_ctx)
                y = tf.reshape(y, shape)
            else:
                y = self.child(branch, theta, y, ctx)
            x += self.child(f"{branch}_dropout", theta, y, ctx)
        return x, new
