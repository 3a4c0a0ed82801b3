"""The dense layer, and what layers with a kernel share."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe.layers import base, checks, elementwise
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


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
    return y if x.shape.rank == 2 else tf.reshape(y, tf.concat([tf.shape(x)[:-1], [units]], 0))


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
        activation_bytes=elementwise.kept_bytes(params, params.activation, output),
    )


def finish(params: ActivatedKernelParams, theta: Theta, y: tf.Tensor) -> tf.Tensor:
    """Return activation(y + bias); see `ActivatedKernelParams`."""
    if params.use_bias:
        # On CPUs the gradient of bias_add sums rows in their own dtype: 1,024 rows of 0.01 in
        # bfloat16 become 4.0. The gradient of an addition is summed in float32.
        half = y.dtype == tf.bfloat16
        y = y + theta["bias"] if half else tf.nn.bias_add(y, theta["bias"])
    return elementwise.activation_function(params, params.activation)(y)
