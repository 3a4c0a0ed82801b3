"""What sliced layers have in common: sizes, names, ties and initial values of their slices.

The variable `kernel` of a layer `softmax` in N slices is `softmax_0/kernel` to
`softmax_{N-1}/kernel`. A tie that names the whole variables holds for the slices, in order.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base, checks, composite
from lingvo_gpipe.layers.base import Layer
from lingvo_gpipe.nests import Nest


class Sliced(composite.Composite):
    """Base of sliced layers: directly in a network several layers, elsewhere one layer of them."""

    class Params(composite.Composite.Params):
        slices: int | tuple[int, ...] = hyperparams.required(
            "Number of equal slices, or the size of each."
        )

        @abc.abstractmethod
        def slice_sizes(self) -> tuple[int, ...]:
            """Return the size of each slice."""

        @abc.abstractmethod
        def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
            """See `Layer.Params`."""

        def parts(self) -> dict[str, Layer.Params]:
            """See `Composite`."""
            return {part.name: part for part in self.consecutive()}

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`; each part reads and writes names, as it does in a network."""
            stream = dict(zip(self.reads, inputs, strict=True))
            for name, part in self.parts().items():
                stream[part.writes[0]] = call(name, *(stream[read] for read in part.reads))
            return stream[self.writes[0]]

    params: Params


@runtime_checkable
class HasSlices(Protocol):
    """Params of a layer that may be sliced."""

    def slice_sizes(self) -> tuple[int, ...]:
        """Return the size of each slice."""


def sizes(
    params: Layer.Params,
    slices: int | tuple[int, ...],
    total: int,
    setting: str,
    field: str = "slices",
) -> tuple[int, ...]:
    """Return the size of each slice: equal ones, the first ones larger by 1 if need be.

    Args:
        params: params of the layer, for messages.
        slices: their number, or the size of each.
        total: what is divided.
        setting: name of the field that holds `total`.
        field: name of the field that holds `slices`.

    Raises:
        LayerError: a slice would be empty, or the sizes do not add up.

    >>> sizes(base.Layer.Params(), 3, 8, "vocabulary")
    (3, 3, 2)
    """
    checks.positive(params, **{field: slices, setting: total})
    if isinstance(slices, tuple):
        if sum(slices) != total:
            raise errors.LayerError(
                f"{base.describe(params)}: {field} {slices} add up to {sum(slices)}, but "
                f"{setting}={total}. Change a size, or set {field}={len(slices) or 1} for equal "
                "ones"
            )
        return slices
    if slices > total:
        raise errors.LayerError(
            f"{base.describe(params)}: {field}={slices}, but {setting}={total}. Use 1 to {total}"
        )
    smaller, larger = divmod(total, slices)
    return tuple(smaller + (number < larger) for number in range(slices))


def check_whole(
    params: Layer.Params, slices: int | tuple[int, ...], setting: str = "slices"
) -> None:
    """Refuse slices of a layer inside another one, where it is not several layers."""
    if slices != 1:
        raise errors.LayerError(
            f"{base.describe(params)}: {setting}={slices} inside another layer. Put it directly "
            f"into the network, or set {setting}=1"
        )


def firsts(of_slices: Sequence[int]) -> list[int]:
    """Return where each slice begins.

    >>> firsts((3, 3, 2))
    [0, 3, 6]
    """
    return list(itertools.accumulate(of_slices[:-1], initial=0))


def names(params: Layer.Params, count: int) -> list[str]:
    """Return the names of the slices of a layer."""
    stem = params.name or composite.default_name(params)
    return [f"{stem}_{number}" for number in range(count)]


def shared_fields(params: Layer.Params, share: float) -> dict[str, Any]:
    """Return the fields that a part has from the layer; of a stated cost, its share."""
    return {
        "dtype": params.dtype,
        "batch_dim": params.batch_dim,
        "trainable": params.trainable,
        "training_only": params.training_only,
        "recompute": params.recompute,
        "cost": None if params.cost is None else params.cost * share,
    }


def ties(
    params: Layer.Params,
    of_slices: tuple[int, ...],
    layers: Sequence[Layer.Params],
    field: str = "slices",
) -> list[dict[str, str]]:
    """Return the field `tie` of each slice of a layer.

    Args:
        params: params of the layer.
        of_slices: sizes of its slices.
        layers: params of all layers of the network; empty: not checked.
        field: name of the field that holds the slices, for messages.

    Raises:
        LayerError: a tie leads to a layer that is not sliced, or into other slices.
    """
    found: list[dict[str, str]] = [{} for _ in of_slices]
    by_name = {layer.name: layer for layer in layers}
    for variable, path in params.tie.items():
        owner, _, rest = path.partition("/")
        if owner in by_name:
            _check_slices(params, of_slices, path, by_name[owner], field)
        for number, tie in enumerate(found):
            tie[variable] = f"{owner}_{number}/{rest}"
    return found


def _check_slices(
    params: Layer.Params, of_slices: tuple[int, ...], path: str, owner: Layer.Params, field: str
) -> None:
    sliced = isinstance(owner, HasSlices) and owner.consecutive() != (owner,)
    theirs = owner.slice_sizes() if sliced and isinstance(owner, HasSlices) else None
    if theirs == of_slices:
        return
    has = f"has {_described(theirs)}" if theirs else "is not sliced"
    raise errors.LayerError(
        f"{base.describe(params)}: {_described(of_slices)}, but tied to {path!r}, and {owner.name} "
        f"{has}. Set their fields {field} alike"
    )


def _described(of_slices: tuple[int, ...]) -> str:
    """Return how messages show sizes.

    >>> _described((3, 3, 2)), _described((4,) * 9)
    ('slices of 3, 3, 2', '9 slices of 4, 4, …, 4')
    """
    count = len(of_slices)
    if count < 5:
        return f"slices of {', '.join(map(str, of_slices))}"
    return f"{count} slices of {of_slices[0]}, {of_slices[1]}, …, {of_slices[-1]}"


def inside(ids: tf.Tensor, first: int, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return which ids are in a slice, and their places in it; 0 for the others.

    Args:
        ids: integers of any shape.
        first: where the slice begins.
        size: its size.
    """
    ids = checks.as_ids(ids)
    places = ids - tf.constant(first, ids.dtype)
    found = (places >= 0) & (places < tf.constant(size, ids.dtype))
    return found, tf.where(found, places, tf.zeros_like(places))


def initializer(
    params: Layer.Params,
    name: str,
    arguments: Mapping[str, Any],
    shapes: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[str, dict[str, Any]]:
    """Return an initializer of a slice of a matrix, whose values are distributed as in the whole.

    Those that scale by fan-in and fan-out use the fans of the whole matrix.

    Args:
        params: params of the layer, for messages.
        name: name of the Keras initializer of the whole.
        arguments: its arguments.
        shapes: of the whole and of the slice.

    Raises:
        LayerError: there is no such initializer, or its values depend on the whole matrix.
    """
    like = base.keras_initializer(name, arguments)
    # Their values depend on the whole matrix, not on its shape alone.
    of_the_whole = isinstance(like, keras.initializers.Orthogonal | keras.initializers.Identity)
    if of_the_whole or {"input_axes", "output_axes"} & arguments.keys():
        raise errors.LayerError(
            f"{base.describe(params)}: initializer {name!r} {dict(arguments)} depends on the whole "
            "matrix. Use one that draws each value alone, such as VarianceScaling"
        )
    if not isinstance(like, keras.initializers.VarianceScaling):
        return name, dict(arguments)
    whole, part = (_fan(like.mode, shape) for shape in shapes)
    if whole == part:
        return name, dict(arguments)
    scaling = {"mode": like.mode, "distribution": like.distribution}
    return "VarianceScaling", {"scale": like.scale * part / whole, **scaling}


def _fan(mode: str, shape: tuple[int, int]) -> float:
    """Return by what VarianceScaling divides."""
    return {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}[mode]
