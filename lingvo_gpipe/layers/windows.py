"""Layers that move a window over [H, W]: convolutions and pools.

All take x: [B, H, W, C]. FLOPs are exact: 2 per multiply-add, every kernel position counted,
padding included; bias, activation and pools count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

LAYOUT = "[B, H, W, C]"
WAY_OUT = "Set its field reads to a name that holds images"


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return `value` for H and W."""
    return value if isinstance(value, tuple) else (value, value)


class WindowParams(Layer.Params):
    """Fields of layers that move a window over [H, W]."""

    strides: int | tuple[int, int] = hyperparams.field(1, "Steps of the window along H and W.")
    padding: Literal["same", "valid"] = hyperparams.field(
        "same", "same: ceil(dimension / stride) outputs; valid: the window stays inside."
    )

    def output_size(self, size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
        """Return output height and width of a window, by TensorFlow's rules.

        Args:
            size: H and W of the input.
            window: H and W of the kernel or pool.

        Raises:
            LayerError: the window does not fit into the input.
        """
        strides = pair(self.strides)
        checks.positive(self, strides=strides, window=window)
        outputs = []
        for length, stride, width in zip(size, strides, window, strict=True):
            free = length if self.padding == "same" else length - width + 1
            outputs.append(-(-free // stride))
        if min(outputs) < 1:
            raise errors.LayerError(
                f"{base.describe(self)}: a window of {window[0]}x{window[1]} does not fit into "
                f"[H, W] = {list(size)} with padding 'valid'. Use padding='same', a smaller "
                "window, or fewer strides before it"
            )
        return outputs[0], outputs[1]


class ConvParams(WindowParams, dense.ActivatedKernelParams):
    """Fields of every convolution."""

    filters: int = hyperparams.required("Output channels.")
    kernel_size: int | tuple[int, int] = hyperparams.field(3, "Height and width of the kernel.")

    def checked(self, inputs: tuple[SpecNest, ...]) -> tuple[int, int, int, int]:
        """Return (B, output H, output W, C) of a convolution's input.

        Raises:
            LayerError: the input does not fit.
        """
        checks.arity(self, inputs, ("x",))
        checks.positive(self, filters=self.filters)
        batch, height, width, channels = checks.shape(self, inputs[0], LAYOUT, WAY_OUT)
        size = self.output_size((height, width), pair(self.kernel_size))
        return batch, *size, channels


class Conv2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', filters] in the compute dtype.

    Variables: kernel [h, w, C, filters], bias [filters]. FLOPs forward:
    2·B·H'·W'·h·w·C·filters.
    """

    class Params(ConvParams):
        """Fields of every convolution."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = self.checked(inputs)
            kernel = (*pair(self.kernel_size), channels, self.filters)
            output = tf.TensorSpec((batch, rows, columns, self.filters), self.policy.compute)
            flops = 2 * batch * rows * columns * math.prod(kernel)
            weights = dense.weights(self, kernel, self.filters)
            return dense.activated_meta(self, output, weights, flops)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        p = self.params
        x = precision.cast(inputs, self.policy.compute)
        y = tf.nn.convolution(x, theta["kernel"], pair(p.strides), p.padding.upper())
        return dense.finish(p, theta, y)


class SeparableConv2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', filters]: depthwise, then 1×1, nothing in between.

    Variables: depthwise_kernel [h, w, C, 1], pointwise_kernel [1, 1, C, filters], bias [filters].
    FLOPs: the sum of both parts.
    """

    class Params(ConvParams):
        """Fields of every convolution."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = self.checked(inputs)
            strides, (height, width) = pair(self.strides), pair(self.kernel_size)
            if strides[0] != strides[1]:
                raise errors.LayerError(
                    f"{base.describe(self)}: strides {strides}, but TensorFlow's depthwise "
                    "convolution steps equally along H and W. Use one number, or a MaxPool2D for "
                    "the rest"
                )
            depthwise = VariableSpec(
                "depthwise_kernel",
                (height, width, channels, 1),
                self.policy.variable,
                base.initializer(self.kernel_init, **self.kernel_init_args),
            )
            pointwise = dense.weights(
                self, (1, 1, channels, self.filters), self.filters, "pointwise_kernel"
            )
            between = tf.TensorSpec((batch, rows, columns, channels), self.policy.compute)
            output = tf.TensorSpec((batch, rows, columns, self.filters), self.policy.compute)
            flops = 2 * batch * rows * columns * channels * (height * width + self.filters)
            return Meta(
                output,
                (depthwise, *pointwise),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=base.spec_bytes(between)
                + dense.kept_bytes(self, self.activation, output),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        strides = (1, *pair(self.params.strides), 1)
        padding = self.params.padding.upper()
        x = tf.nn.depthwise_conv2d(x, theta["depthwise_kernel"], strides, padding)
        y = tf.nn.convolution(x, theta["pointwise_kernel"], 1, "VALID")
        return dense.finish(self.params, theta, y)


class PoolParams(WindowParams):
    """Fields of a pool."""

    pool_size: int | tuple[int, int] = hyperparams.field(2, "Height and width of the window.")
    strides = 2
    padding = "valid"

    def _meta(self, *inputs: SpecNest) -> Meta:
        checks.arity(self, inputs, ("x",))
        batch, height, width, channels = checks.shape(self, inputs[0], LAYOUT, WAY_OUT)
        size = self.output_size((height, width), pair(self.pool_size))
        output = tf.TensorSpec((batch, *size, channels), self.policy.compute)
        return Meta(output, activation_bytes=base.spec_bytes(output))

    def pooled(self, pool: Callable[..., tf.Tensor], x: tf.Tensor) -> tf.Tensor:
        """Return pool(x, size, strides, padding) in the compute dtype."""
        x = precision.cast(x, self.policy.compute)
        return pool(x, pair(self.pool_size), pair(self.strides), self.padding.upper())


class MaxPool2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', C], the largest of each window."""

    class Params(PoolParams):
        """Those of `PoolParams`."""

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return self.params.pooled(tf.nn.max_pool2d, inputs)


class AvgPool2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', C], the mean of each window's part of the input."""

    class Params(PoolParams):
        """Those of `PoolParams`."""

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return self.params.pooled(tf.nn.avg_pool2d, inputs)


class GlobalPool2D(Layer):
    """x: [B, H, W, C] floating → [B, C]: the mean of all positions, in the compute dtype.

    It is computed in float32, or float64 under that policy.
    """

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, _, _, channels = checks.shape(self, inputs[0], LAYOUT, WAY_OUT)
            output = tf.TensorSpec((batch, channels), self.policy.compute)
            return Meta(output, activation_bytes=base.spec_bytes(output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        x = precision.cast(inputs, self.policy.variable)
        return precision.cast(tf.reduce_mean(x, (1, 2)), self.policy.compute)
