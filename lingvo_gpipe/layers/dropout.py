"""Dropout."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class Dropout(Layer):
    """x: [...] floating → the same shape; in training, `rate` of it 0 and the rest / (1 − rate).

    The mask is a function of (seed, step, global micro-batch, path), so a recomputation draws it
    again. It is drawn in float32 at every policy: bfloat16 has 128 numbers in [0.5, 1).
    FLOPs: 0.
    """

    class Params(Layer.Params):
        rate: float = hyperparams.required("Share of elements that are dropped, in [0, 1).")
        noise_shape: tuple[int | None, ...] | None = hyperparams.field(
            None,
            "One entry per side: 1 draws once for the whole side (drop-path: "
            "(None, 1, 1, 1)), None per element. None: per element everywhere.",
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            checks.share(self, "rate", self.rate)
            shape = checks.shape(self, inputs[0], "[B, ..., D]", "It drops elements of one tensor")
            noise = self.noise_shape
            if noise is not None and (len(noise) != len(shape) or not set(noise) <= {1, None}):
                raise errors.LayerError(
                    f"{base.describe(self)}: noise_shape {noise} does not fit x of shape "
                    f"{list(shape)}. Give 1 or None for each of its {len(shape)} sides"
                )
            output = tf.TensorSpec(shape, self.policy.compute)
            mask = tf.TensorSpec(shape, tf.bool)
            return Meta(output, activation_bytes=base.spec_bytes([output, mask]))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.compute)
        if not ctx.training:
            return x
        return drop(x, self.params.rate, ctx.seed, self.params.noise_shape)


def drop(
    x: tf.Tensor, rate: float, seed: tf.Tensor, noise_shape: tuple[int | None, ...] | None = None
) -> tf.Tensor:
    """Return x with `rate` of its elements 0 and the others scaled up; see `Dropout`."""
    if rate == 0.0:
        return x
    sides = tf.shape(x)
    if noise_shape is not None:
        sides = tf.stack([sides[i] if n is None else n for i, n in enumerate(noise_shape)])
    keep = tf.random.stateless_uniform(sides, seed) >= rate
    return tf.where(keep, x * tf.constant(1.0 / (1.0 - rate), x.dtype), tf.zeros([], x.dtype))
