"""Layers that move a window over [H, W]: convolutions and pools.

All take x: [B, H, W, C]. FLOPs are exact: 2 per multiply-add, every kernel position counted,
padding included; bias, activation and pools count nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense, elementwise
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

LAYOUT = "[B, H, W, C]"
WAY_OUT = "Put a Reshape before it"


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return `value` for H and W."""
    return value if isinstance(value, tuple) else (value, value)


class WindowParams(Layer.Params):
    """Fields of layers that move a window over [H, W]."""

    strides: int | tuple[int, int] = hyperparams.field(1, "Steps of the window along H and W.")
    padding: Literal["same", "valid"] = hyperparams.field(
        "same", "same: ceil(dimension / stride) outputs; valid: the window stays inside."
    )

    def output_size(
        self,
        size: tuple[int, int],
        window: tuple[int, int],
        dilation: tuple[int, int] = (1, 1),
    ) -> tuple[int, int]:
        """Return output height and width of a window, by TensorFlow's rules.

        Args:
            size: H and W of the input.
            window: H and W of the kernel or pool.
            dilation: distance of the kernel's positions.

        Raises:
            LayerError: the window does not fit into the input.
        """
        strides = pair(self.strides)
        checks.positive(self, strides=strides, window=window, dilation=dilation)
        outputs = []
        for length, stride, width, step in zip(size, strides, window, dilation, strict=True):
            reach = (width - 1) * step + 1
            free = length if self.padding == "same" else length - reach + 1
            outputs.append(-(-free // stride))
        if min(outputs) < 1:
            spread = f" with dilation {dilation}" if max(dilation) > 1 else ""
            raise errors.LayerError(
                f"{base.describe(self)}: a window of {window[0]}x{window[1]}{spread} does not fit "
                f"into [H, W] = {list(size)} with padding 'valid'. Use padding='same', a smaller "
                "window, or fewer strides before it"
            )
        return outputs[0], outputs[1]


class ConvParams(WindowParams, dense.ActivatedKernelParams):
    """Fields of every convolution."""

    kernel_size: int | tuple[int, int] = hyperparams.field(3, "Height and width of the kernel.")
    dilation: int | tuple[int, int] = hyperparams.field(
        1, "Distance of the kernel's positions; above 1 needs strides of 1."
    )

    def checked(self, inputs: tuple[SpecNest, ...]) -> tuple[int, int, int, int]:
        """Return (B, output H, output W, C) of a convolution's input.

        Raises:
            LayerError: the input does not fit.
        """
        checks.arity(self, inputs, ("x",))
        batch, height, width, channels = checks.shape(self, inputs[0], LAYOUT, WAY_OUT)
        dilation, strides = pair(self.dilation), pair(self.strides)
        if max(dilation) > 1 and max(strides) > 1:
            raise errors.LayerError(
                f"{base.describe(self)}: dilation {dilation} together with strides {strides}, "
                "which TensorFlow does not compute. Leave one of them at 1"
            )
        size = self.output_size((height, width), pair(self.kernel_size), dilation)
        return batch, *size, channels


class DepthwiseParams(ConvParams):
    """Fields of convolutions with a kernel for each input channel."""

    depth_multiplier: int = hyperparams.field(
        1, "Output channels of the depthwise kernel per input channel."
    )

    def checked(self, inputs: tuple[SpecNest, ...]) -> tuple[int, int, int, int]:
        """See `ConvParams`."""
        shape = super().checked(inputs)
        checks.positive(self, depth_multiplier=self.depth_multiplier)
        strides = pair(self.strides)
        if strides[0] != strides[1]:
            raise errors.LayerError(
                f"{base.describe(self)}: strides {strides}, but TensorFlow's depthwise convolution "
                "steps equally along H and W. Use one number, or a MaxPool2D for the rest"
            )
        return shape

    def convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Return x [B, H, W, C] convolved with kernel [h, w, C, depth_multiplier]."""
        return tf.nn.depthwise_conv2d(
            x,
            kernel,
            (1, *pair(self.strides), 1),
            self.padding.upper(),
            dilations=pair(self.dilation),
        )


class Conv2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', filters] in the compute dtype.

    Variables: kernel [h, w, C / groups, filters], bias [filters]. FLOPs forward:
    2·B·H'·W'·h·w·(C / groups)·filters.
    """

    class Params(ConvParams):
        filters: int = hyperparams.required("Output channels.")
        groups: int = hyperparams.field(1, "Channels are convolved in as many separate groups.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = self.checked(inputs)
            checks.positive(self, filters=self.filters, groups=self.groups)
            if channels % self.groups or self.filters % self.groups:
                raise errors.LayerError(
                    f"{base.describe(self)}: {self.groups} groups do not divide both {channels} "
                    f"input channels and {self.filters} filters. Choose a common divisor"
                )
            height, width = pair(self.kernel_size)
            kernel = (height, width, channels // self.groups, self.filters)
            output = tf.TensorSpec((batch, rows, columns, self.filters), self.policy.compute)
            flops = 2 * batch * rows * columns * height * width * kernel[2] * self.filters
            weights = dense.weights(self, kernel, self.filters)
            return dense.activated_meta(self, output, weights, flops)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        groups = self.params.groups
        # TensorFlow's CPU kernels have no gradient of a grouped convolution: one after the other.
        parts = [
            self._convolve(part, kernel)
            for part, kernel in zip(
                tf.split(x, groups, axis=-1) if groups > 1 else [x],
                tf.split(theta["kernel"], groups, axis=-1) if groups > 1 else [theta["kernel"]],
                strict=True,
            )
        ]
        y = parts[0] if groups == 1 else tf.concat(parts, axis=-1)
        return dense.finish(self.params, theta, y)

    def _convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        p = self.params
        return tf.nn.convolution(
            x, kernel, pair(p.strides), p.padding.upper(), dilations=pair(p.dilation)
        )


class DepthwiseConv2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', C·depth_multiplier] in the compute dtype.

    Each channel has a kernel of its own. Variables: kernel [h, w, C, depth_multiplier],
    bias [C·depth_multiplier]. FLOPs forward: 2·B·H'·W'·h·w·C·depth_multiplier.
    """

    class Params(DepthwiseParams):
        """Fields of a depthwise convolution."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = self.checked(inputs)
            height, width = pair(self.kernel_size)
            kernel = (height, width, channels, self.depth_multiplier)
            units = channels * self.depth_multiplier
            output = tf.TensorSpec((batch, rows, columns, units), self.policy.compute)
            flops = 2 * batch * rows * columns * height * width * units
            return dense.activated_meta(self, output, dense.weights(self, kernel, units), flops)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        return dense.finish(self.params, theta, self.params.convolve(x, theta["kernel"]))


class SeparableConv2D(Layer):
    """x: [B, H, W, C] floating → [B, H', W', filters]: depthwise, then 1×1, nothing in between.

    Variables: depthwise_kernel [h, w, C, depth_multiplier], pointwise_kernel
    [1, 1, C·depth_multiplier, filters], bias [filters]. FLOPs: the sum of both parts.
    """

    class Params(DepthwiseParams):
        filters: int = hyperparams.required("Output channels.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = self.checked(inputs)
            checks.positive(self, filters=self.filters)
            height, width = pair(self.kernel_size)
            middle = channels * self.depth_multiplier
            depthwise = VariableSpec(
                "depthwise_kernel",
                (height, width, channels, self.depth_multiplier),
                self.policy.variable,
                base.initializer(self.kernel_init, **self.kernel_init_args),
            )
            pointwise = dense.weights(
                self, (1, 1, middle, self.filters), self.filters, "pointwise_kernel"
            )
            between = tf.TensorSpec((batch, rows, columns, middle), self.policy.compute)
            output = tf.TensorSpec((batch, rows, columns, self.filters), self.policy.compute)
            flops = 2 * batch * rows * columns * middle * (height * width + self.filters)
            return Meta(
                output,
                (depthwise, *pointwise),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=base.spec_bytes(between)
                + elementwise.kept_bytes(self, self.activation, output),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        x = self.params.convolve(x, theta["depthwise_kernel"])
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
    """x: [B, H, W, C] floating → [B, C], or [B, 1, 1, C] with `keep_sides`.

    The mean is computed in float32, or float64 under that policy; the output has the compute dtype.
    """

    class Params(Layer.Params):
        kind: Literal["avg", "max"] = hyperparams.field("avg", "Mean or largest of all positions.")
        keep_sides: bool = hyperparams.field(False, "Keeps H and W as dimensions of 1.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, _, _, channels = checks.shape(self, inputs[0], LAYOUT, WAY_OUT)
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
