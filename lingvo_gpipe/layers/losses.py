"""Losses of values: squared errors, penalties on activations. See `heads` for their weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, heads, reshaping
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class MeanSquaredError(heads.Head):
    """x: [B, ...] floating, target: [B, ...] → x in the master dtype; loss: squared error.

    It is the mean of (x − target)² over an example. Each example has weight 1, or that of the third
    name it reads, weights: [B].
    """

    class Params(heads.Head.Params):
        reads = ("x", "target")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, target", "x, target, weights"))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It compares one tensor")
            axis = self.batch_dim or 0
            rows = shape[axis : axis + 1]
            for spec, expected in zip(inputs[1:], (shape, rows), strict=False):
                target = checks.any_shape(self, spec, "[B, ...]", "Set its field reads")
                if target != expected:
                    raise errors.LayerError(
                        f"{base.describe(self)}: target or weights of shape {list(target)}, "
                        f"expected {list(expected)} for x of shape {list(shape)}. Reshape one of "
                        "them"
                    )
            dtype = self.policy.variable
            losses: tuple[LossSpec, ...] = ()
            if len(inputs) > 1:
                weighted = len(inputs) == 3
                weight = heads.weight_by(self.reads[-1], dtype, are_weights=weighted, examples=axis)
                losses = (LossSpec(self.loss_name, self.coefficient, weight),)
            output = tf.TensorSpec(shape, dtype)
            return Meta(output, activation_bytes=base.spec_bytes(output), losses=losses)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        if others:
            error = tf.square(x - tf.cast(others[0], x.dtype))
            per_example = _per_example(error, self.params.batch_dim or 0)
            if len(others) == 2:
                per_example *= tf.cast(others[1], x.dtype)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return x


def _per_example(values: tf.Tensor, batch_dim: int) -> tf.Tensor:
    """Return the mean over all axes but that of the batch: [B]."""
    return tf.reduce_mean(values, [axis for axis in range(values.shape.rank) if axis != batch_dim])


class AuxiliaryLoss(Layer):
    """x: [B, ...] floating → x in the compute dtype; loss: mean of x² (or |x|) over an example.

    It may be anywhere in a network.
    """

    class Params(heads.LossParams):
        kind: Literal["l2", "l1"] = hyperparams.field("l2", "Mean of x², or of |x|.")
        examples: str = hyperparams.field(
            "label", "Field of the mini-batch whose batch dimension counts the examples."
        )
        loss_name = "auxiliary_loss"

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It measures one tensor")
            policy = self.policy
            weight = heads.weight_by(self.examples, policy.variable, examples=self.batch_dim or 0)
            return Meta(
                tf.TensorSpec(shape, policy.compute),
                activation_bytes=base.spec_bytes(tf.TensorSpec(shape, policy.variable)),
                losses=(LossSpec(self.loss_name, self.coefficient, weight),),
            )

        def _inference(self, available: Collection[str]) -> Layer.Params | None:
            """Pass x on."""
            del available
            return reshaping.passing(self)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.variable)
        values = tf.square(x) if self.params.kind == "l2" else tf.abs(x)
        ctx.add_loss(
            self.params.loss_name, tf.reduce_sum(_per_example(values, self.params.batch_dim or 0))
        )
        return precision.cast(inputs, self.policy.compute)
