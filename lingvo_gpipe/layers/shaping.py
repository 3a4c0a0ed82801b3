"""Layers that only change the shape. FLOPs: 0; nothing is kept."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


def _with_batch(x: tf.Tensor, sides: tuple[int, ...]) -> tf.Tensor:
    """Reshape all sides of x but the first, whose size may be unknown while tracing."""
    return tf.reshape(x, tf.concat([tf.shape(x)[:1], sides], 0))


class Flatten(Layer):
    """x: [B, ...] of any dtype → [B, product of the other sides]."""

    class Params(Layer.Params):
        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, *sides = checks.any_shape(self, inputs[0], "[B, ...]", "Give it one tensor")
            return Meta(tf.TensorSpec((batch, math.prod(sides)), inputs[0].dtype))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return _with_batch(inputs, (math.prod(inputs.shape[1:]),))


class Reshape(Layer):
    """x: [B, ...] of any dtype → [B, *shape]."""

    class Params(Layer.Params):
        shape: tuple[int, ...] = hyperparams.required(
            "All sides but the first; one of them may be -1."
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, *sides = checks.any_shape(self, inputs[0], "[B, ...]", "Give it one tensor")
            shape = _filled(self, tuple(sides))
            return Meta(tf.TensorSpec((batch, *shape), inputs[0].dtype))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return _with_batch(inputs, _filled(self.params, tuple(inputs.shape[1:])))


def _filled(params: Any, sides: tuple[int, ...]) -> tuple[int, ...]:
    """Return `params.shape` with its -1 worked out from the input's sides."""
    shape, wanted = tuple(params.shape), math.prod(sides)
    free = shape.count(-1)
    known = math.prod(side for side in shape if side != -1)
    fits = known > 0 and wanted % known == 0 if free == 1 else free == 0 and known == wanted
    if not fits or min(shape, default=1) < -1:
        raise errors.LayerError(
            f"{base.describe(params)}: shape {list(shape)} does not hold the {wanted} elements of "
            f"{list(sides)}. Let their products be equal; one side may be -1"
        )
    return tuple(wanted // known if side == -1 else side for side in shape)
