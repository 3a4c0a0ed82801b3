"""Encoder layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, slices
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.mt.model.block import Block
from lingvo_gpipe.tasks.mt.model.mixture import compute_shares, shares_variable


class EncoderLayer(Block):
    """x: [B, S, units], source: [B, S] → x plus self-attention, then plus feed-forward."""

    class Params(Block.Params):
        reads = ("x", "source")

        @property
        def branches(self) -> tuple[str, ...]:
            """See `Block`."""
            return ("attention", "feed_forward")

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("x, source",))
            x, source = inputs
            return super()._meta(x, (self._mask_spec(source, x),), ())

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, source = inputs
        return self.run_parts(theta, ctx, x, (self._mask(source, source),), ())


class TransparentEncoderLayer(EncoderLayer):
    """An encoder layer that also adds its input to the mixture that decoders attend to.

    Reads x and source; all but the first also read mix [B, S, units], the sum so far, and shares
    [n]: those of this layer's input, of the inputs of later layers and of the last output. Writes
    x, mix and the other n − 1 shares; the last layer writes only the complete mix.

    Variable of the first layer: shares [n], the vector whose softmax are the shares.

    Source: Bapna et al. 2018 (1808.07561), section 2, in the form of Lingvo's pipeline.
    """

    class Params(EncoderLayer.Params):
        num_shares: int = hyperparams.required("n: number of layers from this one on, plus 1.")
        shares_dropout: float = hyperparams.field(0.1, "Rate on the vector, before softmax.")

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("x, source", "x, source, mix, shares"))
            checks.share(self, "shares_dropout", self.shares_dropout)
            meta = super()._meta(*inputs[:2])
            state = meta.outputs[0] if self.ends_at_norm else meta.outputs
            variables = meta.variables
            if len(inputs) == 2:
                variables = (shares_variable(self, self.num_shares), *variables)
            mix = (state, tf.TensorSpec((self.num_shares - 1,), state.dtype))
            outputs = state
            if self.ends_at_norm:
                outputs = (*meta.outputs, *mix)
            elif self.num_shares > 2:
                outputs = (state, *mix)
            return dataclasses.replace(
                meta,
                outputs=outputs,
                variables=variables,
                activation_bytes=meta.activation_bytes + base.spec_bytes(state),
            )

        def in_slices(self, layers: Sequence[core.Layer.Params]) -> tuple[core.Layer.Params, ...]:
            """See `BlockParams`; the sum and the shares go past the slices."""
            begin, *of_slices, end = super().in_slices(layers)
            state, *mix = self.writes
            if self.num_shares == 2:
                mix = [f"{self.name}_mix", f"{self.name}_shares"]
                end = MixtureEnd.Params(
                    name=end.name,
                    rate=self.dropout,
                    reads=(*end.reads, *mix),
                    writes=(state,),
                    **slices.shared_fields(self, 0.0),
                )
            begin.writes = (*begin.writes, *mix)
            return (begin, *of_slices, end.set(writes=(state,)))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        x, source, *carried = inputs
        x = precision.cast(x, self.policy.compute)
        if carried:
            mix, shares = carried
            mix += shares[0] * x
        else:
            rate = self.params.shares_dropout
            shares = compute_shares(theta["shares"], rate, self.policy, ctx)
            mix = shares[0] * x
        y = super().fprop(theta, (x, source), ctx)
        if self.params.ends_at_norm:
            return *y, mix, shares[1:]
        if self.params.num_shares == 2:
            return mix + shares[1] * y
        return y, mix, shares[1:]


class MixtureEnd(core.FeedForwardEnd):
    """x, y, mix: [B, S, units], shares: [1] → mix + the share of x + dropout(y), [B, S, units].

    It ends the last TransparentEncoderLayer where the feed-forward part is in slices.
    """

    class Params(core.FeedForwardEnd.Params):
        """Fields of a FeedForwardEnd."""

        def _meta(self, *inputs: SpecNest) -> core.Meta:
            checks.arity(self, inputs, ("x, y, mix, shares",))
            meta = super()._meta(*inputs[:2])
            kept = meta.activation_bytes + base.spec_bytes(meta.outputs)
            return dataclasses.replace(meta, activation_bytes=kept)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.fprop`."""
        *values, mix, shares = inputs
        state = self.run_parts(theta, ctx, *values)
        return precision.cast(mix, state.dtype) + precision.cast(shares, state.dtype)[0] * state
