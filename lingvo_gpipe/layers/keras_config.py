"""Keras objects as data: what Params hold of them, and how they are made again.

Keras' own classes are kept as Keras serialises them. Classes and functions from elsewhere are kept
as references, which a text writes by their qualified name and reads from registered packages
alone; what has no name (a lambda, a class made inside a function) works until a text is asked for.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import keras

from lingvo_gpipe import errors, precision

_REFERENCE = "reference"
_PYTHON_LAMBDA = "__lambda__"
_SEPARATORS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W+")


def to_config(live: keras.Operation) -> dict[str, Any]:
    """Return a Keras layer or operation as the value of a Params field.

    Raises:
        LayerError: it does not tell its configuration.
    """
    try:
        settings = live.get_config()
    except NotImplementedError as error:
        raise errors.LayerError(
            f"{live.name} ({type(live).__name__}) does not tell how it was made, so it cannot be "
            "made again for a pipeline. Define its get_config"
        ) from error
    config = {key: _kept(value, getattr(live, key, None)) for key, value in settings.items()}
    return _described(type(live), config)


def from_config(config: dict[str, Any], policy: precision.Policy) -> keras.Operation:
    """Make the Keras layer or operation that `to_config` described.

    Args:
        config: as `to_config` gave it.
        policy: takes the place of the layer's own dtype policy, in its sublayers too where theirs
            is the same.

    Raises:
        LayerError: the configuration is not one of a Keras object.
    """
    own = _policy_name(config)
    renamed = {} if own is None else {own: policy}
    references: dict[str, Any] = {}
    plain = _plain(config, renamed, references)
    try:
        with keras.saving.custom_object_scope(references):
            made = keras.saving.deserialize_keras_object(plain, safe_mode=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.LayerError(
            f"no Keras layer can be made from the configuration of "
            f"{config.get('class_name', config.get(_REFERENCE))!s}: {_first_line(error)}"
        ) from error
    if not isinstance(made, keras.Operation):
        raise errors.LayerError(
            f"{type(made).__name__} is no Keras layer or operation. Use keras_adapter.from_keras"
        )
    return made


def policy_name(live: keras.Operation) -> str | None:
    """Return the dtype policy that a live layer insists on; None: it has Keras' plain default."""
    policy = getattr(live, "dtype_policy", None)
    if policy is None or policy.name not in precision.POLICIES:
        return None
    return None if policy.name == "float32" == keras.config.dtype_policy().name else policy.name


def snake_case(name: str) -> str:
    """Return a class's name as Keras writes it in automatic names.

    >>> snake_case("Conv2DTranspose"), snake_case("MultiHeadAttention"), snake_case("LSTM")
    ('conv2d_transpose', 'multi_head_attention', 'lstm')
    """
    words = re.sub(r"\W+", "", name)
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", words)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def automatic_number(live: keras.Operation) -> int | None:
    """Return the number in a name that Keras gave by itself (`dense_3`: 3, `dense`: 0), else None.

    Such numbers count over the whole process; ours count over the network.
    """
    stem = snake_case(type(live).__name__)
    found = re.fullmatch(rf"{re.escape(stem)}(?:_(\d+))?", live.name)
    return None if found is None else int(found.group(1) or 0)


def _described(kind: type, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of an object of class `kind`."""
    if kind.__module__ == "keras" or kind.__module__.startswith("keras."):
        public = keras.saving.serialize_keras_object  # knows the exported name of a class
        del public
    return {_REFERENCE: kind, "config": config}
