"""Layers between names of the stream: hand on, rename, add, concatenate. FLOPs: 0."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class Identity(Layer):
    """Any nest of tensors → the same."""

    class Params(Layer.Params):
        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            return Meta(inputs[0])

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return inputs


def passing(params: Any) -> Any:
    """Return what is left of a layer that hands its first name on, in inference.

    None where it writes the name that it reads, which then keeps its value.
    """
    if params.training_only or tuple(params.writes) == tuple(params.reads[:1]):
        return None
    kept = {name: getattr(params, name) for name in ("name", "writes", "dtype", "batch_dim")}
    return Identity.Params(reads=params.reads[:1], **kept)


class Rename(Layer):
    """Hands the values of the names it reads to the names it writes, in order.

    A copy of `x` as `skip` before a branch: `Rename.Params(reads=("x",), writes=("skip",))`. A
    value read again later needs no rename as long as no layer has written its name again.
    """

    class Params(Layer.Params):
        def _meta(self, *inputs: SpecNest) -> Meta:
            reads, writes = tuple(self.reads), tuple(self.writes)
            if len(reads) != len(writes) or len(set(writes)) != len(writes):
                raise errors.LayerError(
                    f"{base.describe(self)}: reads {reads}, writes {writes}. Give one name to "
                    "write for each that is read, all different"
                )
            return Meta(inputs[0] if len(inputs) == 1 else tuple(inputs))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        return inputs


def sum_meta(params: Any, inputs: tuple[Any, ...]) -> tf.TensorSpec:
    """Return what the sum of equal-shaped inputs is.

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
    return tf.TensorSpec(shapes[0], precision.policy(params.dtype).compute)


class Add(Layer):
    """Names it reads, each [...] floating of one shape → their sum, in order."""

    class Params(Layer.Params):
        def _meta(self, *inputs: SpecNest) -> Meta:
            return Meta(sum_meta(self, inputs))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        total, *others = (precision.cast(x, self.policy.compute) for x in values)
        for other in others:
            total += other
        return total


def concat_meta(params: Any, inputs: tuple[Any, ...], axis: int) -> Meta:
    """Return the Meta of a concatenation along `axis`.

    Raises:
        LayerError: the inputs differ in rank or in another side, or have no such axis.
    """
    shapes = [checks.shape(params, x, "[B, ...]", "Give it tensors") for x in inputs]
    rank = len(shapes[0])
    place = axis % rank if -rank <= axis < rank else 0
    others = {(*shape[:place], *shape[place + 1 :]) for shape in shapes}
    if place == 0 or len(others) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise errors.LayerError(
            f"{base.describe(params)}: shapes {[list(s) for s in shapes]} cannot be concatenated "
            f"along axis {axis}. All sides but that one must be equal, and it may not be the first"
        )
    sides = list(shapes[0])
    sides[place] = sum(shape[place] for shape in shapes)
    output = tf.TensorSpec(sides, precision.policy(params.dtype).compute)
    return Meta(output, activation_bytes=base.spec_bytes(output))


class Concat(Layer):
    """Names it reads, floating and equal but for one side → joined along it, in order."""

    class Params(Layer.Params):
        axis: int = hyperparams.field(-1, "Side along which they are joined; not the first.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            return concat_meta(self, inputs, self.axis)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        return tf.concat([precision.cast(x, self.policy.compute) for x in values], self.params.axis)
