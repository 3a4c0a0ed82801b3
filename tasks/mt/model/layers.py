"""The layers of the translation model, composed of the framework's.

What may be attended to is told by whole numbers [B, S], 0 for padding: the ids themselves or, where
several sentences share a row (`packed`), the number of the sentence. They are fields of the
mini-batch, so every cell has them straight from the input and no mask crosses a cut.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, composite, heads
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.layers.elementwise import drop
from lingvo_gpipe.nests import Nest, SpecNest


class TokenEmbedding(core.Composite):
    """ids: [B, T] → [B, T, units]: table · √units, sinusoidal positions added, dropout.

    A second name it reads holds the positions, where they do not count from 0 in each row.
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

        def _inference(self, available: Collection[str]) -> Self:
            """Count positions from 0 where there are none to read."""
            served = self.copy()
            if not set(served.reads[1:]) <= set(available):
                served.reads = served.reads[:1]
            return served

    params: Params

    def begin(
        self, theta: dict[str, Any], inputs: Any, rows: Any, length: int, ctx: core.Context
    ) -> dict[str, Any]:
        """Return the cache of no token; see `incremental`."""
        del theta, inputs, length, ctx
        return {"time": tf.zeros([rows], tf.int32)}

    def extend(
        self, theta: dict[str, Any], cache: dict[str, Any], inputs: Any, ctx: core.Context
    ) -> tuple[Any, dict[str, Any]]:
        """Return the output of one token more, [B, 1, units], and the new cache."""
        time = cache["time"]
        x = self.child("embedding", theta, inputs, ctx)
        position = self.children["position"]
        x = position.run({}, (x, time[:, tf.newaxis]), ctx.child("position"))
        return self.child("dropout", theta, x, ctx), {"time": time + 1}


class Block(core.Composite):
    """Base of encoder and decoder layers: x + branch(norm(x)), for one branch after the other.

    Children: {branch}_norm, {branch}, {branch}_dropout. Subclasses tell `branches` and what their
    attentions read besides x.
    """

    class Params(core.Composite.Params):
        units: int = hyperparams.required("Features of x and of the output.")
        heads: int = hyperparams.required("Number of attention heads.")
        head_dim: int = hyperparams.field(64, "Features of a head.")
        hidden: int = hyperparams.required("Features in the middle of the feed-forward part.")
        dropout: float = hyperparams.field(0.0, "Rate on what each branch adds.")
        attention_dropout: float = hyperparams.field(0.0, "Rate on the attention shares.")
        relu_dropout: float = hyperparams.field(0.0, "Rate in the middle of the feed-forward part.")
        ff_init_scale: float = hyperparams.field(
            1.0, "Factor on the initial weights of the feed-forward part."
        )
        packed: bool = hyperparams.field(
            False, "The numbers [B, S] it reads are sentences within a row; else ids."
        )

        @property
        @abc.abstractmethod
        def branches(self) -> tuple[str, ...]:
            """Names of the branches, in the order in which they run."""

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`; by branch, in the order in which they run."""
            parts: dict[str, core.Layer.Params] = {}
            for branch in self.branches:
                parts[f"{branch}_norm"] = core.LayerNorm.Params()
                parts[branch] = self._branch(branch)
                parts[f"{branch}_dropout"] = core.Dropout.Params(rate=self.dropout)
            return parts

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`.

            Args:
                call: see there.
                *inputs: x, then for each branch in order a tuple of what it reads besides.
            """
            x, *others = inputs
            x = call.cast(x)
            for branch, more in zip(self.branches, others, strict=True):
                y = call(branch, call(f"{branch}_norm", x), *more)
                x = call.add(x, call(f"{branch}_dropout", y))
            return x

        def _branch(self, branch: str) -> core.Layer.Params:
            if branch == "feed_forward":
                return feed_forward(self)
            return attention(self)

        def _inference(self, available: Collection[str]) -> Self:
            """Read ids where there are no sentence numbers."""
            served = self.copy()
            if served.packed and not set(served.reads) <= set(available):
                served.packed = False
                served.reads = tuple(name.removesuffix("_segment") for name in served.reads)
            return served

    params: Params

    def _mask(self, keys: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
        """Return where `queries` [B, T] may attend to `keys` [B, S]: [B, S], or [B, T, S]."""
        real = keys != 0
        if not self.params.packed:
            return real
        return real[:, tf.newaxis] & (queries[:, :, tf.newaxis] == keys[:, tf.newaxis])


class EncoderLayer(Block):
    """x: [B, S, units], source: [B, S] → x with self-attention and feed-forward added."""

    class Params(Block.Params):
        reads = ("x", "source")

        @property
        def branches(self) -> tuple[str, ...]:
            """See `Block`."""
            return ("attention", "feed_forward")

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("x, source",))
            x, source = inputs
            mask = mask_spec(self, source, x)
            return super()._meta(x, (mask,), ())

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, source = inputs
        return self.run_parts(theta, ctx, x, (self._mask(source, source),), ())


class TransparentEncoderLayer(EncoderLayer):
    """An encoder layer that adds its share of what decoders attend to (one vector for all).

    Reads x and source and, but for the first, mix [B, S, units] and shares [n]: the sum so far, and
    the shares of this layer's input, of those behind it and of the last output. Writes x, mix and
    the n − 1 shares that are left; the last one the complete mix alone.

    Variable of the first: shares [n], from which softmax makes the shares, after dropout.

    Source: Bapna et al. 2018 (1808.07561), section 2, in the form of Lingvo's pipeline.
    """

    class Params(EncoderLayer.Params):
        num_shares: int = hyperparams.required("n: layers from this one on, and 1.")
        shares_dropout: float = hyperparams.field(0.1, "Rate on the vector, before softmax.")

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("x, source", "x, source, mix, shares"))
            checks.share(self, "shares_dropout", self.shares_dropout)
            told = super()._meta(*inputs[:2])
            compute = told.outputs.dtype
            variables = told.variables
            if len(inputs) == 2:
                variables = (shares_variable(self, self.num_shares), *variables)
            outputs = told.outputs
            if self.num_shares > 2:
                left = tf.TensorSpec((self.num_shares - 1,), compute)
                outputs = (told.outputs, told.outputs, left)
            return dataclasses.replace(
                told,
                outputs=outputs,
                variables=variables,
                activation_bytes=told.activation_bytes + base.spec_bytes(told.outputs),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, source, *carried = inputs
        x = precision.cast(x, self.policy.compute)
        if carried:
            mix, shares = carried
            mix += shares[0] * x
        else:
            shares = shares_of(self, theta["shares"], ctx)
            mix = shares[0] * x
        y = super().fprop(theta, (x, source), ctx)
        if self.params.num_shares == 2:
            return mix + shares[1] * y
        return y, mix, shares[1:]


class Mixture(core.Layer):
    """n tensors [B, S, units] → their sum by learned shares, softmax of a vector after dropout.

    Variable: shares [n].
    """

    class Params(core.Layer.Params):
        shares_dropout: float = hyperparams.field(0.1, "Rate on the vector, before softmax.")

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.share(self, "shares_dropout", self.shares_dropout)
            output = tf.TensorSpec(inputs[0].shape, self.policy.compute)
            kept = len(inputs) * base.spec_bytes(output)
            return core.Meta(output, (shares_variable(self, len(inputs)),), activation_bytes=kept)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        shares = shares_of(self, theta["shares"], ctx)
        compute = self.policy.compute
        return tf.add_n([shares[i] * precision.cast(x, compute) for i, x in enumerate(inputs)])


class DecoderLayer(Block):
    """x: [B, T, units] → x with self-attention, attention to the source and feed-forward added.

    Reads x, memory [B, S, units], target and source. Position t attends to target positions up to
    t. Branches: attention, memory_attention, feed_forward.

    With transparent attention of its own it reads, in place of memory, the embedded source and the
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
            x, *memories, own_mask, memory_mask = inputs
            memory = self.memory(call, memories)
            return super().flow(call, x, (own_mask,), (memory, memory_mask), ())

        def memory(self, call: composite.Calls, memories: Sequence[Nest]) -> Nest:
            """Return what is attended to: the encoder's output, or a mixture of its layers'."""
            if "mixture" not in call.names:
                return memories[0]
            return call("memory_norm", call("mixture", *memories))

        def _branch(self, branch: str) -> core.Layer.Params:
            if branch == "feed_forward":
                return feed_forward(self)
            own = attention(self)
            if branch == "attention":
                return own.set(causal=True)
            return own.set(cross=True, reads=("x", "memory", "mask"))

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            if len(inputs) < 4:
                checks.arity(self, inputs, ("x, memory, target, source",))
            x, *memories, target, source = inputs
            masks = (mask_spec(self, target, x), mask_spec(self, source, x))
            return super()._meta(x, *memories, *masks)

    params: Params

    of_source = ("memory_key", "memory_value", "present")

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, *memories, target, source = inputs
        masks = (self._mask(target, target), self._mask(source, target))
        return self.run_parts(theta, ctx, x, *memories, *masks)

    def begin(
        self, theta: dict[str, Any], inputs: Any, rows: Any, length: int, ctx: core.Context
    ) -> dict[str, Any]:
        """Return the cache of no token; see `incremental`.

        Keys and values are [rows, heads, length, head_dim]; those of the source are as long as it
        is, and kept once for all hypotheses of a sentence.
        """
        _, *memories, _, source = inputs
        attention: Any = self.children["memory_attention"]
        memory = self.params.memory(composite.TensorCalls(self, theta, ctx), memories)
        remembered = attention.remember(
            theta["memory_attention"], memory, ctx.child("memory_attention")
        )
        p = self.params
        empty = tf.zeros((rows, p.heads, length, p.head_dim), self.policy.compute)
        return {
            "time": tf.zeros([rows], tf.int32),
            "key": empty,
            "value": empty,
            "memory_key": remembered[0],
            "memory_value": remembered[1],
            "present": source != 0,
        }

    def extend(
        self, theta: dict[str, Any], cache: dict[str, Any], inputs: Any, ctx: core.Context
    ) -> tuple[Any, dict[str, Any]]:
        """Return the output of one token more, [B, 1, units], and the new cache."""
        x, time = inputs[0], cache["time"]
        places = tf.range(cache["key"].shape[2])
        here = (places == time[:, tf.newaxis])[:, tf.newaxis, :, tf.newaxis]
        allowed = {
            "attention": (places <= time[:, tf.newaxis])[:, tf.newaxis, tf.newaxis],
            "memory_attention": cache["present"][:, tf.newaxis, tf.newaxis],
        }
        new = dict(cache, time=time + 1)
        x = precision.cast(x, self.policy.compute)
        for branch in self.params.branches:
            y = self.child(f"{branch}_norm", theta, x, ctx)
            if branch in allowed:
                attention: Any = self.children[branch]
                own_theta, own_ctx = theta[branch], ctx.child(branch)
                names = ("memory_key", "memory_value")
                if branch == "attention":
                    names = ("key", "value")
                    added = attention.remember(own_theta, y, own_ctx)
                    for name, value in zip(names, added, strict=True):
                        new[name] = tf.where(here, value, cache[name])
                kept = [new[name] for name in names]
                # The hypotheses of a sentence are positions that attend to the same keys.
                sides = tf.shape(y)
                y = tf.reshape(y, (tf.shape(kept[0])[0], -1, y.shape[-1]))
                y = attention.attend(own_theta, y, *kept, allowed[branch], own_ctx)
                y = tf.reshape(y, sides)
            else:
                y = self.child(branch, theta, y, ctx)
            x += self.child(f"{branch}_dropout", theta, y, ctx)
        return x, new


class TranslationSoftmax(core.SequenceSoftmax):
    """`SequenceSoftmax` whose logits are clipped in training, and that also counts by language.

    With `languages` its fourth name, [B], is the language of each row, an index into them; the
    metrics language_log_perplexity and language_accuracy are vectors, an element for each; NaN
    stands for a language without a token.
    """

    class Params(core.SequenceSoftmax.Params):
        logit_clip: float | None = hyperparams.field(
            None,
            "Logits beyond ± this count as this in training, and have no gradient; None: never.",
        )
        languages: tuple[str, ...] = hyperparams.field(
            (), "Names of the languages to tell apart; none: none are."
        )

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            if self.logit_clip is not None and self.logit_clip <= 0.0:
                raise errors.LayerError(
                    f"{base.describe(self)}: logit_clip={self.logit_clip}. Use more than 0, such "
                    "as 50, or None"
                )
            told = super()._meta(*inputs[:3])
            if len(inputs) == 1 or not self.languages:
                checks.arity(self, inputs, ("x", "x, label", "x, label, weight"))
                return told
            checks.arity(self, inputs, ("x, label, weight, language",))
            names = ("language_log_perplexity", "language_accuracy")
            counted = tuple(
                core.MetricSpec(self.metric_prefix + name, mean_where_seen, labels=self.languages)
                for name in names
            )
            return dataclasses.replace(told, metrics=(*told.metrics, *counted))

        def _inference(self, available: Collection[str]) -> Self:
            """Leave out labels, weights and languages."""
            served = super()._inference(available)
            served.languages = ()
            return served

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
        each = tf.reshape(tf.broadcast_to(language[:, tf.newaxis], tf.shape(label)), (-1,))

        def by_language(value: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(value, each, len(self.params.languages))

        count = by_language(rows.weight)
        for name in ("log_perplexity", "accuracy"):
            total = by_language(tf.stop_gradient(getattr(rows, name)) * rows.weight)
            sums = {"total": total, "weight": count}
            ctx.add_sum(f"{self.params.metric_prefix}language_{name}", sums)


def mean_where_seen(sums: Any) -> tf.Tensor:
    """Return the means of added-up (total, weight); NaN where nothing weighs."""
    return sums["total"] / sums["weight"]


def attention(params: Block.Params) -> core.MultiHeadAttention.Params:
    """Return the params of an encoder layer's attention, to itself with a mask."""
    return core.MultiHeadAttention.Params(
        units=params.units,
        heads=params.heads,
        head_dim=params.head_dim,
        dropout=params.attention_dropout,
        reads=("x", "mask"),
    )


def feed_forward(params: Block.Params) -> core.Sequential.Params:
    """Return the params of the feed-forward part of an encoder or decoder layer."""
    # Xavier's variance, by the square of the factor.
    init = {"scale": params.ff_init_scale**2, "mode": "fan_avg", "distribution": "uniform"}
    middle = core.Dense.Params(
        name="middle",
        units=params.hidden,
        activation="relu",
        kernel_init="VarianceScaling",
        kernel_init_args=init,
    )
    output = middle.copy().set(name="output", units=params.units, activation="linear")
    dropout = core.Dropout.Params(name="dropout", rate=params.relu_dropout)
    return core.Sequential.Params(layers=[middle, dropout, output])


def mask_spec(params: Block.Params, keys: SpecNest, x: tf.TensorSpec) -> tf.TensorSpec:
    """Return the spec of what `Block._mask` makes of `keys` for queries x."""
    rows, span = checks.any_shape(params, keys, "[B, S]", "Set its field reads")
    if not keys.dtype.is_integer:
        raise errors.LayerError(
            f"{base.describe(params)}: expected ids or sentence numbers, got {keys.dtype.name}. "
            "Set its field reads"
        )
    shape = (rows, x.shape[1], span) if params.packed else (rows, span)
    return tf.TensorSpec(shape, tf.bool)


def shares_variable(params: core.Layer.Params, count: int) -> core.VariableSpec:
    """Return the spec of a vector of equal shares."""
    policy = params.policy
    equal = base.initializer("Constant", value=1.0 / count)
    return core.VariableSpec("shares", (count,), policy.variable, equal, group="bias")


def shares_of(
    layer: TransparentEncoderLayer | Mixture, vector: tf.Tensor, ctx: core.Context
) -> tf.Tensor:
    """Return softmax of the vector, of which training drops some, in the compute dtype."""
    vector = precision.cast(vector, layer.policy.variable)
    if ctx.training:
        vector = drop(vector, layer.params.shares_dropout, ctx.seed)
    return precision.cast(tf.nn.softmax(vector), layer.policy.compute)
