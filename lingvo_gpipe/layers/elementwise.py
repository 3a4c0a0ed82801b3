"""Layers that treat each element alone: activations by the name of a Keras one, and dropout."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

# Their gradient needs only their output, which is counted in any case.
_KEEPS_NO_INPUT = ("linear", "relu", "sigmoid", "tanh", "softmax", "elu", "exponential")


def _is_elementwise(name: str, value: object) -> bool:
    """Whether a member of keras.activations takes only x and returns x's shape."""
    if name in ("get", "serialize", "deserialize", "glu") or not inspect.isfunction(value):
        return False
    needed = [
        p
        for p in inspect.signature(value).parameters.values()
        if p.default is inspect.Parameter.empty
    ]
    return len(needed) == 1


_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    name: value for name, value in vars(keras.activations).items() if _is_elementwise(name, value)
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
        near = errors.nearest(name, _FUNCTIONS) or sorted(_FUNCTIONS)
        raise errors.LayerError(
            f"{base.describe(params)}: no activation {name!r}; nearest {', '.join(near)}. Set its "
            "field activation to one of keras.activations that takes x alone and keeps its shape"
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
        noise_shape: tuple[int | None, ...] | None = hyperparams.field(
            None,
            "One entry per axis: 1 draws once for the whole axis (drop-path: "
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
                    f"{list(shape)}. Give 1 or None for each of its {len(shape)} axes"
                )
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
        return drop(x, self.params.rate, ctx.seed, self.params.noise_shape)


def drop(
    x: tf.Tensor, rate: float, seed: tf.Tensor, noise_shape: tuple[int | None, ...] | None = None
) -> tf.Tensor:
    """Return x with a share `rate` of its elements 0 and the others scaled up; see `Dropout`."""
    if rate == 0.0:
        return x
    dims = tf.shape(x)
    if noise_shape is not None:
        dims = tf.stack([dims[i] if n is None else n for i, n in enumerate(noise_shape)])
    keep = tf.random.stateless_uniform(dims, seed) >= rate
    return tf.where(keep, x * tf.constant(1.0 / (1.0 - rate), x.dtype), tf.zeros([], x.dtype))
