"""What the configuration of a Keras object may name: classes that hold data, and activations.

Keras makes objects from nested dicts that name classes and functions. A text of Params may hold
such a dict, and a text is data: it names layers and operations, initializers, regularizers,
constraints, losses and metrics by their class, and the functions of `keras.activations`. It names
no other function, and no layer that runs code of its own configuration, such as `Lambda`.

A function that Python code passed to a live Keras object runs all the same: the configuration holds
a copy of it (`from_python`), to which no name in a text leads. Only a function that Keras has
registered, of a package that a recipe imports (`allow_registered_functions`), has a name there.
"""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import keras

from lingvo_gpipe import errors

REFERENCE = "reference"
"""Key of a configuration whose value is the class itself, in place of its name."""

ACTIVATIONS: dict[str, Any] = {
    name: value
    for name, value in vars(keras.activations).items()
    if isinstance(value, types.FunctionType) and name not in ("get", "serialize", "deserialize")
}
_MAY_BE_NAMED = (
    keras.Operation,  # layers too
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.losses.Loss,
    keras.metrics.Metric,
    # Parts of a layer's configuration that hold numbers and names alone.
    keras.dtype_policies.DTypePolicy,
    keras.dtype_policies.DTypePolicyMap,
    keras.random.SeedGenerator,
)
# Layers whose configuration is, or names, code.
_RUN_CODE = (
    keras.layers.Lambda,
    keras.layers.TFSMLayer,
    keras.layers.JaxLayer,
    keras.layers.FlaxLayer,
    keras.layers.TorchModuleWrapper,
)
# Values that Keras writes as if they were objects.
_VALUES = ("__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__", "__keras_tensor__")
_copies: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType] = (
    weakref.WeakKeyDictionary()
)
_from_python: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
_packages_of_recipes: set[str] = set()


def allow_registered_functions(package: str) -> None:
    """Let texts name the functions of a package that Keras has registered, such as activations."""
    _packages_of_recipes.add(package)


def from_python(function: Any) -> Any:
    """Return the function as a configuration holds it: a copy, or an activation itself.

    The same function has the same copy, so that equal objects have equal configurations.
    """
    if function in _from_python or _has_name(function):
        return function
    if function not in _copies:
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__qualname__ = function.__qualname__
        copy.__module__ = function.__module__
        copy.__dict__.update(function.__dict__)
        _copies[function] = copy
        _from_python.add(copy)
    return _copies[function]


def _has_name(function: types.FunctionType) -> bool:
    """Return whether a text may name a function."""
    if function.__module__.partition(".")[0] not in _packages_of_recipes:
        return function in ACTIVATIONS.values()
    name = keras.saving.get_registered_name(function)
    return keras.saving.get_registered_object(name) is function


def refusal(value: Any) -> str | None:
    """Return why a configuration, or a part of one, may not be used; None: it may."""
    found = _foreign(value)
    if found is None:
        return None
    return (
        f"it names {found}, but a configuration names only Keras layers, initializers, "
        "regularizers, constraints, losses and metrics by class, and activations. Write the code "
        "as a class of keras.layers.Layer"
    )


def check(value: Any, subject: str, error: type[errors.UserError] = errors.LayerError) -> None:
    """Refuse a configuration, or a part of one, that names what would run code.

    Args:
        value: the configuration.
        subject: what cannot be made of it, such as "no Keras loss Poisson".
        error: class of the exception.

    Raises:
        LayerError: or `error`, naming the class or function.
    """
    reason = refusal(value)
    if reason is not None:
        raise error(f"{subject} of this config, since {reason}")


def _foreign(value: Any) -> str | None:
    """Return the first class or function in `value` that may not be named, as messages show it."""
    if isinstance(value, types.FunctionType):
        known = value in _from_python or _has_name(value)
        return None if known else f"the function {value.__module__}.{value.__qualname__}"
    if isinstance(value, type):
        return None if _allowed(value) else f"the class {value.__module__}.{value.__qualname__}"
    if isinstance(value, str):
        registered = keras.saving.get_registered_object(value)
        return None if registered is None or _allowed(registered) else f"the registered {value!r}"
    if isinstance(value, list | tuple):
        items = list(value)
    elif isinstance(value, dict):
        if (found := _foreign_object(value)) is not None:
            return found
        # The class itself was looked at, together with its configuration.
        items = [item for key, item in value.items() if key != REFERENCE]
    else:
        return None
    return next((found for found in map(_foreign, items) if found is not None), None)


def _foreign_object(config: dict[str, Any]) -> str | None:
    """Return the name of the object that a dict describes, if that may not be named."""
    reference, name = config.get(REFERENCE), config.get("class_name")
    if isinstance(reference, type):
        kind: object = reference
        shown = f"the class {reference.__module__}.{reference.__qualname__}"
    elif "class_name" not in config or name in _VALUES:
        return None
    else:
        module, inner = config.get("module"), config.get("config")
        if config.get("registered_name") not in (None, name, inner):
            return f"the registered {config['registered_name']!r}"
        if name == "function":
            known = isinstance(inner, str) and inner in ACTIVATIONS
            known = known and module in ("builtins", "keras.activations")
            return None if known else f"the function {module}.{inner}"
        kind, shown = _class_of_keras(module, name), f"{module}.{name}"
    if isinstance(kind, type) and issubclass(kind, keras.layers.Lambda):
        settings = config.get("config")
        function = settings.get("function") if isinstance(settings, dict) else None
        return None if function in list(_from_python) else "a Lambda layer"
    return None if _allowed(kind) else shown


def _class_of_keras(module: object, name: object) -> object:
    """Return what a module of Keras has under a name, or None; nothing is imported."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module != "keras" and not module.startswith("keras."):
        return None
    return vars(sys.modules.get(module, types)).get(name)


def _allowed(kind: object) -> bool:
    if not isinstance(kind, type) or issubclass(kind, _RUN_CODE):
        return False
    return issubclass(kind, _MAY_BE_NAMED)
