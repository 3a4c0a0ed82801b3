"""A Keras object's variables: built without values, named by paths that every process shares.

The parts of Keras that have no public name are touched here alone: which variables wait for their
values, their initializers, and the lists of variables, sublayers and seed generators of a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers import config, weights
from lingvo_gpipe.layers import base

_WAITING = "uninitialized_variables"
_NUMBERED = re.compile(r"_\d+$")


@dataclasses.dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a Keras layer or operation.

    Attributes:
        weights: path below the layer → variable; statistics of batch norms included.
        norms: path below the layer → batch norm.
        statistics: paths of moving means and variances.
        seeds: states of its seed generators.
    """

    weights: dict[str, keras.Variable]
    norms: dict[str, keras.layers.BatchNormalization]
    statistics: frozenset[str]
    seeds: tuple[keras.Variable, ...]


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Make Keras variables inside without values, and leave none behind that waits for one.

    Keras would give all waiting variables their values, on a device, when anybody next leaves a
    stateless scope.
    """
    waiting = list(global_state.get_global_attribute(_WAITING) or ())
    try:
        # Whoever traces a program around it, what a layer makes for itself is no part of it.
        with tf.init_scope(), keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_WAITING, waiting)


def sublayers(layer: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Return a layer and all layers in it by path; a layer found twice has its first path.

    A part of a path is the name that somebody gave the sublayer; where it is numbered, as Keras
    does over the whole process, the attribute that holds it (`blocks_0` in a list).
    """
    found: dict[str, keras.layers.Layer] = {}
    seen: set[int] = set()

    def visit(path: str, own: keras.layers.Layer) -> None:
        if id(own) in seen:
            return
        seen.add(id(own))
        found[path] = own
        taken: set[str] = set()
        attributes = _attributes(own)
        for child in own._layers:
            if id(child) in seen:
                continue
            name = config.automatic_stem(child) or child.name
            if name != child.name or _NUMBERED.search(name):
                name = attributes.get(id(child), name)
            name = _free(name, taken)
            visit(f"{path}/{name}" if path else name, child)

    visit("", layer)
    return found


def find(made: keras.Operation) -> Variables:
    """Return the variables of a built Keras layer, or of an operation, which has none."""
    if not isinstance(made, keras.layers.Layer):
        return Variables({}, {}, frozenset(), ())
    weights: dict[str, keras.Variable] = {}
    norms: dict[str, keras.layers.BatchNormalization] = {}
    for path, layer in sublayers(made).items():
        taken: set[str] = set()
        attributes = _attributes(layer)
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            name = variable.name
            if name.startswith("variable"):
                name = attributes.get(id(variable), "variable")
            name = _free(name, taken)
            weights[f"{path}/{name}" if path else name] = variable
        if isinstance(layer, keras.layers.BatchNormalization):
            norms[path] = layer
    moving = {id(v) for n in norms.values() for v in (n.moving_mean, n.moving_variance)}
    counted = {id(v) for v in (*weights.values(), *made.metrics_variables)}
    return Variables(
        weights,
        norms,
        frozenset(path for path, v in weights.items() if id(v) in moving),
        tuple(v for v in made.variables if id(v) not in counted),
    )


def spec(path: str, variable: keras.Variable, found: Variables, kept: str) -> base.VariableSpec:
    """Return our declaration of a Keras variable.

    Args:
        path: below the layer.
        variable: without a value.
        found: all variables of the layer.
        kept: name of the layer's kept weights (`keras_weights`); empty: its own initializer.
    """
    statistic = path in found.statistics
    last = path.rpartition("/")[2]
    is_norm = statistic or last in ("gamma", "beta")
    return base.VariableSpec(
        path=path,
        shape=tuple(variable.shape),
        dtype=tf.as_dtype(variable.dtype),
        initializer=_Kept(kept, path) if kept else _initializer(variable),
        trainable=bool(variable.trainable),
        is_state=statistic,
        group="norm" if is_norm else "bias" if "bias" in last else "kernel",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """Initializes a variable by the value that it had in the live layer."""

    name: str
    path: str

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        del seed
        value = weights.find(self.name, self.path)
        if value.shape != tuple(shape):
            raise errors.LayerError(
                f"{self.path} is {list(shape)}, but its kept value is {list(value.shape)}. The "
                "layer's inputs are not what the live layer was built for"
            )
        return tf.convert_to_tensor(value.astype(dtype.as_numpy_dtype), dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Initializes a variable by the array that its layer made it from."""

    value: Any

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        del seed
        return tf.reshape(tf.constant(self.value, dtype), shape)


def _initializer(variable: keras.Variable) -> base.Initializer:
    """Return the variable's own initializer, with its seed replaced by ours."""
    own: Any = variable._initializer
    if own is None:
        return _Given(variable.numpy())
    settings = own.get_config() if isinstance(own, keras.Initializer) else {}

    def create(shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        made = type(own).from_config({**settings, "seed": seed}) if "seed" in settings else own
        return tf.convert_to_tensor(made(shape, dtype=dtype.name), dtype)

    return create


def _attributes(layer: Any) -> dict[int, str]:
    """Return id → name of what a layer's attributes hold, and the lists and dicts among them."""
    names: dict[int, str] = {}
    inside: dict[int, str] = {}
    for name, value in own_attributes(layer).items():
        plain = name.strip("_")
        names.setdefault(id(value), plain)
        if isinstance(value, dict):
            items: list[tuple[Any, Any]] = list(value.items())
        else:
            items = list(enumerate(value)) if isinstance(value, list | tuple) else []
        for key, item in items:
            inside.setdefault(id(item), f"{plain}_{key}")
    return {**inside, **names}


@functools.cache
def _of_every_layer() -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer(name="layer")))


def own_attributes(layer: Any) -> dict[str, Any]:
    """Return a layer's attributes without those that Keras and TensorFlow give every layer."""
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in _of_every_layer() and not name.startswith(("_self_", "_obj_reference"))
    }


def _free(name: str, taken: set[str]) -> str:
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
