"""Precision policies: the dtype in which weights are stored, and that in which programs compute."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gpipe import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """A precision policy.

    Attributes:
        name: as in Keras.
        variable: dtype of master weights, optimizer slots, accumulators, loss sums.
        compute: dtype in which programs compute and boundary tensors travel.
    """

    name: str
    variable: tf.DType
    compute: tf.DType


POLICIES = {
    p.name: p
    for p in (
        Policy("float32", tf.float32, tf.float32),
        Policy("float64", tf.float64, tf.float64),
        Policy("mixed_bfloat16", tf.float32, tf.bfloat16),
        Policy("mixed_float16", tf.float32, tf.float16),
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
        near = errors.suggestion(name, POLICIES)
        raise errors.LayerError(f"unknown precision policy {name!r}; {near}")
    return POLICIES[name]


def cast(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Cast a floating tensor to `dtype`; integers, booleans and strings stay as they are."""
    return tf.cast(value, dtype) if value.dtype.is_floating and value.dtype != dtype else value
