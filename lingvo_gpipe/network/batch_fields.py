"""The fields of a mini-batch as what functions take: tensors, or their specs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.nests import Nest, SpecNest


def specs(fields: Mapping[str, Nest | SpecNest]) -> dict[str, SpecNest]:
    """Return the specs of a mini-batch of tensors, arrays or specs.

    Raises:
        InputError: a field is none of these.
    """

    def spec(leaf: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
        if isinstance(leaf, tf.TensorSpec):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return _leaf_by_leaf(fields, spec)


def tensors(
    fields: Mapping[str, Nest],
    names: Collection[str],
    built: Mapping[str, SpecNest] | None = None,
) -> dict[str, Nest]:
    """Return the fields of a mini-batch as tensors.

    Args:
        fields: name → nest of tensors or arrays.
        names: of those that the network reads.
        built: name → nest of `tf.TensorSpec` with which the pipeline was built; None: not
            compared, as in an evaluation.

    Raises:
        InputError: a field is missing, is not a nest of tensors or arrays, or has another
            structure, number of dimensions or kind of values than in the build.
    """
    converted = _leaf_by_leaf(fields, tf.convert_to_tensor)
    missing = sorted(set(names) - set(converted))
    if missing:
        raise errors.InputError(
            f"the mini-batch has no field {missing[0]!r}, with which the pipeline was built; "
            f"it has {', '.join(sorted(converted)) or 'none'}. Include every field"
        )
    if built is not None:
        for name in names:
            _check_like(name, converted[name], built[name])
    return converted


def _check_like(name: str, value: Nest, built: SpecNest) -> None:
    """Check a field by the specs with which the pipeline was built; sizes may differ."""
    leaves, specs = tf.nest.flatten(value), tf.nest.flatten(built)
    if len(leaves) != len(specs):
        raise errors.InputError(
            f"field {name!r} is a nest of {len(leaves)} tensors, but the pipeline was built with "
            f"{len(specs)}. Give the same nest"
        )
    for leaf, spec in zip(leaves, specs, strict=True):
        ranks = {leaf.shape.rank, spec.shape.rank} - {None}
        if len(ranks) > 1 or _kind(leaf.dtype) != _kind(spec.dtype):
            raise errors.InputError(
                f"field {name!r} is {leaf.dtype.name} of shape {leaf.shape}, but the pipeline was "
                f"built with {spec.dtype.name} of shape {spec.shape}. Give it as many dimensions, "
                "and values of the same kind"
            )


def _kind(dtype: tf.DType) -> str:
    """Return which values stand for each other: those of all floating or all other dtypes."""
    return "float" if dtype.is_floating else "string" if dtype == tf.string else "other"


def mappings(parts: Sequence[Mapping[str, Nest]]) -> Sequence[Mapping[str, Nest]]:
    """Return the parts of a mini-batch, if all are dictionaries, unlike the (x, y) of Keras.

    Raises:
        InputError: one is not a dictionary.
    """
    for part in parts:
        if not isinstance(part, Mapping):
            raise errors.InputError(
                f"a mini-batch is a dictionary of fields, got {type(part).__name__}. Write "
                "{'x': …}, with the names that the layers read"
            )
    return parts


def by_name(
    what: str, values: Mapping[str, Any], names: Collection[str], dtype: tf.DType
) -> dict[str, tf.Tensor]:
    """Return an argument with a value for each name, as tensors.

    Args:
        what: name of the argument.
        values: name → tensor, or number.
        names: those that it must have.
        dtype: of numbers.

    Raises:
        InputError: a name is missing, or there is another one.
    """
    for name in sorted({*values} ^ {*names}):
        if name in names:
            raise errors.InputError(f"{what} has no {name!r}. Give a value for each of them")
        raise errors.InputError(
            f"{what} names {name!r}, which the network does not have; "
            f"{errors.suggestion(name, names)}"
        )
    return {
        name: value if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)
        for name, value in values.items()
    }


def _leaf_by_leaf(fields: Mapping[str, Nest], function: Callable[[Any], Any]) -> dict[str, Nest]:
    """Return the fields with a function of each leaf.

    Raises:
        InputError: there are no fields, or a leaf is not a tensor; names the field.
    """
    mappings([fields])
    result = {}
    for name, value in fields.items():
        leaves = []
        for leaf in tf.nest.flatten(value):
            try:
                leaves.append(function(leaf))
            except (TypeError, ValueError) as error:
                kind = "None" if leaf is None else f"a value of type {type(leaf).__name__}"
                inside = " inside" if tf.nest.is_nested(value) else ""
                raise errors.InputError(
                    f"field {name!r} has {kind}{inside}, expected a tensor or a nest of tensors. "
                    "Convert it to tensors, or leave it out"
                ) from error
        result[name] = tf.nest.pack_sequence_as(value, leaves)
    return result
