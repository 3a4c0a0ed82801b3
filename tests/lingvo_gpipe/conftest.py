"""The dtype in which Keras models compute."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    """Keras models made inside compute in float64."""
    before = keras.config.dtype_policy()
    keras.config.set_floatx("float64")  # a model's Input casts to it
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(before)
