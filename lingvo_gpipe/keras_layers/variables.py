"""Variables of Keras objects: built without values, with the same paths in every process.

Only this module uses private parts of Keras: the list of variables that wait for their values,
their initializers, and the lists of variables, sublayers and seed generators of a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from lingvo_gpipe import errors, packing, precision
from lingvo_gpipe.keras_layers import config
from lingvo_gpipe.layers import base

Value: TypeAlias = "packing.Variable | tf.Tensor | np.ndarray[Any, Any]"
"""What a variable of a Keras layer can be assigned from."""

_WAITING = "uninitialized_variables"
_NUMBERED = re.compile(r"_\d+$")


@dataclasses.dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a Keras layer or operation.

    Attributes:
        weights: path below the layer → variable; statistics of batch norms included.
        computes: path → name of the dtype in which the sublayer that has it reads it.
        norms: path below the layer → batch norm.
        of_norms: paths of scales and offsets of normalisations, of any kind.
        statistics: paths of moving means and variances that updates change: of batch norms that
            are not frozen.
        seeds: states of its seed generators.
        settings: what a user may change of a built layer: whether sublayers are trained, and their
            regularizers.
    """

    weights: dict[str, keras.Variable]
    computes: dict[str, str]
    norms: dict[str, keras.layers.BatchNormalization]
    of_norms: frozenset[str]
    statistics: frozenset[str]
    seeds: tuple[keras.Variable, ...]
    settings: tuple[Hashable, ...] = ()

    def described(self) -> tuple[tuple[Hashable, ...], ...]:
        """Return path, shape, dtype and settings of each weight; a user may change them."""
        weights = (
            (path, tuple(v.shape), v.dtype, bool(v.trainable), _described(v.regularizer))
            for path, v in self.weights.items()
        )
        return (*weights, self.settings)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Create Keras variables in this context without values; none is left waiting for a value.

    Keras would create the values of all waiting variables, on a device, at the next exit from a
    stateless scope.
    """
    waiting = list(global_state.get_global_attribute(_WAITING) or ())
    try:
        # Tensors that a layer creates when built must not become part of a program being traced.
        with tf.init_scope(), keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_WAITING, waiting)


def sublayers(layer: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Return a layer and all its sublayers by path; a layer in two places has its first path.

    Each part of a path is the name of a sublayer. If Keras chose that name, which it numbers over
    the whole process, the part is the name of the attribute that holds the sublayer (`blocks_0` in
    a list).
    """
    by_path: dict[str, keras.layers.Layer] = {}
    seen: set[int] = set()

    def visit(path: str, parent: keras.layers.Layer) -> None:
        seen.add(id(parent))
        by_path[path] = parent
        taken: set[str] = set()
        attributes = _attributes(parent)
        for child in parent._layers:
            if id(child) in seen:
                continue
            stem = config.automatic_stem(child)
            name = stem or child.name
            # A Bidirectional names its layers by that which it was made of.
            chosen_by_keras = stem is not None or isinstance(parent, keras.layers.Bidirectional)
            if chosen_by_keras or _NUMBERED.search(name):
                name = attributes.get(id(child), name)
            name = _free(name, taken)
            visit(f"{path}/{name}" if path else name, child)

    visit("", layer)
    return by_path


def _described(regularizer: Any) -> Hashable:
    """Return what is equal for regularizers that compute the same."""
    if not isinstance(regularizer, keras.regularizers.Regularizer):
        return None if regularizer is None else id(regularizer)
    try:
        return type(regularizer), repr(regularizer.get_config())
    except NotImplementedError:  # of a user's class
        return id(regularizer)


def find(made: keras.Operation) -> Variables:
    """Return the variables of a built Keras layer; an operation has none."""
    if not isinstance(made, keras.layers.Layer):
        return Variables({}, {}, {}, frozenset(), frozenset(), ())
    weights: dict[str, keras.Variable] = {}
    computes: dict[str, str] = {}
    norms: dict[str, keras.layers.BatchNormalization] = {}
    of_norms: set[str] = set()
    settings: list[Hashable] = []
    for path, layer in sublayers(made).items():
        settings.append((path, bool(layer.trainable), _described(layer.activity_regularizer)))
        taken: set[str] = set()
        attributes = _attributes(layer)
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            name = variable.name
            if name.startswith("variable"):
                name = attributes.get(id(variable), "variable")
            name = _free(name, taken)
            whole = f"{path}/{name}" if path else name
            weights[whole] = variable
            if "norm" in type(layer).__name__.lower():
                of_norms.add(whole)
            # A batch norm never casts its moving statistics, Keras no integers.
            is_cast = variable._autocast and tf.as_dtype(variable.dtype).is_floating
            is_cast = is_cast and not name.startswith("moving_")
            computes[whole] = layer.compute_dtype if is_cast else variable.dtype
        if isinstance(layer, keras.layers.BatchNormalization):
            norms[path] = layer
    updated = {
        id(v)
        for norm in norms.values()
        if norm.trainable
        for v in (norm.moving_mean, norm.moving_variance)
    }
    counted = {id(v) for v in (*weights.values(), *made.metrics_variables)}
    return Variables(
        weights,
        computes,
        norms,
        frozenset(of_norms),
        frozenset(path for path, v in weights.items() if id(v) in updated),
        tuple(v for v in made.variables if id(v) not in counted),
        tuple(settings),
    )


def assign(calls: Mapping[str, keras.Operation], values: Mapping[str, Value]) -> None:
    """Assign values to the variables of Keras layers, each once.

    Args:
        calls: name of a layer in the network → built Keras layer; of a layer with several names,
            the first is that of its variables.
        values: path in the network → value.

    Raises:
        LayerError: a value is missing, or has another shape. No variable has changed then.
    """
    if not isinstance(values, Mapping):
        raise errors.LayerError(
            f"values for Keras layers are path → value, got {type(values).__name__}. Give by_path "
            "of a pipeline, or what run.checkpoints.trained_values returns"
        )
    assigned: dict[int, tuple[keras.Variable, np.ndarray[Any, Any]]] = {}
    for name, operation in calls.items():
        for path, variable in find(operation).weights.items():
            if id(variable) not in assigned:
                value = _value(f"{name}/{path}", tuple(variable.shape), values)
                assigned[id(variable)] = (variable, value)
    for variable, value in assigned.values():
        variable.assign(value)


def _value(path: str, shape: tuple[int, ...], values: Mapping[str, Value]) -> np.ndarray[Any, Any]:
    """Return the value at a path, as an array of this shape."""
    if path not in values:
        raise errors.LayerError(
            f"there is no value {path!r} for the Keras model; {errors.suggestion(path, values)}. "
            "Use those of a pipeline that from_keras_model made of this model"
        )
    held = values[path]
    value = held if isinstance(held, np.ndarray) else held.numpy()
    if value.shape != shape:
        raise errors.LayerError(
            f"{path} has shape {list(value.shape)}, but that of the Keras model {list(shape)}. Use "
            "the values of a pipeline that from_keras_model made of this model"
        )
    return value


def spec(
    path: str, variables: Variables, policy: precision.Policy, live: keras.Variable | None
) -> base.VariableSpec:
    """Return the declaration of a Keras variable in a layer's Meta.

    A variable of a sublayer that computes in another dtype than the layer is not rounded before
    Keras reads it.

    Args:
        path: path of the variable, below the layer.
        variables: variables of the layer.
        policy: that of the layer.
        live: variable from whose value it starts; None: it starts from its Keras initializer.
    """
    variable = variables.weights[path]
    statistic = path in variables.statistics
    last = path.rpartition("/")[2]
    is_norm = statistic or path in variables.of_norms
    dtype = tf.as_dtype(variable.dtype)
    # Half precision would round the gradient of a penalty away.
    is_usual = variable.regularizer is None
    is_usual = is_usual and tf.as_dtype(variables.computes[path]) == policy.compute
    return base.VariableSpec(
        path=path,
        shape=tuple(variable.shape),
        dtype=dtype,
        compute=policy.compute if is_usual else dtype,
        initializer=_initializer(variable) if live is None else _Value(live),
        trainable=bool(variable.trainable),
        is_state=statistic,
        group="norm" if is_norm else "bias" if "bias" in last else "kernel",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """Initializes a variable with the value of a live Keras variable."""

    variable: keras.Variable

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        del shape, seed
        return tf.cast(self.variable.value.read_value(), dtype)


def value_of(variable: keras.Variable) -> tf.Tensor:
    """Return the value of a Keras variable, or its initial one if it was built without a value."""
    if variable._value is not None:
        return variable.value.read_value()
    return _initializer(variable)(tuple(variable.shape), tf.as_dtype(variable.dtype), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Constant:
    """Initializes a variable with the array from which its layer made it."""

    value: np.ndarray

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, seed: int) -> tf.Tensor:
        del seed
        return tf.reshape(tf.constant(self.value, dtype), shape)


def _initializer(variable: keras.Variable) -> base.Initializer:
    """Return the variable's Keras initializer, with the seed of the pipeline."""
    initializer: Any = variable._initializer
    if initializer is None:
        return _Constant(variable.numpy())
    return base.seeded(initializer)


def _attributes(layer: keras.layers.Layer) -> dict[int, str]:
    """Return id → name of a layer's attribute values, and of the items of lists and dicts."""
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


def own_attributes(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return a layer's attributes without those that every Keras layer has."""
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
