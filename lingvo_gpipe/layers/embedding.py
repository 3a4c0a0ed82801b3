"""Embedding of ids, and positions without weights. FLOPs: 0."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

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

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            checks.positive(self, vocabulary=self.vocabulary, units=self.units)
            shape = checks.any_shape(self, inputs[0], "[...]", "Read the field that holds the ids")
            if not inputs[0].dtype.is_integer:
                raise errors.LayerError(
                    f"{base.describe(self)}: expected integer ids, got {inputs[0].dtype.name} "
                    f"{list(shape)}. Read the field that holds the ids"
                )
            policy = self.policy
            table = VariableSpec(
                "table",
                (self.vocabulary, self.units),
                policy.variable,
                base.initializer(self.table_init, **self.table_init_args),
                compute=policy.variable,
            )
            output = tf.TensorSpec((*shape, self.units), policy.compute)
            return Meta(output, (table,), activation_bytes=base.spec_bytes(output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
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

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, position"))
            shape = checks.shape(self, inputs[0], "[B, T, D]", "Put an Embedding before it")
            for position in inputs[1:]:
                found = checks.any_shape(self, position, "[B, T]", "Set its field reads")
                if found != shape[:2] or not position.dtype.is_integer:
                    raise errors.LayerError(
                        f"{base.describe(self)}: position is {position.dtype.name} {list(found)}, "
                        f"expected integers {list(shape[:2])}. Set its field reads"
                    )
            return Meta(tf.TensorSpec(shape, self.policy.compute))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
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
