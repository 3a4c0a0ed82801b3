"""Layers in slices: a layer of a network that stands for several, each with a part of its weights.

So a layer larger than a device is cut like any others. The variable `kernel` of a layer `softmax`
in N slices is `softmax_0/kernel` to `softmax_{N-1}/kernel`. A tie that names the whole variables
holds for the slices, in order.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.base import Layer
from lingvo_gpipe.nests import SpecNest


class SlicedParams(Layer.Params):
    """Fields of layers that may be in slices: directly in a network, each slice is a layer."""

    slices: int | tuple[int, ...] = hyperparams.field(
        1, "Number of equal slices, or the size of each; a slice is a layer. 1: not sliced."
    )

    @abc.abstractmethod
    def in_slices(self, layers: Sequence[Layer.Params]) -> tuple[Layer.Params, ...]:
        """Return the layers that it stands for, if `slices` is not 1.

        Args:
            layers: params of all layers of the network, to which a tie may refer.
        """

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return self.slices if isinstance(self.slices, int) else len(self.slices)

    def divided_field(self) -> str:
        """Return the name of the field whose number is divided."""
        return "vocabulary"

    def slice_sizes(self) -> tuple[int, ...]:
        """Return the size of each slice: equal ones, the first ones larger by 1 if need be.

        Raises:
            LayerError: a slice would be empty, or the sizes do not add up.
        """
        slices, field = self.slices, self.divided_field()
        total: int = self.get(field)
        checks.positive(self, slices=slices, **{field: total})
        if isinstance(slices, tuple):
            if sum(slices) != total:
                raise errors.LayerError(
                    f"{base.describe(self)}: slices {slices} add up to {sum(slices)}, but "
                    f"{field}={total}. Change a size, or set slices={len(slices) or 1} for equal "
                    "ones"
                )
            return slices
        if slices > total:
            raise errors.LayerError(
                f"{base.describe(self)}: slices={slices}, but {field}={total}. Use 1 to {total}"
            )
        smaller, larger = divmod(total, slices)
        return tuple(smaller + (number < larger) for number in range(slices))

    def consecutive(self, layers: Sequence[Layer.Params] = ()) -> tuple[Layer.Params, ...]:
        """See `Layer.Params`."""
        return (self,) if self.slices == 1 else self.in_slices(layers)

    def fprop_meta(self, *inputs: SpecNest) -> base.Meta:
        """See `Layer.Params`.

        Raises:
            LayerError: it has slices inside another layer, where it is not several layers.
        """
        if self.slices != 1:
            raise errors.LayerError(
                f"{base.describe(self)}: slices={self.slices} inside another layer. Put it "
                "directly into the network, or set slices=1"
            )
        return super().fprop_meta(*inputs)


def in_slices(params: Layer.Params, number: int | tuple[int, ...]) -> Layer.Params:
    """Return a copy of a layer's Params in slices.

    Args:
        params: params of the layer.
        number: number of equal slices, or the size of each.

    Raises:
        LayerError: the layer cannot be divided.
    """
    if not isinstance(params, SlicedParams):
        raise errors.LayerError(
            f"{base.describe(params)}: it cannot be divided into slices. Embeddings, softmaxes "
            "over sequences, and layers with a feed-forward part can"
        )
    return params.copy().set(slices=number)


def whole(params: Layer.Params) -> Layer.Params:
    """Return a copy of a layer's Params that is not in slices."""
    return params.copy().set(slices=1) if isinstance(params, SlicedParams) else params


def firsts(of_slices: Sequence[int]) -> list[int]:
    """Return where each slice begins.

    >>> firsts((3, 3, 2))
    [0, 3, 6]
    """
    return list(itertools.accumulate(of_slices[:-1], initial=0))


def shared_fields(params: Layer.Params, share: float) -> dict[str, Any]:
    """Return the fields that a part has from the layer; of a stated cost, its share."""
    return {
        "dtype": params.dtype,
        "trainable": params.trainable,
        "training_only": params.training_only,
        "recompute": params.recompute,
        "cost": None if params.cost is None else params.cost * share,
    }


def ties(
    params: Layer.Params, of_slices: tuple[int, ...], layers: Sequence[Layer.Params]
) -> list[dict[str, str]]:
    """Return the field `tie` of each slice of a layer.

    Args:
        params: params of the layer.
        of_slices: sizes of its slices.
        layers: params of all layers of the network; empty: not checked.

    Raises:
        LayerError: a tie leads to a layer that is not sliced, or into other slices.
    """
    by_slice: list[dict[str, str]] = [{} for _ in of_slices]
    by_name = {layer.name: layer for layer in layers}
    for variable, path in params.tie.items():
        owner, _, rest = path.partition("/")
        if owner in by_name:
            _check_slices(params, of_slices, path, by_name[owner])
        for number, tie in enumerate(by_slice):
            tie[variable] = f"{owner}_{number}/{rest}"
    return by_slice


def fields_of_slices(
    params: SlicedParams,
    layers: Sequence[Layer.Params],
    reads: tuple[str, ...],
    running: str,
    writes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Return name, reads, writes, tie and shared fields of each slice of a layer.

    Each slice adds what it computes to a running value, which all but the first also read.

    Args:
        params: params of the layer.
        layers: params of all layers of the network, for ties.
        reads: names that every slice reads.
        running: name of the running value.
        writes: what the last slice writes in its place.
    """
    sizes = params.slice_sizes()
    last = len(sizes) - 1
    return [
        {
            "name": f"{params.name}_{number}",
            "reads": (*reads, running) if number else reads,
            "writes": writes if number == last else (running,),
            "tie": tie,
            **shared_fields(params, size / sum(sizes)),
        }
        for number, (size, tie) in enumerate(zip(sizes, ties(params, sizes, layers), strict=True))
    ]


def _check_slices(
    params: Layer.Params, of_slices: tuple[int, ...], path: str, owner: Layer.Params
) -> None:
    theirs: tuple[int, ...] = ()
    if isinstance(owner, SlicedParams) and owner.slices != 1:
        theirs = owner.slice_sizes()
    if theirs != of_slices:
        has = f"has slices of {list(theirs)}" if theirs else "is not sliced"
        raise errors.LayerError(
            f"{base.describe(params)}: slices of {list(of_slices)}, but tied to {path!r}, and "
            f"{owner.name} {has}. Set their fields slices alike"
        )


def inside(ids: tf.Tensor, first: int, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return which ids are in a slice, and their places in it; 0 for the others.

    Args:
        ids: integers of any shape.
        first: where the slice begins.
        size: its size.
    """
    ids = checks.as_ids(ids)
    places = ids - tf.constant(first, ids.dtype)
    is_inside = (places >= 0) & (places < tf.constant(size, ids.dtype))
    return is_inside, tf.where(is_inside, places, tf.zeros_like(places))


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
    if shapes[0] == shapes[1]:
        return name, dict(arguments)
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
    all_of, part = (
        {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}[like.mode]
        for shape in shapes
    )
    scaling = {"mode": like.mode, "distribution": like.distribution}
    return "VarianceScaling", {"scale": like.scale * part / all_of, **scaling}
