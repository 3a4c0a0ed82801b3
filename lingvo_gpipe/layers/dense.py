"""Dense, activations and dropout; what layers with a kernel share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, keras_references
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

# Their gradient needs only their output, which is counted in any case.
_KEEPS_NO_INPUT = ("linear", "relu", "sigmoid", "tanh", "softmax", "elu", "exponential")


# Of these, glu changes the shape, and threshold needs more arguments.
_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    name: value
    for name, value in keras_references.ACTIVATIONS.items()
    if name not in ("glu", "threshold")
}


def activation_function(params: Layer.Params, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the Keras activation called `name`, which keeps the shape of its argument.

    Args:
        params: params of the layer that asks, for the message.
        name: such as "relu"; "linear" is the identity.

    Raises:
        LayerError: Keras has none, or it needs more arguments.
    """
    if name not in _FUNCTIONS:
        raise errors.LayerError(
            f"{base.describe(params)}: no activation {name!r}; "
            f"{errors.suggestion(name, _FUNCTIONS)}. Set its field activation to one of "
            "keras.activations that takes x alone and keeps its shape"
        )
    return _FUNCTIONS[name]


def kept_bytes(params: Layer.Params, name: str, output: tf.TensorSpec) -> int:
    """Return the bytes that a backward pass keeps of an operation followed by an activation.

    The activation's output counts, and its input too where its gradient needs that.

    Raises:
        LayerError: there is no such activation.
    """
    activation_function(params, name)
    return base.spec_bytes(output) * (1 if name in _KEEPS_NO_INPUT else 2)


class Activation(Layer):
    """x: [...] floating → [...] in the compute dtype.

    FLOPs: 0 (only multiply-adds of weighted operations count).
    """

    class Params(Layer.Params):
        activation: str = hyperparams.required("Name of a Keras activation.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            shape = checks.shape(self, inputs[0], "[...]", "It takes one tensor")
            output = tf.TensorSpec(shape, self.policy.compute)
            return Meta(output, activation_bytes=kept_bytes(self, self.activation, output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        x = precision.cast(inputs, self.policy.compute)
        return activation_function(self.params, self.params.activation)(x)


class Dropout(Layer):
    """x: [...] floating → [...] in the compute dtype; in training a share `rate` of it is 0.

    The other elements are divided by 1 − rate. The mask is a function of (seed, step, global
    micro-batch, path), so a recomputation draws it again. It is drawn in float32 under every
    policy: bfloat16 has 128 numbers in [0.5, 1). FLOPs: 0.
    """

    class Params(Layer.Params):
        rate: float = hyperparams.required("Share of elements that are dropped, in [0, 1).")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            checks.share(self, "rate", self.rate)
            shape = checks.shape(self, inputs[0], "[B, ..., D]", "It drops elements of one tensor")
            output = tf.TensorSpec(shape, self.policy.compute)
            mask = tf.TensorSpec(shape, tf.bool)
            kept = base.spec_bytes([output, mask]) if self.rate else 0  # without a rate it passes x
            return Meta(output, activation_bytes=kept)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.compute)
        if not ctx.training:
            return x
        return drop(x, self.params.rate, ctx)


def drop(x: tf.Tensor, rate: float, ctx: Context) -> tf.Tensor:
    """Return x with a share `rate` of its elements 0 and the others scaled up; see `Dropout`."""
    if rate == 0.0:
        return x
    keep = tf.random.stateless_uniform(tf.shape(x), ctx.seed) >= rate
    return tf.where(keep, x * tf.constant(1.0 / (1.0 - rate), x.dtype), tf.zeros([], x.dtype))


class KernelParams(Layer.Params):
    """Fields of layers that multiply by a kernel."""

    use_bias: bool = hyperparams.field(True, "Adds a bias per output feature.")
    kernel_init: str = hyperparams.field("glorot_uniform", "Name of a Keras initializer.")
    kernel_init_args: dict[str, Any] = hyperparams.field({}, "Its arguments.")


class ActivatedKernelParams(KernelParams):
    """Fields of layers with a kernel and an activation after it."""

    activation: str = hyperparams.field("linear", "Name of a Keras activation.")


class Dense(Layer):
    """x: [..., D] floating → [..., units] in the compute dtype.

    Variables: kernel [D, units], bias [units]. FLOPs: 2·rows·D·units forward.
    """

    class Params(ActivatedKernelParams):
        units: int = hyperparams.required("Output features.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            *rows, depth = checks.shape(self, inputs[0], "[B, ..., D]", "Put a Flatten before it")
            checks.positive(self, units=self.units)
            output = tf.TensorSpec((*rows, self.units), self.policy.compute)
            flops = 2 * math.prod(rows) * depth * self.units
            return activated_meta(
                self, output, weights(self, (depth, self.units), self.units), flops
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del ctx
        x = precision.cast(inputs, self.policy.compute)
        return finish(self.params, theta, project(x, theta["kernel"]))


def project(x: tf.Tensor, kernel: tf.Tensor, *, transposed: bool = False) -> tf.Tensor:
    """Return x [..., D] · kernel [D, U] (or [U, D], transposed): [..., U].

    Rows are flattened before: a batched product would make one weight gradient per example.
    """
    units = kernel.shape[0] if transposed else kernel.shape[1]
    rows = tf.reshape(x, (-1, x.shape[-1])) if x.shape.rank != 2 else x
    y = tf.matmul(rows, kernel, transpose_b=transposed)
    return y if x.shape.rank == 2 else tf.reshape(y, [*base.sizes(x)[:-1], units])


def weights(
    params: KernelParams, kernel_shape: tuple[int, ...], units: int, kernel_name: str = "kernel"
) -> tuple[VariableSpec, ...]:
    """Return the specs of a kernel and, if `params.use_bias`, of its bias [units]."""
    dtype = params.policy.variable
    create = base.initializer(params.kernel_init, **params.kernel_init_args)
    kernel = VariableSpec(kernel_name, kernel_shape, dtype, create)
    if not params.use_bias:
        return (kernel,)
    zeros = base.initializer("zeros")
    return kernel, VariableSpec("bias", (units,), dtype, zeros, group="bias")


def backward_flops(params: Layer.Params, flops: int) -> int:
    """Return FLOPs of the backward pass of weighted multiply-adds: by input and by weight."""
    return flops * (2 if params.trainable else 1)


def activated_meta(
    params: ActivatedKernelParams,
    output: tf.TensorSpec,
    variables: tuple[VariableSpec, ...],
    flops: int,
) -> Meta:
    """Return what is known of a layer whose activation alone is kept for the backward pass."""
    return Meta(
        output,
        variables,
        flops_forward=flops,
        flops_backward=backward_flops(params, flops),
        activation_bytes=kept_bytes(params, params.activation, output),
    )


def finish(params: ActivatedKernelParams, theta: Theta, y: tf.Tensor) -> tf.Tensor:
    """Return activation(y + bias); see `ActivatedKernelParams`."""
    if params.use_bias:
        # On CPUs the gradient of bias_add sums rows in their own dtype: 1,024 rows of 0.01 in
        # bfloat16 become 4.0. The gradient of an addition is summed in float32.
        half = y.dtype == tf.bfloat16
        y = y + theta["bias"] if half else tf.nn.bias_add(y, theta["bias"])
    return activation_function(params, params.activation)(y)
