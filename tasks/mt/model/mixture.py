"""Mixtures of layers' outputs by learned shares, which sum to 1."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.layers.dense import drop
from lingvo_gpipe.nests import Nest, SpecNest


class Mixture(core.Layer):
    """n tensors [B, S, units] → their weighted sum; the shares are softmax(dropout(vector)).

    Variable: shares [n], the vector.
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
        shares = compute_shares(theta["shares"], self.params.shares_dropout, self.policy, ctx)
        compute = self.policy.compute
        return tf.add_n([shares[i] * precision.cast(x, compute) for i, x in enumerate(inputs)])


def shares_variable(params: core.Layer.Params, count: int) -> core.VariableSpec:
    """Return the spec of the vector of `count` shares, equal at first."""
    equal = base.initializer("Constant", value=1.0 / count)
    return core.VariableSpec("shares", (count,), params.policy.variable, equal, group="bias")


def compute_shares(
    vector: tf.Tensor, rate: float, policy: precision.Policy, ctx: core.Context
) -> tf.Tensor:
    """Return softmax(dropout(vector)) in the compute dtype; dropout at `rate`, in training only."""
    vector = precision.cast(vector, policy.variable)
    if ctx.training:
        vector = drop(vector, rate, ctx)
    return precision.cast(tf.nn.softmax(vector), policy.compute)
