"""A feed-forward part in slices of its hidden units; a running sum adds up what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base, checks, composite, dense
from lingvo_gpipe.layers.base import Layer, Meta
from lingvo_gpipe.layers.dense import Dense
from lingvo_gpipe.layers.elementwise import Dropout
from lingvo_gpipe.layers.sliced import slices
from lingvo_gpipe.nests import Nest, SpecNest


class FeedForwardSlice(composite.Composite):
    """x: [..., D] floating → [..., units] in the compute dtype: what its children make of x.

    It adds a second name that it reads, sum: [..., units]. Each child reads what the one before it
    writes.
    """

    class Params(composite.Composite.Params):
        layers: list[Layer.Params] = hyperparams.required("The children, in order.")

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return composite.named(self, self.layers)

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, *before = inputs
            y = call.chain(call.names, x)
            return call.add(*before, y) if before else y

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, sum"))
            *_, depth = checks.shape(self, inputs[0], "[B, ..., D]", "It reads features")
            meta = super()._meta(*inputs)
            if meta.outputs.shape[-1] != depth:
                raise errors.LayerError(
                    f"{base.describe(self)}: x has {depth} features, but the output "
                    f"{meta.outputs.shape[-1]}. Make them equal"
                )
            return meta

    params: Params


class FeedForwardEnd(composite.Composite):
    """x, y: [B, ..., units] floating → x + dropout(y) in the compute dtype."""

    class Params(composite.Composite.Params):
        reads = ("x", "y")
        rate: float = hyperparams.field(0.0, "Rate of the dropout on y.")

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return {"feed_forward_dropout": Dropout.Params(rate=self.rate)}

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, y = inputs
            return call.add(x, call("feed_forward_dropout", y))

    params: Params


class BlockParams(composite.Composite.Params):
    """Fields of layers that end with a feed-forward part, which may be in slices.

    Children: feed_forward_norm, feed_forward (Dense, Dropout, Dense) and feed_forward_dropout are
    the last ones; fields `hidden` and `dropout`. In N slices it is N + 2 layers: {name} without the
    part (`ends_at_norm`), {name}_0, {name}_1, … (FeedForwardSlice) and {name}_end.
    """

    feed_forward_slices: int | tuple[int, ...] = hyperparams.field(
        1,
        "Number of equal slices of the feed-forward part's hidden units, or the size of each; a "
        "slice is a layer. 1: not sliced.",
    )
    ends_at_norm: bool = hyperparams.field(
        False, "Without its feed-forward part: writes x, and the normed x that the part reads."
    )

    def slice_sizes(self) -> tuple[int, ...]:
        """Return the number of hidden units of each slice."""
        field = "feed_forward_slices"
        return slices.sizes(self, self.feed_forward_slices, self.get("hidden"), "hidden", field)

    def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
        """See `Layer.Params`.

        Raises:
            LayerError: a cost is stated, of which nobody knows the parts.
        """
        if self.feed_forward_slices == 1:
            return (self,)
        if self.cost is not None:
            raise errors.LayerError(
                f"{base.describe(self)}: cost={self.cost}, but it is several layers. Set the "
                "network's costs, or leave the field empty"
            )
        x, normed, total = (f"{self.name}_{part}" for part in ("x", "normed", "sum"))
        inner = {path: to for path, to in self.tie.items() if path.startswith("feed_forward/")}
        outer = {path: to for path, to in self.tie.items() if path not in inner}
        begin = self.copy().set(
            feed_forward_slices=1, ends_at_norm=True, writes=(x, normed), tie=outer
        )
        part = self.copy().set(reads=(normed,), writes=(total,), tie=inner)
        body = self.parts()["feed_forward"]
        children = list(composite.named(body, body.get("layers")).values())
        of_slices = feed_forward_slices(part, children, self.slice_sizes(), layers, "feed_forward")
        end = FeedForwardEnd.Params(
            name=f"{self.name}_end",
            rate=self.get("dropout"),
            reads=(x, total),
            writes=self.writes,
            **slices.shared_fields(self, 0.0),
        )
        return (begin, *of_slices, end)

    def without_the_part(self, parts: dict[str, Layer.Params]) -> dict[str, Layer.Params]:
        """Return the children; with `ends_at_norm`, those before the feed-forward part."""
        if self.ends_at_norm:
            del parts["feed_forward"], parts["feed_forward_dropout"]
        return parts

    def check_whole(self) -> None:
        """Refuse slices of a layer inside another one."""
        slices.check_whole(self, self.feed_forward_slices, "feed_forward_slices")


class SlicedFeedForward(slices.Sliced):
    """x: [..., units] floating → [..., units]: Dense, Dropout, Dense, the hidden units in slices.

    Layers: {name}_0, {name}_1, … (FeedForwardSlice), each with the children middle, dropout and
    output. The first one has the bias of the output. Masks of dropout differ from slice to slice.
    Initial values are distributed as those of whole kernels.
    """

    class Params(slices.Sliced.Params, dense.ActivatedKernelParams):
        units: int = hyperparams.required("Features of x and of the output.")
        hidden: int = hyperparams.required("Features in the middle, which are divided.")
        dropout: float = hyperparams.field(0.0, "Rate on the features in the middle.")
        activation = "relu"

        def slice_sizes(self) -> tuple[int, ...]:
            """Return the number of hidden units of each slice."""
            return slices.sizes(self, self.slices, self.hidden, "hidden")

        def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
            """See `Layer.Params`."""
            checks.positive(self, units=self.units)
            kernel: dict[str, Any] = {
                "kernel_init": self.kernel_init,
                "kernel_init_args": self.kernel_init_args,
                "use_bias": self.use_bias,
            }
            middle = Dense.Params(
                name="middle", units=self.hidden, activation=self.activation, **kernel
            )
            output = Dense.Params(name="output", units=self.units, **kernel)
            children = [middle, Dropout.Params(name="dropout", rate=self.dropout), output]
            return feed_forward_slices(self, children, self.slice_sizes(), layers)

    params: Params


def feed_forward_slices(
    params: Layer.Params,
    children: Sequence[Layer.Params],
    sizes: tuple[int, ...],
    layers: Sequence[Layer.Params],
    around: str = "",
) -> tuple[FeedForwardSlice.Params, ...]:
    """Return the slices of a feed-forward part.

    Args:
        params: params of the layer; its tie is that of the slices.
        children: of the whole part, named; the first and the last are Dense, and the last one's
            units are those of x too.
        sizes: hidden units of each slice.
        layers: params of all layers of the network, for ties.
        around: name of the child of each slice that holds the others; empty: none.
    """
    field = "feed_forward_slices" if around else "slices"
    names, ties = slices.names(params, len(sizes)), slices.ties(params, sizes, layers, field)
    bias = "/".join(part for part in (around, children[-1].name, "bias") if part)
    for tie in ties[1:]:
        tie.pop(bias, None)  # the first slice alone has it
    running, last = f"{params.name}_sum", len(sizes) - 1
    parts = []
    for number, size in enumerate(sizes):
        inner: list[Layer.Params] = _divided(params, children, size, is_first=number == 0)
        if around:
            inner = [composite.Sequential.Params(name=around, layers=inner)]
        parts.append(
            FeedForwardSlice.Params(
                name=names[number],
                layers=inner,
                reads=(params.reads[0], running) if number else params.reads[:1],
                writes=params.writes if number == last else (running,),
                tie=ties[number],
                **slices.shared_fields(params, size / sum(sizes)),
            )
        )
    return tuple(parts)


def _divided(
    params: Layer.Params, children: Sequence[Layer.Params], size: int, *, is_first: bool
) -> list[Layer.Params]:
    """Return the children with `size` hidden units."""
    middle, *between, output = (child.copy() for child in children)
    if not isinstance(middle, Dense.Params) or not isinstance(output, Dense.Params):
        raise errors.LayerError(f"{base.describe(params)}: only a Dense can be divided")
    hidden, units = middle.units, output.units
    for each, whole, part in (
        (middle, (units, hidden), (units, size)),
        (output, (hidden, units), (size, units)),
    ):
        name, arguments = slices.initializer(
            params, each.kernel_init, each.kernel_init_args, (whole, part)
        )
        each.set(kernel_init=name, kernel_init_args=arguments)
    middle.units = size
    output.use_bias = output.use_bias and is_first
    return [middle, *between, output]
