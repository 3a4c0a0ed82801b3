"""Two-dimensional convolutions: plain, depthwise and separable.

All take x: [B, H, W, C]. FLOPs are exact: 2 per multiply-add, every kernel position counted,
padding included; bias and activation count nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import activation, base, checks, dense
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

LAYOUT = "[B, H, W, C]"
WAY_OUT = "Put a Reshape before it"


class WindowParams(Layer.Params):
    """Fields of layers that slide a window over [H, W]."""

    strides: int | tuple[int, int] = hyperparams.field(1, "Steps of the window along H and W.")
    padding: Literal["same", "valid"] = hyperparams.field(
        "same", "same: ceil(side / stride) outputs; valid: the window stays inside."
    )


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return `value` for H and W."""
    return value if isinstance(value, tuple) else (value, value)


def window_outputs(
    params: Any, sides: tuple[int, int], window: tuple[int, int], dilation: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return output height and width of a window, by TensorFlow's rules.

    Args:
        params: of a layer with `WindowParams`.
        sides: H and W of the input.
        window: H and W of the kernel or pool.
        dilation: distance of the kernel's positions.

    Raises:
        LayerError: the window does not fit into the input.
    """
    strides = pair(params.strides)
    checks.positive(params, strides=strides, window=window, dilation=dilation)
    outputs = []
    for side, stride, width, step in zip(sides, strides, window, dilation, strict=True):
        reach = (width - 1) * step + 1
        free = side if params.padding == "same" else side - reach + 1
        outputs.append(-(-free // stride))
    if min(outputs) < 1:
        spread = f" with dilation {dilation}" if max(dilation) > 1 else ""
        raise errors.LayerError(
            f"{base.describe(params)}: a window of {window[0]}x{window[1]}{spread} does not fit "
            f"into [H, W] = {list(sides)} with padding 'valid'. Use padding='same', a smaller "
            "window, or fewer strides before it"
        )
    return outputs[0], outputs[1]


class ConvParams(WindowParams):
    """Fields of every convolution."""

    kernel_size: int | tuple[int, int] = hyperparams.field(3, "Height and width of the kernel.")
    dilation: int | tuple[int, int] = hyperparams.field(
        1, "Distance of the kernel's positions; above 1 needs strides of 1."
    )
    activation: str = hyperparams.field("linear", "Name of a Keras activation.")
    use_bias: bool = hyperparams.field(True, "Adds a bias per output channel.")
    kernel_init: str = hyperparams.field("glorot_uniform", "Name of a Keras initializer.")
    kernel_init_args: dict[str, Any] = hyperparams.field({}, "Its arguments.")


def _checked(params: Any, inputs: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Return (B, output H, output W, C) of a convolution's input."""
    checks.arity(params, inputs, ("x",))
    batch, height, width, channels = checks.shape(params, inputs[0], LAYOUT, WAY_OUT)
    dilation, strides = pair(params.dilation), pair(params.strides)
    if max(dilation) > 1 and max(strides) > 1:
        raise errors.LayerError(
            f"{base.describe(params)}: dilation {dilation} together with strides {strides}, which "
            "TensorFlow does not compute. Leave one of them at 1"
        )
    sides = window_outputs(params, (height, width), pair(params.kernel_size), dilation)
    return batch, *sides, channels


def _checked_depthwise(params: Any, inputs: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Check what depthwise convolutions ask besides; return as `_checked`."""
    found = _checked(params, inputs)
    checks.positive(params, depth_multiplier=params.depth_multiplier)
    strides = pair(params.strides)
    if strides[0] != strides[1]:
        raise errors.LayerError(
            f"{base.describe(params)}: strides {strides}, but TensorFlow's depthwise convolution "
            "steps equally along H and W. Use one number, or a MaxPool2D for the rest"
        )
    return found


class Conv2D(Layer):
    """x: [B, H, W, C] → [B, H', W', filters].

    Variables: kernel [h, w, C / groups, filters], bias [filters]. FLOPs forward:
    2·B·H'·W'·h·w·(C / groups)·filters.
    """

    class Params(ConvParams):
        filters: int = hyperparams.required("Output channels.")
        groups: int = hyperparams.field(1, "Channels are convolved in as many separate groups.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = _checked(self, inputs)
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
            return Meta(
                output,
                dense.weights(self, kernel, self.filters),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=activation.kept_bytes(self, self.activation, output),
            )

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


def _depthwise(params: Any, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(
        x,
        kernel,
        (1, *pair(params.strides), 1),
        params.padding.upper(),
        dilations=pair(params.dilation),
    )


class DepthwiseConv2D(Layer):
    """x: [B, H, W, C] → [B, H', W', C·depth_multiplier], a kernel per channel.

    Variables: kernel [h, w, C, depth_multiplier], bias [C·depth_multiplier]. FLOPs forward:
    2·B·H'·W'·h·w·C·depth_multiplier.
    """

    class Params(ConvParams):
        depth_multiplier: int = hyperparams.field(1, "Output channels per input channel.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = _checked_depthwise(self, inputs)
            height, width = pair(self.kernel_size)
            kernel = (height, width, channels, self.depth_multiplier)
            units = channels * self.depth_multiplier
            output = tf.TensorSpec((batch, rows, columns, units), self.policy.compute)
            flops = 2 * batch * rows * columns * height * width * units
            return Meta(
                output,
                dense.weights(self, kernel, units),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=activation.kept_bytes(self, self.activation, output),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        return dense.finish(self.params, theta, _depthwise(self.params, x, theta["kernel"]))


class SeparableConv2D(Layer):
    """x: [B, H, W, C] → [B, H', W', filters]: depthwise, then 1×1, nothing in between.

    Variables: depthwise_kernel [h, w, C, depth_multiplier], pointwise_kernel
    [1, 1, C·depth_multiplier, filters], bias [filters]. FLOPs: the sum of both parts.
    """

    class Params(ConvParams):
        filters: int = hyperparams.required("Output channels.")
        depth_multiplier: int = hyperparams.field(1, "Channels in between per input channel.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            batch, rows, columns, channels = _checked_depthwise(self, inputs)
            checks.positive(self, filters=self.filters)
            policy = self.policy
            height, width = pair(self.kernel_size)
            middle = channels * self.depth_multiplier
            depthwise = VariableSpec(
                "depthwise_kernel",
                (height, width, channels, self.depth_multiplier),
                policy.variable,
                base.initializer(self.kernel_init, **self.kernel_init_args),
            )
            pointwise = dense.weights(
                self, (1, 1, middle, self.filters), self.filters, "pointwise_kernel"
            )
            between = tf.TensorSpec((batch, rows, columns, middle), policy.compute)
            output = tf.TensorSpec((batch, rows, columns, self.filters), policy.compute)
            flops = 2 * batch * rows * columns * middle * (height * width + self.filters)
            return Meta(
                output,
                (depthwise, *pointwise),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=base.spec_bytes(between)
                + activation.kept_bytes(self, self.activation, output),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        x = _depthwise(self.params, x, theta["depthwise_kernel"])
        y = tf.nn.convolution(x, theta["pointwise_kernel"], 1, "VALID")
        return dense.finish(self.params, theta, y)
