"""Layers made of layers: in order, or around a shortcut.

`Composite` is their base. A cut does not separate the children of a composite. Children's variables
are named below it, `block/body/dense/kernel`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, reshaping
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class Calls:
    """Calls of a composite's children, each with its part of theta and of the context.

    Attributes:
        parts: params of the children by name, in the order in which they run.
        training: whether this is a training pass; a Meta is that of one.
    """

    def __init__(self, layer: Composite, theta: Theta, ctx: Context) -> None:
        """Call children of `layer`, with its theta and context."""
        self._layer, self._theta, self._ctx = layer, theta, ctx
        self._params: Composite.Params = layer.params
        self.parts = {name: child.params for name, child in layer.children.items()}
        self.training = ctx.training

    def __call__(self, name: str, *inputs: Nest) -> Nest:
        """Call the child `name` on the values that it reads; return what it writes."""
        return self._layer.child(
            name, self._theta, inputs[0] if len(inputs) == 1 else inputs, self._ctx
        )

    def cast(self, x: Nest) -> Nest:
        """Return a floating tensor in the composite's compute dtype."""
        return precision.cast(x, self._params.policy.compute)

    def add(self, *values: Nest) -> Nest:
        """Return the sum of tensors of one shape, in the compute dtype."""
        first, *others = (self.cast(value) for value in values)
        return first + others[0] if len(others) == 1 else tf.add_n([first, *others])

    def concat(self, values: Sequence[Nest]) -> Nest:
        """Return tensors concatenated along their last axis, in the compute dtype."""
        return tf.concat([self.cast(value) for value in values], -1)

    def chain(self, names: Iterable[str], *inputs: Nest) -> Nest:
        """Call children in order; each reads, by position, what the one before it writes.

        Raises:
            LayerError: a child reads another number of values than the one before it writes.
        """
        values, before = inputs, "the layer itself reads"
        for name in names:
            reads, writes = self.parts[name].reads, self.parts[name].writes
            if len(reads) != len(values):
                raise errors.LayerError(
                    f"{base.describe(self._params)}: child {name} reads {len(reads)} values "
                    f"{reads!r}, but {before} {len(values)}. Inside, values are passed on by "
                    "position; put it into the network itself to read the stream's names"
                )
            outputs = self(name, *values)
            values = (outputs,) if len(writes) == 1 else tuple(outputs)
            before = f"{name} writes"
        return values[0] if len(values) == 1 else values


class SpecCalls(Calls):
    """Calls on specs; they collect the Metas of the children.

    Attributes:
        metas: Metas of the children called so far, variables named as the composite sees them.
    """

    def __init__(self, params: Composite.Params) -> None:
        """Call children of the layer of `params`; none yet."""
        self._params = params
        self._kept_bytes = 0
        self.parts = params.parts()
        self.training = True
        self.metas: list[Meta] = []

    def __call__(self, name: str, *inputs: SpecNest) -> SpecNest:
        """See `Calls`."""
        child = _inherit(self._params, self.parts[name])
        meta = child.fprop_meta(*inputs)
        variables = tuple(dataclasses.replace(v, path=f"{name}/{v.path}") for v in meta.variables)
        self.metas.append(
            dataclasses.replace(meta, variables=variables, name=name, kind=child.kind_name())
        )
        return meta.outputs

    def cast(self, x: SpecNest) -> SpecNest:
        """See `Calls`."""
        floating = isinstance(x, tf.TensorSpec) and x.dtype.is_floating
        return tf.TensorSpec(x.shape, self._params.policy.compute) if floating else x

    def add(self, *values: SpecNest) -> SpecNest:
        """See `Calls`."""
        return reshaping.sum_spec(self._params, values)

    def concat(self, values: Sequence[SpecNest]) -> SpecNest:
        """See `Calls`."""
        output = reshaping.concat_spec(self._params, tuple(values), -1)
        self._kept_bytes += base.spec_bytes(output)
        return output

    def meta(self, outputs: SpecNest) -> Meta:
        """Return the composite's Meta: the sum of those of the children that were called.

        Each child's `activation_bytes` count what it keeps; those of `concat` are added.
        """
        metas = self.metas
        return Meta(
            outputs=outputs,
            variables=tuple(v for m in metas for v in m.variables),
            flops_forward=sum(m.flops_forward for m in metas),
            flops_backward=sum(m.flops_backward for m in metas),
            activation_bytes=sum(m.activation_bytes for m in metas) + self._kept_bytes,
            losses=tuple(loss for m in metas for loss in m.losses),
            metrics=tuple(metric for m in metas for metric in m.metrics),
            undivided=next((m.undivided for m in metas if m.undivided), ""),
            children=tuple(metas),
        )


class Composite(Layer):
    """Base of layers made of layers.

    A subclass defines in its Params `parts`, its children, and `flow`, what each of them reads. One
    flow serves the Meta, where values are specs, and `fprop`, where they are tensors. What a flow
    cannot say on specs (a reshape, a mask) is done before it, in `_meta` and in `fprop`:

        def _meta(self, image: tf.TensorSpec) -> Meta:
            return super()._meta(merged_spec(image))

        def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
            return self.run_parts(theta, ctx, merged(inputs))

    Attributes:
        children: layers by name. Theta and state of a child are `theta[name]` and `state[name]`.
    """

    class Params(Layer.Params):
        """Fields of every layer; `parts` and `flow` make a composite of them."""

        @abc.abstractmethod
        def parts(self) -> dict[str, Layer.Params]:
            """Return the params of all children by name, in the order of their variables."""

        def flow(self, call: Calls, *inputs: Nest) -> Nest:
            """Return the outputs, computed by `call(name, *values)`; default: a chain of all parts.

            Args:
                call: calls children, and adds, casts and concatenates.
                *inputs: the values that the layer reads; specs or tensors.
            """
            return call.chain(call.parts, *inputs)

        def _meta(self, *inputs: SpecNest) -> Meta:
            calls = SpecCalls(self)
            return calls.meta(self.flow(calls, *inputs))

    params: Params

    def __init__(self, params: Params) -> None:
        """Make the layer and its children, which inherit dtype and freezing."""
        super().__init__(params)
        self.children: dict[str, Layer] = {
            name: _inherit(self.params, child).instantiate()
            for name, child in params.parts().items()
        }

    def child(self, name: str, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """Run the child `name` on its part of theta and state."""
        return self.children[name].run(theta.get(name, {}), inputs, ctx.child(name))

    def find(self, path: str) -> Layer:
        """See `Layer.find`."""
        name, _, rest = path.partition("/")
        return self.children[name].find(rest) if name else self

    def run_parts(self, theta: Theta, ctx: Context, *inputs: Nest) -> Nest:
        """Return what the flow returns for tensors."""
        return self.params.flow(Calls(self, theta, ctx), *inputs)

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        values = inputs if len(self.params.reads) > 1 else (inputs,)
        return self.run_parts(theta, ctx, *values)


def _inherit(parent: Layer.Params, child: Layer.Params) -> Layer.Params:
    """Return a copy of `child` with the fields that it leaves open taken from `parent`."""
    copy = child.copy()
    if copy.dtype is None:
        copy.dtype = parent.dtype
    if not parent.trainable:
        copy.trainable = False
    return copy


def named(layers: Sequence[Layer.Params]) -> list[Layer.Params]:
    """Return copies of layers' params, with names `dense`, `dense_1`, … where they have none.

    Raises:
        LayerError: two have one name, or TensorFlow has no scope of a name.
    """
    taken = {layer.name for layer in layers if layer.name}
    numbers: dict[str, itertools.count[int]] = {}  # stem → numbers not tried yet
    copies = []
    for layer in layers:
        copy = layer.copy()
        if not copy.name:
            # MaxPool2D is max_pool2d.
            stem = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", base.class_name(copy)).lower()
            copy.name = next(
                name
                for number in numbers.setdefault(stem, itertools.count())
                if (name := f"{stem}_{number}" if number else stem) not in taken
            )
        copies.append(copy)
    check_names(copies)
    return copies


def check_names(layers: Sequence[Layer.Params]) -> None:
    """Refuse names that lead to more than one layer.

    Raises:
        LayerError: two have one name, or TensorFlow has no scope of a name.
    """
    seen: set[str] = set()
    for name in (layer.name for layer in layers):
        if name in seen:
            raise errors.LayerError(f"two layers are named {name!r}. Rename one of them")
        if not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.>-]*", name):
            raise errors.LayerError(
                f"layer name {name!r} is not made of letters, digits and _.>-, of which _ > - "
                "cannot be the first. Rename the layer"
            )
        seen.add(name)


def inferred(children: Sequence[Layer.Params]) -> list[Layer.Params]:
    """Return named children's params as inference has them.

    Values are passed on by position, so a child that would be left out, or read less, stays.
    """
    served = []
    for child in named(children):
        changed = child.inference()
        same = changed is not None and len(changed.reads) == len(child.reads)
        served.append(changed if changed is not None and same else child)
    return served


class Sequential(Composite):
    """What its first child reads → what its last child writes, of any shapes and dtypes.

    Each child reads, by position, what the one before it writes.
    """

    class Params(Composite.Params):
        layers: list[Layer.Params] = hyperparams.required("The children.")

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return {layer.name: layer for layer in named(self.layers)}

        def _meta(self, *inputs: SpecNest) -> Meta:
            meta = super()._meta(*inputs)
            count = len(meta.outputs) if isinstance(meta.outputs, tuple) else 1
            if count != len(self.writes):
                raise errors.LayerError(
                    f"{base.describe(self)}: writes {self.writes!r}, but its last child returns "
                    f"{count} values. Set its field writes to as many names"
                )
            return meta

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the ranges of what the first child reads, by the names of the layer itself."""
            if not self.layers:
                return {}
            first, *_ = self.parts().values()
            names = dict(zip(first.reads, self.reads, strict=False))
            return {
                names[name]: values._replace(
                    setting=f"{first.name}.{values.setting}",
                    weights=None if values.weights is None else names[values.weights],
                )
                for name, values in first.value_ranges().items()
            }

        def _inference(self) -> Self:
            """Leave out what the first child does not need, such as a label."""
            served = self.copy()
            if not self.layers:
                return served
            first, *others = self.parts().values()
            changed = first.inference()
            if changed is not None and set(changed.reads) <= set(first.reads):
                places = [list(first.reads).index(name) for name in changed.reads]
                served.reads = tuple(self.reads[place] for place in places)
            else:
                changed = first
            served.layers = [changed, *inferred(others)]
            return served

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return what the last child returns."""
            if not self.layers:
                return super().served(outputs)
            return self.layers[-1].copy().set(writes=self.writes).served(outputs)

    params: Params


class Residual(Composite):
    """x: [B, ...] floating → x + body(x). Of several names that it reads, x is the first."""

    class Params(Composite.Params):
        body: list[Layer.Params] = hyperparams.required("Layers of the body, in order.")

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return {"body": Sequential.Params(layers=self.body, reads=self.reads)}

        def flow(self, call: Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            return call.add(inputs[0], call("body", *inputs))

        def _meta(self, *inputs: SpecNest) -> Meta:
            meta = super()._meta(*inputs)
            kept = meta.activation_bytes + base.spec_bytes(meta.outputs)
            return dataclasses.replace(meta, activation_bytes=kept)

        def _inference(self) -> Self:
            return self.copy().set(body=inferred(self.body))

    params: Params
