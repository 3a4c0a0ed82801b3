"""Layers made of layers: one after the other, around a shortcut, side by side.

A cut does not separate the children of a composed layer. Children's variables are named below
them, `block/body/dense/kernel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import activation, base, joining
from lingvo_gpipe.layers.base import Layer, Meta
from lingvo_gpipe.layers.context import Context


def default_name(params: Any) -> str:
    """Return the name of a layer that was given none: `MaxPool2D` is max_pool2d."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", params.owner.__name__).lower()


def named(params: Any, children: Sequence[Any]) -> list[Any]:
    """Return copies of the children's params with a name each, `dense`, `dense_1`, … if unnamed.

    Args:
        params: of the layer around them, for the message.
        children: their params, in order.

    Raises:
        LayerError: two are called alike, or a name holds a slash.
    """
    taken = [child.name for child in children if child.name]
    wrong = [name for name in taken if "/" in name or taken.count(name) > 1]
    if wrong:
        raise errors.LayerError(
            f"{base.describe(params)}: no child can be called {wrong[0]!r}; names are unique among "
            "its children and hold no slash. Leave one empty to have it named"
        )
    seen = set(taken)
    copies = []
    for child in children:
        copy = child.copy()
        if not copy.name:
            stem, number = default_name(copy), 0
            copy.name = stem
            while copy.name in seen:
                number += 1
                copy.name = f"{stem}_{number}"
            seen.add(copy.name)
        copies.append(copy)
    return copies


def chain_meta(params: Any, children: Sequence[Any], inputs: tuple[Any, ...]) -> Meta:
    """Return the Meta of named children in order, each given what the one before it gives.

    Raises:
        LayerError: one reads another number of values than the one before it writes.
    """
    metas: list[Meta] = []
    values, before = inputs, "the layer itself reads"
    for child in children:
        metas.append(_one_meta(params, child, values, before))
        outputs = metas[-1].outputs
        values = (outputs,) if len(child.writes) == 1 else tuple(outputs)
        before = f"{child.name} writes"
    return base.sum_metas(values[0] if len(values) == 1 else values, metas)


def _one_meta(params: Any, child: Any, values: tuple[Any, ...], before: str) -> Meta:
    if len(child.reads) != len(values):
        raise errors.LayerError(
            f"{base.describe(params)}: child {child.name} reads {len(child.reads)} values "
            f"{child.reads!r}, but {before} {len(values)}. Inside, values are handed on by "
            "position; put it into the network itself to read the stream's names"
        )
    return base.child_meta(params, child.name, child, *values)


def inner(child: Any) -> Any:
    """Return a named child's params as inference has them; one that is handed values reads all.

    What a child gives is handed on by position, so one that would be left out stays.
    """
    own = child.owner.inference(child, tuple(child.reads))
    return own if own is not None and len(own.reads) == len(child.reads) else child.copy()


class Sequential(Layer):
    """Children in order; each reads, by position, what the one before it writes."""

    class Params(Layer.Params):
        layers: list[Layer.Params] = hyperparams.required("The children.")

    def __init__(self, params: Any) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in named(params, params.layers):
            self.add_child(child.name, child)

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> Meta:
        told = chain_meta(params, named(params, params.layers), inputs)
        count = len(told.outputs) if isinstance(told.outputs, tuple) else 1
        if count != len(params.writes):
            raise errors.LayerError(
                f"{base.describe(params)}: writes {params.writes!r}, but its last child gives "
                f"{count} values. Set its field writes to as many names"
            )
        return told

    @classmethod
    def inference(cls, params: Any, available: Collection[str]) -> Any:
        """Leave out what a first child gives up, such as a label; see `Layer.inference`."""
        own = super().inference(params, available)
        if own is None or not params.layers:
            return own
        first, *others = named(params, params.layers)
        kept = first.owner.inference(first, tuple(first.reads))
        if kept is not None and set(kept.reads) <= set(first.reads):
            places = [list(first.reads).index(name) for name in kept.reads]
            own.reads = tuple(params.reads[place] for place in places)
        else:
            kept = first
        own.layers = [kept, *(inner(child) for child in others)]
        return own

    @classmethod
    def served(cls, params: Any, outputs: Any) -> dict[str, Any]:
        """Tell what the last child tells; see `Layer.served`."""
        if not params.layers:
            return super().served(params, outputs)
        last = params.layers[-1].copy()
        last.writes = params.writes
        told: dict[str, Any] = last.owner.served(last, outputs)
        return told

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """See `Layer.fprop`."""
        for name in self.children:
            inputs = self.child(name, theta, inputs, ctx)
        return inputs


class Residual(Layer):
    """x → activation(shortcut(x) + body(x)); without a shortcut, x itself is added.

    It may read several names: the body gets all, the shortcut the first.
    """

    class Params(Layer.Params):
        body: list[Layer.Params] = hyperparams.required("Layers of the body, in order.")
        shortcut: list[Layer.Params] = hyperparams.field(
            [], "Layers that project x to the body's shape; none: x itself."
        )
        activation: str = hyperparams.field("linear", "Keras activation of the sum.")

    def __init__(self, params: Any) -> None:
        """See `Layer`."""
        super().__init__(params)
        for name, child in self._parts(params).items():
            self.add_child(name, child)

    @staticmethod
    def _parts(params: Any) -> dict[str, Any]:
        parts = {"body": Sequential.Params(layers=params.body, reads=params.reads)}
        if params.shortcut:
            parts["shortcut"] = Sequential.Params(layers=params.shortcut)
        return parts

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> Meta:
        parts = cls._parts(params)
        metas = [base.child_meta(params, "body", parts["body"], *inputs)]
        if "shortcut" in parts:
            metas.append(base.child_meta(params, "shortcut", parts["shortcut"], inputs[0]))
        first = metas[1].outputs if "shortcut" in parts else inputs[0]
        output = joining.sum_meta(params, (first, metas[0].outputs))
        told = base.sum_metas(output, metas)
        function_bytes = activation.kept_bytes(params, params.activation, output)
        return dataclasses.replace(told, activation_bytes=told.activation_bytes + function_bytes)

    @classmethod
    def inference(cls, params: Any, available: Collection[str]) -> Any:
        """See `Layer.inference`."""
        own = super().inference(params, available)
        if own is not None:
            own.body = [inner(child) for child in named(params, params.body)]
            own.shortcut = [inner(child) for child in named(params, params.shortcut)]
        return own

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """See `Layer.fprop`."""
        x = inputs[0] if len(self.params.reads) > 1 else inputs
        if "shortcut" in self.children:
            x = self.child("shortcut", theta, x, ctx)
        total = tf.cast(x, self.policy.compute) + self.child("body", theta, inputs, ctx)
        return activation.function(self.params, self.params.activation)(total)


class Parallel(Layer):
    """x → branches of x, added or concatenated along the last side."""

    class Params(Layer.Params):
        branches: list[Layer.Params] = hyperparams.required("Layers that each read x.")
        merge: Literal["add", "concat"] = hyperparams.field("add", "How their outputs are joined.")

    def __init__(self, params: Any) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in named(params, params.branches):
            self.add_child(child.name, child)

    @classmethod
    def _meta(cls, params: Any, *inputs: Any) -> Meta:
        children = named(params, params.branches)
        if not children:
            raise errors.LayerError(f"{base.describe(params)}: has no branches. Give at least one")
        own = "the layer itself reads"
        metas = [_one_meta(params, child, inputs, own) for child in children]
        outputs = tuple(meta.outputs for meta in metas)
        if params.merge == "add":
            return base.sum_metas(joining.sum_meta(params, outputs), metas)
        joined = joining.concat_meta(params, outputs, -1)
        told = base.sum_metas(joined.outputs, metas)
        return dataclasses.replace(
            told, activation_bytes=told.activation_bytes + joined.activation_bytes
        )

    @classmethod
    def inference(cls, params: Any, available: Collection[str]) -> Any:
        """See `Layer.inference`."""
        own = super().inference(params, available)
        if own is not None:
            own.branches = [inner(child) for child in named(params, params.branches)]
        return own

    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """See `Layer.fprop`."""
        values = [self.child(name, theta, inputs, ctx) for name in self.children]
        values = [tf.cast(value, self.policy.compute) for value in values]
        return tf.add_n(values) if self.params.merge == "add" else tf.concat(values, -1)
