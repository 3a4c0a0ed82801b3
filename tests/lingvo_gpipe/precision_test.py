"""Precision policies: the dtype of weights and the dtype of computation."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, precision


@pytest.mark.parametrize("name", precision.POLICIES)
def test_policies_are_kerass_own(name: str) -> None:
    ours, theirs = precision.policy(name), keras.dtype_policies.get(name)
    assert ours.name == theirs.name
    assert ours.variable.name == theirs.variable_dtype
    assert ours.compute.name == theirs.compute_dtype


def test_no_name_is_float32() -> None:
    assert precision.policy(None) == precision.POLICIES["float32"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mixed_floa16", "nearest 'mixed_float16', 'mixed_bfloat16'"),
        ("int7", "there are 'float32', 'float64', 'mixed_bfloat16', 'mixed_float16'"),
    ],
)
def test_an_unknown_policy_is_reported_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(errors.LayerError) as error:
        precision.policy(name)
    assert str(error.value) == f"unknown precision policy {name!r}; {hint}"


@pytest.mark.parametrize("value", [1, True, "a"])
def test_cast_leaves_integers_booleans_and_strings(value: int | bool | str) -> None:
    tensor = tf.constant([value])
    assert precision.cast(tensor, tf.bfloat16) is tensor


def test_cast_changes_floating_tensors_alone_where_they_differ() -> None:
    value = tf.constant([1.5])
    assert precision.cast(value, tf.float32) is value
    assert precision.cast(value, tf.float16).dtype == tf.float16
