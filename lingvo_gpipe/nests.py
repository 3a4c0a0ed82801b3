"""Types of nested tensors, as `tf.nest` understands them.

A nest is a tensor, or a list, tuple or dict of nests; TensorFlow has no type for it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Nest: TypeAlias = Any
"""A nest of tensors."""

SpecNest: TypeAlias = Any
"""A nest of `tf.TensorSpec`."""
