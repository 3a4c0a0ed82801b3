"""Blocks that end with a feed-forward part, and that part in slices of its hidden units."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import cast

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base, checks, composite, slices
from lingvo_gpipe.layers.base import Layer, Meta
from lingvo_gpipe.layers.dense import Dense, Dropout
from lingvo_gpipe.layers.normalization import LayerNorm
from lingvo_gpipe.nests import Nest, SpecNest

# Activations of all hidden units together; a slice has only its own.
_OVER_UNITS = ("softmax", "log_softmax", "sparsemax")


class FeedForwardSlice(composite.Composite):
    """x: [..., D] floating → [..., D] in the compute dtype: some hidden units of a larger part.

    It adds a second name that it reads, sum: [..., D].
    """

    class Params(composite.Composite.Params):
        layers: list[Layer.Params] = hyperparams.required("Dense, Dropout, Dense.")

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return {"feed_forward": composite.Sequential.Params(layers=self.layers)}

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, *before = inputs
            y = call("feed_forward", x)
            return call.add(*before, y) if before else y

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, sum"))
            return super()._meta(*inputs)

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


class BlockParams(slices.SlicedParams, composite.Composite.Params):
    """Fields of pre-norm blocks: x + dropout(branch(norm(x))), one branch after the other.

    Children: {branch}_norm, {branch}, {branch}_dropout. The last branch is feed_forward (Dense,
    Dropout, Dense). In N slices it is N + 2 layers: {name} without that branch (`ends_at_norm`),
    {name}_0, {name}_1, … (FeedForwardSlice) and {name}_end. The first slice has the bias of the
    output. Masks of dropout differ from slice to slice. Initial values are distributed as those of
    whole kernels.
    """

    units: int = hyperparams.required("Features of x and of the output.")
    heads: int = hyperparams.required("Number of attention heads.")
    hidden: int = hyperparams.required("Hidden units of the feed-forward part.")
    dropout: float = hyperparams.field(0.0, "Rate on each branch's output.")
    attention_dropout: float = hyperparams.field(0.0, "Rate on attention weights.")
    ends_at_norm: bool = hyperparams.field(
        False, "Without its feed-forward part: writes x, and the normed x that the part reads."
    )

    @property
    @abc.abstractmethod
    def branches(self) -> tuple[str, ...]:
        """Names of the branches, in the order in which they run."""

    @abc.abstractmethod
    def branch(self, name: str) -> Layer.Params:
        """Return the params of a branch."""

    def parts(self) -> dict[str, Layer.Params]:
        """See `Composite`; the branches are in the order in which they run."""
        parts: dict[str, Layer.Params] = {}
        for name in self.branches:
            parts[f"{name}_norm"] = LayerNorm.Params()
            parts[name] = self.branch(name)
            parts[f"{name}_dropout"] = Dropout.Params(rate=self.dropout)
        if self.ends_at_norm:
            del parts["feed_forward"], parts["feed_forward_dropout"]
        return parts

    def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
        """See `Composite`.

        Args:
            call: see there.
            *inputs: x; then for each branch, in order, a tuple of its other inputs.
        """
        x, *others = inputs
        x = call.cast(x)
        for name, more in zip(self.branches, others, strict=True):
            y = call(f"{name}_norm", x)
            if name not in call.parts:
                return x, y
            x = call.add(x, call(f"{name}_dropout", call(name, y, *more)))
        return x

    def divided_field(self) -> str:
        """See `SlicedParams`."""
        return "hidden"

    def in_slices(self, layers: Sequence[Layer.Params]) -> tuple[Layer.Params, ...]:
        """See `SlicedParams`.

        Raises:
            LayerError: a cost is stated, of which nobody knows the parts.
        """
        if self.cost is not None:
            raise errors.LayerError(
                f"{base.describe(self)}: cost={self.cost}, but it is several layers. Leave the "
                "field empty"
            )
        x, normed, total = (f"{self.name}_{part}" for part in ("x", "normed", "sum"))
        inner = {path: to for path, to in self.tie.items() if path.startswith("feed_forward/")}
        outer = {path: to for path, to in self.tie.items() if path not in inner}
        begin = self.copy().set(slices=1, ends_at_norm=True, writes=(x, normed), tie=outer)
        end = FeedForwardEnd.Params(
            name=f"{self.name}_end",
            rate=self.dropout,
            reads=(x, total),
            writes=self.writes,
            **slices.shared_fields(self, 0.0),
        )
        return (begin, *self._feed_forward_slices(layers, normed, total, inner), end)

    def _feed_forward_slices(
        self, layers: Sequence[Layer.Params], normed: str, total: str, tie: dict[str, str]
    ) -> list[FeedForwardSlice.Params]:
        """Return the slices, which read `normed` and write `total`."""
        part = self.copy().set(tie=tie)
        body = self.branch("feed_forward")
        children = composite.named(body.get("layers"))
        if cast(Dense.Params, children[0]).activation in _OVER_UNITS:
            raise errors.LayerError(
                f"{base.describe(self)}: its activation is one of all hidden units together. "
                "Leave out slices"
            )
        bias = f"feed_forward/{children[-1].name}/bias"
        parts = []
        fields = slices.fields_of_slices(part, layers, (normed,), total, (total,))
        for number, (size, each) in enumerate(zip(self.slice_sizes(), fields, strict=True)):
            if number:
                each["tie"].pop(bias, None)  # the first slice alone has it
            layer = FeedForwardSlice.Params(
                layers=_divided(self, children, size, has_bias=number == 0), **each
            )
            parts.append(layer)
        return parts


def _divided(
    params: Layer.Params, children: Sequence[Layer.Params], size: int, *, has_bias: bool
) -> list[Layer.Params]:
    """Return copies of a feed-forward part's children, named, with `size` hidden units."""
    middle, *between, output = (child.copy() for child in children)
    middle, output = cast(Dense.Params, middle), cast(Dense.Params, output)
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
    output.use_bias = output.use_bias and has_bias
    return [middle, *between, output]
