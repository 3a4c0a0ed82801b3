"""The dense layer."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe import hyperparams, precision
from lingvo_gpipe.layers import activation, base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class Dense(Layer):
    """x: [..., D] → [..., units], in the layer's compute dtype.

    Variables: kernel [D, units], bias [units]. FLOPs: 2·rows·D·units forward.
    """

    class Params(Layer.Params):
        units: int = hyperparams.required("Output features.")
        activation: str = hyperparams.field("linear", "Name of a Keras activation.")
        use_bias: bool = hyperparams.field(True, "Adds a bias of shape [units].")
        kernel_init: str = hyperparams.field("glorot_uniform", "Name of a Keras initializer.")
        kernel_init_args: dict[str, Any] = hyperparams.field({}, "Its arguments.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            *rows, depth = checks.shape(self, inputs[0], "[B, ..., D]", "Put a Flatten before it")
            checks.positive(self, units=self.units)
            policy = self.policy
            output = tf.TensorSpec((*rows, self.units), policy.compute)
            flops = 2 * math.prod(rows) * depth * self.units
            return Meta(
                output,
                weights(self, (depth, self.units), self.units),
                flops_forward=flops,
                flops_backward=backward_flops(self, flops),
                activation_bytes=activation.kept_bytes(self, self.activation, output),
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
    params: Any, kernel_shape: tuple[int, ...], units: int, kernel_name: str = "kernel"
) -> tuple[VariableSpec, ...]:
    """Return the specs of a kernel and, if `params.use_bias`, of its bias [units]."""
    dtype = precision.policy(params.dtype).variable
    create = base.initializer(params.kernel_init, **params.kernel_init_args)
    kernel = VariableSpec(kernel_name, kernel_shape, dtype, create)
    if not params.use_bias:
        return (kernel,)
    zeros = base.initializer("zeros")
    return kernel, VariableSpec("bias", (units,), dtype, zeros, group="bias")


def backward_flops(params: Any, flops: int) -> int:
    """Return FLOPs of the backward pass of weighted multiply-adds: by input and by weight."""
    return flops * (2 if params.trainable else 1)


def finish(params: Any, theta: dict[str, Any], y: tf.Tensor) -> tf.Tensor:
    """Add the bias and apply the activation, as `params` say."""
    if params.use_bias:
        # The gradient of bias_add adds rows up in their own dtype on CPUs: 1,024 bfloat16 ones of
        # 0.01 become 4.0. That of a sum is added up in float32.
        half = y.dtype == tf.bfloat16
        y = y + theta["bias"] if half else tf.nn.bias_add(y, theta["bias"])
    return activation.function(params, params.activation)(y)
