"""Keras optimizers and learning rate schedules, made by the name of their class."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

from lingvo_gpipe import errors
from lingvo_gpipe.layers import keras_references

_Object = TypeVar("_Object")


def make(
    module: ModuleType,
    base: type[_Object],
    name: str,
    config: dict[str, Any],
    mixin: type | None = None,
) -> _Object:
    """Make an object of the class `name` of a Keras module.

    Args:
        module: `keras.optimizers`, or a module in it.
        base: class that the class derives from.
        name: name of the class.
        config: arguments of the class.
        mixin: class whose methods come before the Keras class's base.

    Raises:
        ParamsError: the module has no such class, the class refuses the arguments, or they
            name what would run code.
    """
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    what = "optimizer" if base.__name__ == "Optimizer" else "learning rate schedule"
    if name not in classes:
        raise errors.ParamsError(f"no Keras {what} {name!r}; {errors.suggestion(name, classes)}")
    keras_references.check(config, f"no Keras {what} {name}", errors.ParamsError)
    kind = classes[name] if mixin is None else type(name, (classes[name], mixin), {})
    try:
        return kind(**config)
    except (TypeError, ValueError) as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.items())
        raise errors.ParamsError(
            f"Keras {what} {name}({arguments}): {str(error).splitlines()[0]}"
        ) from error
