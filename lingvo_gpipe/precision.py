"""Precision policies: the dtype in which weights are stored, and that in which programs compute."""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from lingvo_gpipe import errors


@dataclasses.dataclass(frozen=True)
class Policy:
    """A precision policy.

    Attributes:
        name: as in Keras.
        variable_name: name of the dtype `variable`.
        compute_name: name of the dtype `compute`.
    """

    name: str
    variable_name: str
    compute_name: str

    @functools.cached_property
    def variable(self) -> tf.DType:
        """Dtype of master weights, optimizer slots, accumulators, loss sums."""
        return tf.as_dtype(self.variable_name)

    @functools.cached_property
    def compute(self) -> tf.DType:
        """Dtype in which programs compute and boundary tensors travel."""
        return tf.as_dtype(self.compute_name)


POLICIES = {
    p.name: p
    for p in (
        Policy("float32", "float32", "float32"),
        Policy("float64", "float64", "float64"),
        Policy("mixed_bfloat16", "float32", "bfloat16"),
        Policy("mixed_float16", "float32", "float16"),
    )
}


def policy(name: str | None) -> Policy:
    """Return the policy called `name`; None is float32.

    Raises:
        LayerError: there is no such policy.
    """
    if name is None:
        return POLICIES["float32"]
    if name not in POLICIES:
        near = errors.nearest(name, POLICIES) or sorted(POLICIES)
        raise errors.LayerError(
            f"unknown precision policy {name!r}; nearest {', '.join(near)}. Use one of "
            f"{', '.join(POLICIES)}"
        )
    return POLICIES[name]


def cast(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Cast a floating tensor to `dtype`; integers, booleans and strings stay as they are."""
    return tf.cast(value, dtype) if value.dtype.is_floating and value.dtype != dtype else value
