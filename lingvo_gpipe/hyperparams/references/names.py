"""Names by which texts refer to classes, functions, enum members and dtypes.

A class of lingvo_gpipe has a public name that no move of a file changes: the package that exports
it, below lingvo_gpipe, and its own name (`layers.Conv2D`, `tasks.mt.Translation`); a module
directly in lingvo_gpipe exports what it defines (`task.Train`). A user's class has its full name,
`my_package.my_module.MyLayer`. Names in texts of earlier commits are in `old_names`.

Reading a name imports nothing but modules of registered packages, and calls nothing but the lazy
exports of lingvo_gpipe's own packages. Of the functions of Keras, texts name activations alone.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams.messages import shown
from lingvo_gpipe.hyperparams.references import old_names

if TYPE_CHECKING:
    import tensorflow as tf

MAX_PARTS = 50
_SEARCHED_CHARS = 100

_PROJECT = __name__.partition(".")[0]
_packages = {_PROJECT, "keras"}
_ACTIVATIONS = "keras.src.activations.activations"

_public_names: dict[type | types.FunctionType, str] = {}


def register_package(name: str) -> None:
    """Let texts name the classes and functions of package (or module) `name`.

    >>> register_package("lingvo_gpipe")
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ParamsError(f"{shown(name)} is not the name of a package")
    _packages.add(name)


def registered_packages() -> tuple[str, ...]:
    """Return the names of the packages that `register_package` added, and those known without."""
    return tuple(sorted(_packages))


# --- From an object to its name -----------------------------------------------------------------


def public_name(referenced: type | types.FunctionType) -> str:
    """Return the dotted name of a class or function, its public one where it has one."""
    known = _public_names.get(referenced)
    if known is not None:
        return known
    module, name = str(referenced.__module__), str(referenced.__qualname__)
    if module.startswith("keras.src."):
        public = f"keras.{module.split('.')[2]}"
        if public in sys.modules and vars(sys.modules[public]).get(name) is referenced:
            return f"{public}.{name}"
    parts = name.split(".")
    for place in _public_places(module):
        if _exports(place, parts[0]) and _follow(place, parts) is referenced:
            found = f"{place.__name__.removeprefix(f'{_PROJECT}.')}.{name}"
            _public_names[referenced] = found
            return found
    return f"{module}.{name}"


def check_references(value: object) -> None:
    """Refuse a value with a class, function or dtype to which its written name does not lead.

    Raises:
        ParamsError: such as for a lambda, a class made inside a function, or a class whose name a
            class of lingvo_gpipe has.
    """
    if isinstance(value, list | tuple):
        for item in value:
            check_references(item)
    elif isinstance(value, dict):
        for item in value.values():
            check_references(item)
    elif isinstance(value, enum.Enum):
        check_references(type(value))
    elif isinstance(value, type | types.FunctionType):
        _check_reference(value)
    elif is_dtype(type(value)) and dtype_by_name(getattr(value, "name", "")) is not value:
        raise ParamsError(f"{shown(value)} has no name that a text could hold")


def _check_reference(referenced: type | types.FunctionType) -> None:
    if referenced in _public_names:
        return
    defined: Any = sys.modules.get(referenced.__module__)
    for part in referenced.__qualname__.split("."):
        inside = isinstance(defined, type | types.ModuleType)
        defined = vars(defined).get(part) if inside else None
    if defined is not referenced or not _may_be_named(referenced):
        way_out = (
            "define it at the top of a module"
            if isinstance(referenced, type)
            else "define it at the top of a module or, if a Keras layer calls it, write a class of "
            "keras.layers.Layer"
        )
        raise ParamsError(f"{shown(referenced)} has no name that a text could hold; {way_out}")
    name = public_name(referenced)
    other = _dtype_or_project_object(name)
    if other is not None and other is not referenced:
        raise ParamsError(
            f"a text names {shown(referenced)} {name!r}, which is a name of {_PROJECT} already; "
            f"define it in a package that is not called {name.partition('.')[0]!r}"
        )


# --- From a name to its object ------------------------------------------------------------------


def resolve(name: str) -> Any:
    """Return the class, function, enum member or dtype of a dotted name.

    Follows nothing but a module's classes and functions, a class's nested classes, and an enum's
    members.

    Raises:
        ParamsError: the package is not registered, or has no such class or function.
    """
    found = _dtype_or_project_object(name)
    if found is None and _registered(name):
        found = _object_of(name)
    if found is not None:
        return found
    if near := nearest_public_names(name):
        raise ParamsError(
            f"{_PROJECT} has no class {shown(name)}; nearest {', '.join(map(repr, near))}"
        )
    if _registered(name):
        raise ParamsError(f"{shown(name)} is not a class or function of a registered package")
    root, dot, _ = name.partition(".")
    way_out = "--params_package=NAME of the trainer adds one, or register_package(name)"
    if dot and root.isidentifier():
        way_out = (
            f"if the package {shown(root)} is yours, add --params_package={root}, or call "
            f"register_package({root!r})"
        )
    raise ParamsError(
        f"{shown(name)} is not in a registered package ({', '.join(sorted(_packages))}); {way_out}"
    )


def _dtype_or_project_object(name: str) -> Any | None:
    """Return what a dtype's name or a public name of lingvo_gpipe, old or new, leads to."""
    if name.startswith("tf.") and (dtype := dtype_by_name(name)) is not None:
        return dtype
    if name.count(".") >= MAX_PARTS:
        return None
    current = old_names.current(name)
    first, dot, _ = current.partition(".")
    if not dot or first not in _project_modules():
        return None
    return _object_of(f"{_PROJECT}.{current}")


@functools.cache
def _project_modules() -> frozenset[str]:
    """Return the names of the modules and packages directly in lingvo_gpipe."""
    return frozenset(module.name for module in pkgutil.iter_modules(_project().__path__))


def looks_public(name: str) -> bool:
    """Return whether a text begins as a public name of lingvo_gpipe does.

    >>> looks_public("layers.Danse"), looks_public("os.system"), looks_public("layers")
    (True, False, False)
    """
    first, dot, _ = name.partition(".")
    return bool(dot) and first in _project_modules()


def _project() -> types.ModuleType:
    return sys.modules[_PROJECT]


def nearest_public_names(name: str) -> list[str]:
    """Return the public names that look most like `name`, if it begins as one of them does."""
    current = old_names.current(name[:_SEARCHED_CHARS])
    if "." not in current or current.partition(".")[0] not in _project_modules():
        return []
    module = _module_of(f"{_PROJECT}.{current}")[0] or _project()
    place = module.__name__.removeprefix(_PROJECT)[1:]
    members = vars(module)
    defined = [each for each in members if isinstance(members[each], type)]
    exported = members.get("__all__", defined)
    return errors.nearest(current, [f"{place}.{each}" for each in exported])


def _registered(name: str) -> bool:
    return any(_is_in(name, package) for package in _packages)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _object_of(name: str) -> Any | None:
    """Return the object of a full dotted name in a registered package, or None."""
    module, parts = _module_of(name)
    return None if module is None else _follow(module, parts)


def _follow(module: types.ModuleType, parts: list[str]) -> Any | None:
    """Return what `parts` lead to from `module`: a class, function or enum member, or None."""
    found = _member(module, parts[0])
    if isinstance(found, types.FunctionType):
        found = found if len(parts) == 1 else None
    for position, part in enumerate(parts[1:], 1):
        if isinstance(found, enum.EnumMeta) and part in found.__members__:
            return found.__members__[part] if position == len(parts) - 1 else None
        nested = vars(found).get(part) if isinstance(found, type) else None
        found = nested if isinstance(nested, type) and _registered(nested.__module__) else None
    return found


def _member(module: types.ModuleType, name: str) -> type | types.FunctionType | None:
    """Return a class or function of a module that is defined in a registered package."""
    members = vars(module)
    found = members.get(name)
    if name not in members and _is_project(module) and name in members.get("__all__", ()):
        with _import_errors(f"{module.__name__}.{name}"):
            found = getattr(module, name, None)
    if isinstance(found, type | types.FunctionType) and _registered(str(found.__module__)):
        return found if _may_be_named(found) else None
    return None


def _may_be_named(found: type | types.FunctionType) -> bool:
    """Return whether texts may name a class or function of a registered package."""
    module = str(found.__module__)
    return isinstance(found, type) or not _is_in(module, "keras") or module == _ACTIVATIONS


def _is_project(module: types.ModuleType) -> bool:
    return _is_in(module.__name__, _PROJECT)


def _exports(place: types.ModuleType, name: str) -> bool:
    """Return whether `name` is public in a package or module of lingvo_gpipe."""
    members = vars(place)
    return name in members["__all__"] if "__all__" in members else not hasattr(place, "__path__")


def _public_places(module: str) -> Iterator[types.ModuleType]:
    """Yield where a class of lingvo_gpipe's `module` can be exported, the shortest name first.

    These are the packages around it, and the module itself if it is directly in lingvo_gpipe.
    """
    parts = module.split(".")
    if parts[0] != _PROJECT:
        return
    for count in range(2, len(parts) + 1):
        place = sys.modules.get(".".join(parts[:count]))
        if place is not None and (count == 2 or hasattr(place, "__path__")):
            yield place


def _module_of(name: str) -> tuple[types.ModuleType | None, list[str]]:
    """Return the module of the longest beginning of `name` that is one, and the other parts."""
    parts = name.split(".")
    module: types.ModuleType | None = None
    rest = parts
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if not _registered(prefix):
            continue
        found = _import(prefix, name)
        if found is None:
            break
        module, rest = found, parts[count:]
    return module, rest


def _import(module: str, name: str) -> types.ModuleType | None:
    """Return a module of a registered package, or None where there is none of this name."""
    known = sys.modules.get(module)
    if known is not None or module.rsplit(".", 1)[-1].startswith("__"):
        return known
    with _import_errors(name):
        try:
            spec = importlib.util.find_spec(module)
            return None if spec is None else importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                return None
            raise


@contextlib.contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Turn whatever a module raises when it is imported into a ParamsError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ParamsError(f"{shown(name)} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ParamsError(
            f"{shown(name)} cannot be imported: {type(error).__name__}: {error}"
        ) from error


# --- Dtypes -------------------------------------------------------------------------------------


def is_dtype(kind: object) -> bool:
    """Return whether `kind` is TensorFlow's class DType, without importing TensorFlow."""
    return (
        isinstance(kind, type)
        and kind.__name__ == "DType"
        and kind.__module__.startswith("tensorflow.")
    )


@functools.cache
def _dtypes() -> dict[str, tf.DType]:
    import tensorflow as tf  # Params without dtypes need no TensorFlow

    members = vars(tf.dtypes.experimental) | vars(tf.dtypes)
    return {value.name: value for value in members.values() if isinstance(value, tf.DType)}


def dtype_by_name(name: str) -> tf.DType | None:
    """Return the dtype called `float32` or `tf.float32`, or None."""
    return _dtypes().get(name.removeprefix("tf."))
