"""Checks of a layer's inputs and fields: layer, what was expected, what came, the way out.

And the dtype of ids: a field of small or unsigned integers is as good as one of int32.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest


def arity(params: base.Layer.Params, inputs: tuple[SpecNest, ...], forms: tuple[str, ...]) -> None:
    """Check how many names a layer reads.

    Args:
        params: params of the layer.
        inputs: inputs of `_meta`.
        forms: the legal forms of `reads`, such as ("x", "x, mask").

    Raises:
        LayerError: no form has as many names.
    """
    if len(inputs) in {len(form.split(",")) for form in forms}:
        return
    raise errors.LayerError(
        f"{base.describe(params)}: reads {len(inputs)} names {params.reads!r}, expected "
        f"{' or '.join(f'({form})' for form in forms)}. Set its field reads"
    )


def shape(params: base.Layer.Params, spec: SpecNest, layout: str, way_out: str) -> tuple[int, ...]:
    """Return the static shape of one floating input, checked against a layout.

    Args:
        params: params of the layer.
        spec: the input.
        layout: such as "[B, H, W, C]"; "[B, ..., D]" is any rank of at least two.
        way_out: what the user may do, the message's last sentence.

    Raises:
        LayerError: it is not a floating tensor of that rank, or a dimension is unknown.
    """
    dims = any_shape(params, spec, layout, way_out)
    if not spec.dtype.is_floating:
        raise errors.LayerError(
            f"{base.describe(params)}: expected floating {layout}, got {spec.dtype.name} "
            f"{list(dims)}. Scale or embed it before"
        )
    return dims


def any_shape(
    params: base.Layer.Params, spec: SpecNest, layout: str, way_out: str
) -> tuple[int, ...]:
    """Return the static shape of one input of any dtype; see `shape`."""
    if not isinstance(spec, tf.TensorSpec):
        raise errors.LayerError(
            f"{base.describe(params)}: expected one tensor {layout}, got {type(spec).__name__}. "
            f"{way_out}"
        )
    dims = layout.strip("[]").split(", ")
    rank = spec.shape.rank
    known = len(dims) - dims.count("...")
    fits = rank is not None and (rank >= known if "..." in dims else rank == known)
    if not fits or not spec.shape.is_fully_defined():
        raise errors.LayerError(
            f"{base.describe(params)}: expected {layout} with known dimensions, got shape "
            f"{spec.shape}. {way_out}"
        )
    return tuple(spec.shape.as_list())


def as_ids(values: tf.Tensor) -> tf.Tensor:
    """Return integers in int32 or int64, which every operation on ids and labels takes.

    Small and unsigned integers have no differences, and do not hold every other id.
    """
    if values.dtype in (tf.int32, tf.int64):
        return values
    return tf.cast(values, tf.int64 if values.dtype.size > 2 else tf.int32)


def positive(params: base.Layer.Params, **values: int | tuple[int, ...]) -> None:
    """Check that fields which are sizes are at least 1.

    Raises:
        LayerError: one is not.
    """
    for name, value in values.items():
        if any(size < 1 for size in (value if isinstance(value, tuple) else (value,))):
            raise errors.LayerError(
                f"{base.describe(params)}: field {name} is {value}, expected at least 1"
            )


def share(params: base.Layer.Params, name: str, value: float) -> None:
    """Check that a field is in [0, 1).

    Raises:
        LayerError: it is not.
    """
    if not 0.0 <= value < 1.0:
        raise errors.LayerError(
            f"{base.describe(params)}: field {name} is {value}, expected 0 <= {name} < 1"
        )


def returned(
    params: base.Layer.Params,
    reads: Sequence[tuple[SpecNest, Nest]],
    writes: Sequence[SpecNest],
    outputs: Sequence[Nest],
) -> None:
    """Check what a layer's fprop has returned by its Meta.

    Shapes are compared where the inputs have those for which the Meta was made.

    Args:
        params: params of the layer.
        reads: (spec, value) of each name that it reads.
        writes: spec of each name that it writes.
        outputs: value of each of them.

    Raises:
        LayerError: structure, dtype, rank or shape is another one.
    """
    planned = all(
        spec.shape == tensor.shape
        for specs, values in reads
        for spec, tensor in zip(tf.nest.flatten(specs), tf.nest.flatten(values), strict=True)
        if isinstance(spec, tf.TensorSpec) and tf.is_tensor(tensor)
    )
    for name, specs, values in zip(params.writes, writes, outputs, strict=True):
        wanted, found = tf.nest.flatten(specs), tf.nest.flatten(values)
        if len(wanted) != len(found):
            raise errors.LayerError(
                f"{base.describe(params)}: fprop returned a nest of {len(found)} tensors for "
                f"{name!r}, but its Meta has {len(wanted)}. Return what _meta declares"
            )
        for spec, tensor in zip(wanted, found, strict=True):
            if not isinstance(spec, tf.TensorSpec) or not tf.is_tensor(tensor):
                continue
            shape = spec.shape if planned else [None] * (spec.shape.rank or 0)
            if tensor.dtype != spec.dtype or not tensor.shape.is_compatible_with(shape):
                raise errors.LayerError(
                    f"{base.describe(params)}: fprop returned {tensor.dtype.name} of shape "
                    f"{tensor.shape} for {name!r}, but its Meta has {spec.dtype.name} of shape "
                    f"{spec.shape}. Return what _meta declares"
                )
