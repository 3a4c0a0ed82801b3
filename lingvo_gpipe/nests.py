"""Nested tensors, as `tf.nest` understands them: their types, and their differentiable leaves.

A nest is a tensor, or a list, tuple or dict of nests; TensorFlow has no type for it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

Nest: TypeAlias = Any
"""A nest of tensors."""

SpecNest: TypeAlias = Any
"""A nest of `tf.TensorSpec`."""

NameNest: TypeAlias = Any
"""A name, or a list, tuple or dict of nests of names."""

Batch: TypeAlias = "dict[str, tf.Tensor]"
"""The fields of a mini-batch, by name."""


def tensor_specs(specs: SpecNest) -> list[tf.TensorSpec]:
    """Return the leaves that are tensors; a value that stays in its cell may have others (None)."""
    return [spec for spec in tf.nest.flatten(specs) if isinstance(spec, tf.TensorSpec)]


def is_differentiable(dtype: tf.DType) -> bool:
    """Return whether tensors can have a gradient: floating and complex ones."""
    return bool(dtype.is_floating or dtype.is_complex)


def differentiable(nest: Nest | SpecNest) -> list[tf.Tensor]:
    """Return the leaves of a nest of tensors or specs that can have a gradient, in order."""
    return [leaf for leaf in tf.nest.flatten(nest) if is_differentiable(leaf.dtype)]
