"""Activations, by the name Keras gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

# Their gradient needs their output alone, which counts anyway.
_KEEPS_NO_INPUT = ("linear", "relu", "sigmoid", "tanh", "softmax", "elu", "exponential")


def _is_elementwise(name: str, value: Any) -> bool:
    """Whether a member of keras.activations takes x alone and gives x's shape."""
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


def function(params: Any, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the Keras activation called `name`, which gives the shape it takes.

    Args:
        params: of the layer that asks, for the message.
        name: such as "relu"; "linear" is the identity.

    Raises:
        LayerError: Keras has none, or it needs arguments.
    """
    if name not in _FUNCTIONS:
        near = errors.nearest(name, _FUNCTIONS) or sorted(_FUNCTIONS)
        raise errors.LayerError(
            f"{base.describe(params)}: no activation {name!r}; nearest {', '.join(near)}. Set its "
            "field activation to one of keras.activations that takes x alone and keeps its shape"
        )
    return _FUNCTIONS[name]


def kept_bytes(params: Any, name: str, output: tf.TensorSpec) -> int:
    """Return the bytes a backward pass keeps of an operation followed by an activation.

    The activation's output counts, and its input too where its gradient needs that.

    Raises:
        LayerError: there is no such activation.
    """
    function(params, name)
    return base.spec_bytes(output) * (1 if name in _KEEPS_NO_INPUT else 2)


class Activation(Layer):
    """x: [...] floating → the same shape.

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
        return function(self.params, self.params.activation)(x)
