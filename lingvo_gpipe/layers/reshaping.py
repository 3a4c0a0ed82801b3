"""Layers without weights that pass on, add, concatenate or flatten tensors. FLOPs: 0."""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class Identity(Layer):
    """Any nests of tensors → the same nests, in order.

    A copy of `x` as `skip` before a branch: `Identity.Params(reads=("x",), writes=("skip",))`. A
    value that is read again later needs no copy as long as no layer has written its name again.
    """

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            return Meta(inputs[0] if len(inputs) == 1 else tuple(inputs))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return inputs


def passing(params: Layer.Params) -> Identity.Params | None:
    """Return what replaces, in inference, a layer that writes the first name it reads unchanged.

    None where it writes it under the same name, which then keeps its value.
    """
    if params.writes == params.reads[:1]:
        return None
    return Identity.Params(
        name=params.name,
        reads=params.reads[:1],
        writes=params.writes,
        dtype=params.dtype,
    )


def sum_spec(params: Layer.Params, inputs: tuple[SpecNest, ...]) -> tf.TensorSpec:
    """Return the spec of the sum of inputs of one shape, in the layer's compute dtype.

    Raises:
        LayerError: their shapes differ.
    """
    way_out = "Give it tensors of one shape"
    shapes = [checks.shape(params, x, "[B, ...]", way_out) for x in inputs]
    if len(set(shapes)) > 1:
        raise errors.LayerError(
            f"{base.describe(params)}: shapes {[list(s) for s in shapes]} cannot be added. "
            "Project the others to one of them before"
        )
    return tf.TensorSpec(shapes[0], params.policy.compute)


class Add(Layer):
    """x, y, …: [B, ...] floating, of one shape → their sum [B, ...] in the compute dtype."""

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            return Meta(sum_spec(self, inputs))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        total, *others = (precision.cast(x, self.policy.compute) for x in values)
        for other in others:
            total += other
        return total


def concat_spec(params: Layer.Params, inputs: tuple[SpecNest, ...], axis: int) -> tf.TensorSpec:
    """Return the spec of a concatenation along `axis`, in the layer's compute dtype.

    Raises:
        LayerError: the inputs differ in rank or along another axis, or have no such axis.
    """
    shapes = [checks.shape(params, x, "[B, ...]", "Give it tensors") for x in inputs]
    rank = len(shapes[0])
    place = axis % rank if -rank <= axis < rank else 0
    others = {(*shape[:place], *shape[place + 1 :]) for shape in shapes}
    if place == 0 or len(others) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise errors.LayerError(
            f"{base.describe(params)}: shapes {[list(s) for s in shapes]} cannot be concatenated "
            f"along axis {axis}. All other dimensions must be equal, and it may not be the first"
        )
    dims = list(shapes[0])
    dims[place] = sum(shape[place] for shape in shapes)
    return tf.TensorSpec(dims, params.policy.compute)


class Concat(Layer):
    """x, y, …: [B, ...] floating, equal but along `axis` → concatenated, in the compute dtype."""

    class Params(Layer.Params):
        axis: int = hyperparams.field(-1, "Axis along which they are concatenated; not the first.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            output = concat_spec(self, inputs, self.axis)
            return Meta(output, activation_bytes=base.spec_bytes(output))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        return tf.concat([precision.cast(x, self.policy.compute) for x in values], self.params.axis)


class Flatten(Layer):
    """x: [B, ...] of any dtype → [B, product of the other dimensions]."""

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            batch, *dims = checks.any_shape(self, inputs[0], "[B, ...]", "Give it one tensor")
            return Meta(tf.TensorSpec((batch, math.prod(dims)), inputs[0].dtype))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return tf.reshape(inputs, [base.sizes(inputs)[0], math.prod(inputs.shape[1:])])
