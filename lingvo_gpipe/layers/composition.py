"""Layers made of layers: one after the other, around a shortcut, side by side.

A cut does not separate the children of a composed layer. Children's variables are named below
them, `block/body/dense/kernel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import activation, base, joining
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


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
    own = child.inference(tuple(child.reads))
    return own if own is not None and len(own.reads) == len(child.reads) else child.copy()


class Sequential(Layer):
    """Children in order; each reads, by position, what the one before it writes."""

    class Params(Layer.Params):
        layers: list[Layer.Params] = hyperparams.required("The children.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            told = chain_meta(self, named(self, self.layers), inputs)
            count = len(told.outputs) if isinstance(told.outputs, tuple) else 1
            if count != len(self.writes):
                raise errors.LayerError(
                    f"{base.describe(self)}: writes {self.writes!r}, but its last child gives "
                    f"{count} values. Set its field writes to as many names"
                )
            return told

        def _inference(self, available: Collection[str]) -> Self:
            """Leave out what the first child does not need, such as a label."""
            del available
            served = self.copy()
            if not self.layers:
                return served
            first, *others = named(self, self.layers)
            kept = first.inference(tuple(first.reads))
            if kept is not None and set(kept.reads) <= set(first.reads):
                places = [list(first.reads).index(name) for name in kept.reads]
                served.reads = tuple(self.reads[place] for place in places)
            else:
                kept = first
            served.layers = [kept, *(inner(child) for child in others)]
            return served

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return what the last child returns."""
            if not self.layers:
                return super().served(outputs)
            last = self.layers[-1].copy()
            last.writes = self.writes
            return last.served(outputs)

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in named(params, params.layers):
            self.add_child(child.name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
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

        def _parts(self) -> dict[str, Any]:
            parts = {"body": Sequential.Params(layers=self.body, reads=self.reads)}
            if self.shortcut:
                parts["shortcut"] = Sequential.Params(layers=self.shortcut)
            return parts

        def _meta(self, *inputs: SpecNest) -> Meta:
            parts = self._parts()
            metas = [base.child_meta(self, "body", parts["body"], *inputs)]
            if "shortcut" in parts:
                metas.append(base.child_meta(self, "shortcut", parts["shortcut"], inputs[0]))
            first = metas[1].outputs if "shortcut" in parts else inputs[0]
            output = joining.sum_meta(self, (first, metas[0].outputs))
            told = base.sum_metas(output, metas)
            kept = told.activation_bytes + activation.kept_bytes(self, self.activation, output)
            return dataclasses.replace(told, activation_bytes=kept)

        def _inference(self, available: Collection[str]) -> Self:
            del available
            served = self.copy()
            served.body = [inner(child) for child in named(self, self.body)]
            served.shortcut = [inner(child) for child in named(self, self.shortcut)]
            return served

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for name, child in params._parts().items():
            self.add_child(name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
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

        def _meta(self, *inputs: SpecNest) -> Meta:
            children = named(self, self.branches)
            if not children:
                raise errors.LayerError(
                    f"{base.describe(self)}: has no branches. Give at least one"
                )
            own = "the layer itself reads"
            metas = [_one_meta(self, child, inputs, own) for child in children]
            outputs = tuple(meta.outputs for meta in metas)
            if self.merge == "add":
                return base.sum_metas(joining.sum_meta(self, outputs), metas)
            joined = joining.concat_meta(self, outputs, -1)
            told = base.sum_metas(joined.outputs, metas)
            return dataclasses.replace(
                told, activation_bytes=told.activation_bytes + joined.activation_bytes
            )

        def _inference(self, available: Collection[str]) -> Self:
            del available
            served = self.copy()
            served.branches = [inner(child) for child in named(self, self.branches)]
            return served

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in named(params, params.branches):
            self.add_child(child.name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        values = [self.child(name, theta, inputs, ctx) for name in self.children]
        values = [tf.cast(value, self.policy.compute) for value in values]
        return tf.add_n(values) if self.params.merge == "add" else tf.concat(values, -1)
