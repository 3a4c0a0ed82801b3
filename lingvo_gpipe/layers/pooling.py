"""Pooling over [H, W]. FLOPs: 0."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe.layers import base, checks, convolution
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class PoolParams(convolution.WindowParams):
    """Fields of a pool."""

    pool_size: int | tuple[int, int] = hyperparams.field(2, "Height and width of the window.")
    strides = 2
    padding = "valid"


def _pool_meta(params: Any, inputs: tuple[Any, ...]) -> Meta:
    checks.arity(params, inputs, ("x",))
    batch, height, width, channels = checks.shape(
        params, inputs[0], convolution.LAYOUT, convolution.WAY_OUT
    )
    window = convolution.pair(params.pool_size)
    sides = convolution.window_outputs(params, (height, width), window)
    output = tf.TensorSpec((batch, *sides, channels), precision.policy(params.dtype).compute)
    return Meta(output, activation_bytes=base.spec_bytes(output))


class MaxPool2D(Layer):
    """x: [B, H, W, C] → [B, H', W', C], the largest of each window."""

    class Params(PoolParams):
        """Those of `PoolParams`."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            return _pool_meta(self, inputs)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        p = self.params
        x = precision.cast(inputs, self.policy.compute)
        return tf.nn.max_pool2d(
            x, convolution.pair(p.pool_size), convolution.pair(p.strides), p.padding.upper()
        )


class AvgPool2D(Layer):
    """x: [B, H, W, C] → [B, H', W', C], the mean of each window's positions inside the input."""

    class Params(PoolParams):
        """Those of `PoolParams`."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            return _pool_meta(self, inputs)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        p = self.params
        x = precision.cast(inputs, self.policy.compute)
        return tf.nn.avg_pool2d(
            x, convolution.pair(p.pool_size), convolution.pair(p.strides), p.padding.upper()
        )


class GlobalPool2D(Layer):
    """x: [B, H, W, C] → [B, C], or [B, 1, 1, C] with `keep_sides`; the mean is taken in float32."""

    class Params(Layer.Params):
        kind: Literal["avg", "max"] = hyperparams.field("avg", "Mean or largest of all positions.")
        keep_sides: bool = hyperparams.field(False, "Keeps H and W as sides of 1.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, _, _, channels = checks.shape(
                self, inputs[0], convolution.LAYOUT, convolution.WAY_OUT
            )
            shape = (batch, 1, 1, channels) if self.keep_sides else (batch, channels)
            output = tf.TensorSpec(shape, self.policy.compute)
            return Meta(output, activation_bytes=base.spec_bytes(output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        policy, keep = self.policy, self.params.keep_sides
        if self.params.kind == "max":
            return tf.reduce_max(precision.cast(inputs, policy.compute), (1, 2), keepdims=keep)
        x = precision.cast(inputs, policy.variable)
        return precision.cast(tf.reduce_mean(x, (1, 2), keepdims=keep), policy.compute)
