"""Live Keras objects in Params: a cell computes what the object computes, whatever its config says.

Params as text, and another precision than the object's own, need a layer that is made again from
the object's config. A config may not know all of the object (a LoRA kernel, an attribute that was
set later), so the layer made again is compared with the live one before it is used.
"""

from __future__ import annotations

import functools
import json
import types
import warnings
from collections.abc import Hashable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.keras_layers import variables
from lingvo_gpipe.keras_layers.config import from_config, to_config, without_names

_TOLERANCE = 1e-4
_OF_KERAS = "keras.", "keras_hub."


class Live(hyperparams.Opaque):
    """A built Keras layer, or an operation, as Params hold it: the object itself.

    Attributes:
        operation: the Keras object. It is called, and left as it is.
        name: name of the layer in the network.
        keras_updates: whether a Keras optimizer updates it, which applies its constraints.
        traces: what was found by tracing it; see `trace`.
    """

    def __init__(
        self,
        operation: keras.Operation,
        name: str,
        *,
        keras_updates: bool = False,
    ) -> None:
        """Hold it."""
        self.traces: dict[Hashable, Any] = {}
        self.keras_updates = keras_updates
        self.operation = operation
        self.name = name

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same object."""
        return isinstance(other, Live) and self.operation is other.operation

    def __hash__(self) -> int:
        """Return a hash that fits `__eq__`."""
        return id(self.operation)

    @property
    def policy(self) -> str:
        """The name of the object's precision policy; float32 for an operation."""
        policy = getattr(self.operation, "dtype_policy", None)
        return (
            policy.name if policy is not None and policy.name in precision.POLICIES else "float32"
        )

    @functools.cached_property
    def structure(self) -> Hashable:
        """What it has in common with others of its structure; None: that is not known."""
        layers = getattr(self.operation, "_flatten_layers", lambda: [self.operation])()
        try:
            # A notebook may define a class again under the same name. The config of Keras' own
            # layer has those in it; that of a user's may leave out anything.
            has_all = all(map(is_of_keras, layers))
            return (
                tuple(type(layer) for layer in layers),
                tuple(map(_settings, [self.operation] if has_all else layers)),
                tuple(map(_attributes, layers)),
            )
        except Exception:  # noqa: BLE001 (whatever the get_config of a layer raises)
            return None

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What makes the object again (`config.to_config`).

        Raises:
            LayerError: the object cannot be made again, or is then another one.
        """
        config = to_config(self.operation)
        if (
            "name" in config["config"]
        ):  # Keras' automatic names depend on what else the process made
            config["config"]["name"] = self.name
        _check(self.operation, from_config(config, precision.policy(self.policy)))
        return config

    def plain(self) -> dict[str, Any]:
        """See `hyperparams.Opaque`."""
        return self.config


def is_of_keras(operation: keras.Operation) -> bool:
    """Whether the class of a layer or operation is Keras' own, without the layers in it."""
    return type(operation).__module__.startswith(_OF_KERAS)


def _serialized(value: object) -> str:
    with warnings.catch_warnings():  # of a lambda, which is not saved here
        warnings.simplefilter("ignore")
        settings = keras.saving.serialize_keras_object(value)
    return json.dumps(without_names(settings), default=repr, sort_keys=True)


def _settings(operation: keras.Operation) -> Hashable:
    """Return the config of a layer of Keras; of a user's, what its attributes do not say."""
    if isinstance(operation, keras.layers.Layer) and not is_of_keras(operation):
        return operation.dtype_policy.name, operation.autocast
    return _serialized(operation)


def _attributes(operation: keras.Operation) -> Hashable:
    """Return the attributes of a user's layer, or the functions of one of Keras."""
    attributes = vars(operation)
    if isinstance(operation, keras.layers.Layer):
        regularizer = operation.activity_regularizer
        attributes = variables.own_attributes(operation) | {"activity_regularizer": regularizer}
    is_described = is_of_keras(operation) or not isinstance(operation, keras.layers.Layer)
    return tuple(
        (name, _comparable(value))
        for name, value in attributes.items()
        if callable(value) or not is_described
    )


def _comparable(value: Any) -> Hashable:
    """Return what is equal for values with which a layer computes the same.

    Raises:
        TypeError: it is unknown.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), repr(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((_comparable(k), _comparable(v)) for k, v in value.items())
    if isinstance(value, types.FunctionType):
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        inside = _comparable([value.__defaults__, value.__kwdefaults__, closure])
        return value.__module__, value.__code__, inside
    if isinstance(value, type):
        return value
    if isinstance(value, keras.layers.Layer | keras.Variable | keras.random.SeedGenerator):
        return (type(value),)  # compared on their own
    if type(value).__module__.startswith(_OF_KERAS):
        return type(value), _serialized(value)
    raise TypeError(f"{type(value).__name__} is not comparable")


def _check(live: keras.Operation, remade: keras.Operation) -> None:
    """Refuse a layer made again that is not the live one: its variables, its outputs."""
    if not isinstance(live, keras.layers.Layer):
        return
    call = _example_call(live)
    if call is None:
        return
    args, kwargs = call
    remade(*args, **kwargs)  # builds it
    own, other = variables.find(live).weights, variables.find(remade).weights
    if isinstance(live, keras.layers.Normalization):  # its config has what it has adapted to
        own = other
    for path in [*own, *other]:
        one, two = (_described(found.get(path)) for found in (own, other))
        if one != two:
            raise _differs(live, f"its variable {path} is {one}, that of its config {two}")
    for path, variable in own.items():
        other[path].assign(variable.value)
    wanted, found = live(*args, **kwargs), remade(*args, **kwargs)
    for one, two in zip(tf.nest.flatten(wanted), tf.nest.flatten(found), strict=True):
        if not np.allclose(one, two, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            raise _differs(live, "outputs for the same inputs and weights differ")


def _differs(live: keras.Operation, how: str) -> errors.LayerError:
    return errors.LayerError(
        f"{live.name} ({type(live).__name__}) differs from the layer that its config makes: {how}. "
        "A run from text needs a config that makes the same layer: define get_config, or change "
        "the layer in the code that makes the model"
    )


def _described(variable: keras.Variable | None) -> str:
    if variable is None:
        return "not there"
    frozen = "" if variable.trainable else ", frozen"
    return f"{variable.dtype} {list(variable.shape)}{frozen}"


def _example_call(live: keras.layers.Layer) -> tuple[Any, Any] | None:
    """Return arguments of a small call like the one that built a layer; None: it is unknown."""
    if not live._inbound_nodes:
        return None
    arguments = live._inbound_nodes[0].arguments
    return keras.tree.map_structure(example, (arguments.args, arguments.kwargs))


def example(value: Any) -> Any:
    """Return numbers in place of a symbolic tensor, with 2 for sizes that are unknown."""
    if not isinstance(value, keras.KerasTensor):
        return value
    random = np.random.default_rng(0)
    shape = [2 if dimension is None else dimension for dimension in value.shape]
    dtype = tf.as_dtype(value.dtype)
    if dtype == tf.string:
        return tf.fill(shape, "a")
    if dtype.is_floating:
        return tf.cast(random.normal(size=shape), dtype)
    return tf.cast(random.integers(0, 2, size=shape), dtype)
