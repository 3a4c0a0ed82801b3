"""Embedding of ids, and positions without weights. FLOPs: 0."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, VariableSpec
from lingvo_gpipe.layers.context import Context

# Standard deviation D^-1/2 for a table [V, D].
TABLE_INIT = "VarianceScaling"
TABLE_INIT_ARGS: dict[str, Any] = {
    "scale": 1.0,
    "mode": "fan_out",
    "distribution": "untruncated_normal",
}


class Embedding(Layer):
    """ids: [...] integer in [0, vocabulary) → [..., units].

    Variable: table [vocabulary, units], which is read as it is kept: rows are cast, not the table,
    and gradients of a row that is read often are added up in the table's own dtype. An id outside
    stops a CPU program with an error; on accelerators it reads zeros.
    """

    class Params(Layer.Params):
        vocabulary: int = hyperparams.required("Number of ids.")
        units: int = hyperparams.required("Features of an id.")
        scale: bool = hyperparams.field(False, "Multiplies by the square root of units.")
        table_init: str = hyperparams.field(TABLE_INIT, "Name of a Keras initializer.")
        table_init_args: dict[str, Any] = hyperparams.field(TABLE_INIT_ARGS, "Its arguments.")

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> Meta:
        checks.arity(params, inputs, ("x",))
        checks.positive(params, vocabulary=params.vocabulary, units=params.units)
        shape = checks.any_shape(params, inputs[0], "[...]", "Read the field that holds the ids")
        if not inputs[0].dtype.is_integer:
            raise errors.LayerError(
                f"{base.describe(params)}: expected integer ids, got {inputs[0].dtype.name} "
                f"{list(shape)}. Read the field that holds the ids"
            )
        policy = precision.policy(params.dtype)
        table = VariableSpec(
            "table",
            (params.vocabulary, params.units),
            policy.variable,
            base.initializer(params.table_init, **params.table_init_args),
            compute=policy.variable,
        )
        output = tf.TensorSpec((*shape, params.units), policy.compute)
        return Meta(output, (table,), activation_bytes=base.spec_bytes(output))

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """See `Layer.fprop`."""
        del ctx
        found = precision.cast(tf.gather(theta["table"], inputs), self.policy.compute)
        if self.params.scale:
            found *= tf.constant(math.sqrt(self.params.units), found.dtype)
        return found


class PositionalEncoding(Layer):
    """x: [B, T, D] → x + sin and cos of t at wavelengths from 2π to 2π·max_wavelength.

    The first half of D are sines, the second cosines (Lingvo's and tensor2tensor's order of
    Vaswani et al. 2017, section 3.5); an odd last feature gets 0. t counts from 0, or is what the
    second name it reads says, an integer [B, T].
    """

    class Params(Layer.Params):
        max_wavelength: float = hyperparams.field(10000.0, "Of the slowest sine, in units of 2π.")

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> Meta:
        checks.arity(params, inputs, ("x", "x, position"))
        shape = checks.shape(params, inputs[0], "[B, T, D]", "Put an Embedding before it")
        for position in inputs[1:]:
            found = checks.any_shape(params, position, "[B, T]", "Set its field reads")
            if found != shape[:2] or not position.dtype.is_integer:
                raise errors.LayerError(
                    f"{base.describe(params)}: position is {position.dtype.name} {list(found)}, "
                    f"expected integers {list(shape[:2])}. Set its field reads"
                )
        return Meta(tf.TensorSpec(shape, precision.policy(params.dtype).compute))

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """See `Layer.fprop`."""
        del theta, ctx
        policy = self.policy
        x, *position = inputs if isinstance(inputs, tuple) else (inputs,)
        depth = x.shape[-1]
        half = depth // 2
        slowest = math.log(self.params.max_wavelength)
        rates = [math.exp(-slowest * i / max(half - 1, 1)) for i in range(half)]
        times = position[0] if position else tf.range(tf.shape(x)[1])[tf.newaxis]
        times = tf.cast(times, policy.variable)
        angles = times[..., tf.newaxis] * tf.constant(rates, policy.variable)
        waves = tf.concat([tf.sin(angles), tf.cos(angles)], -1)
        waves = tf.pad(waves, [[0, 0], [0, 0], [0, depth - 2 * half]])
        return precision.cast(x, policy.compute) + precision.cast(waves, policy.compute)
