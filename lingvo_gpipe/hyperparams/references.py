"""Names by which texts refer to classes and functions.

A class of lingvo_gpipe has a public name that no move of a file changes: the package that exports
it, below lingvo_gpipe, and its own name (`layers.Conv2D`, `tasks.mt.Translation`); a module
directly in lingvo_gpipe exports what it defines (`task.Train`). A user's class has its full name,
`my_package.my_module.MyLayer`.

Reading a name imports nothing but modules of registered packages, and calls nothing. Of the
functions of Keras, texts name activations alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any, TypeAlias

from lingvo_gpipe import errors
from lingvo_gpipe.errors import ParamsError
from lingvo_gpipe.hyperparams.literals import shown

Referenced: TypeAlias = type | types.FunctionType

_PROJECT = __name__.partition(".")[0]
_ACTIVATIONS = "keras.src.activations.activations"
_packages = {_PROJECT, "keras"}
_public_names: dict[Referenced, str] = {}


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


def public_name(referenced: Referenced) -> str:
    """Return the dotted name of a class or function, its public one where it has one."""
    if referenced in _public_names:
        return _public_names[referenced]
    module, name = str(referenced.__module__), str(referenced.__qualname__)
    parts = module.split(".")
    if module.startswith("keras.src."):
        places = [f"keras.{parts[2]}"]
    elif parts[0] == _PROJECT:
        places = [".".join(parts[:count]) for count in range(2, len(parts) + 1)]
    else:
        places = []
    for place in filter(sys.modules.get, places):
        if name.partition(".")[0] in _exported(place) and _inside(place, name) is referenced:
            public = f"{place.removeprefix(f'{_PROJECT}.')}.{name}"
            _public_names[referenced] = public
            return public
    return f"{module}.{name}"


def text_name(referenced: Referenced) -> str:
    """Return the public name, by which a text leads back to the class or function.

    Raises:
        ParamsError: it has none, such as a lambda, a class made inside a function, or a class whose
            name a class of lingvo_gpipe has.
    """
    if referenced in _public_names:
        return _public_names[referenced]
    found = _inside(str(referenced.__module__), str(referenced.__qualname__))
    if found is not referenced or not _may_be_named(referenced):
        raise ParamsError(
            f"{shown(referenced)} has no name that a text could hold; define it at the top of a "
            "module or, if a Keras layer calls it, write a class of keras.layers.Layer"
        )
    name = public_name(referenced)
    if _of_project(name) not in (None, referenced):
        raise ParamsError(
            f"a text names {shown(referenced)} {name!r}, which is a name of {_PROJECT} already; "
            f"define it in a package that is not called {name.partition('.')[0]!r}"
        )
    return name


def resolve(name: str) -> Any:
    """Return the class or function of a dotted name.

    Raises:
        ParamsError: the package is not registered, or has no such class or function.
    """
    found = _of_project(name)
    if found is None and is_registered(name):
        found = _find(name)
    if found is not None:
        return found
    public = name.removeprefix(f"{_PROJECT}.")
    place = public.rpartition(".")[0]
    near = errors.nearest(public, [f"{place}.{each}" for each in _exported(f"{_PROJECT}.{place}")])
    if near:
        raise ParamsError(
            f"{_PROJECT} has no class {shown(name)}; nearest {', '.join(map(repr, near))}"
        )
    if is_registered(name):
        raise ParamsError(f"{shown(name)} is not a class or function of a registered package")
    raise ParamsError(
        f"{shown(name)} is not in a registered package ({', '.join(sorted(_packages))}); if its "
        "package is yours, add --params_package=NAME, or call hyperparams.register_package"
    )


def is_registered(name: str) -> bool:
    """Return whether a dotted name is, or lies in, a registered package."""
    return any(name == package or name.startswith(f"{package}.") for package in _packages)


def _of_project(name: str) -> Any | None:
    """Return what a public name of lingvo_gpipe leads to."""
    return _find(f"{_PROJECT}.{name}") if "." in name else None


def _find(name: str) -> Any | None:
    """Return what a full dotted name in a registered package leads to; None: nothing."""
    module, rest = "", name
    while "." in rest:
        part, _, after = rest.partition(".")
        inner = f"{module}.{part}" if module else part
        if is_registered(inner) and not _import(inner):
            break
        module, rest = inner, after
    found = _inside(module, rest)
    if not isinstance(found, type | types.FunctionType) or not _may_be_named(found):
        return None
    return found if is_registered(str(found.__module__)) else None


def _inside(module: str, qualified_name: str) -> Any | None:
    """Return a class or function of an imported module, or a class in a class."""
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        if found is sys.modules.get(module) or isinstance(found, type):
            found = vars(found).get(part) if found is not None else None
        else:
            return None
    return found


def _may_be_named(referenced: Referenced) -> bool:
    """Return whether texts may name a class or function, as far as it has a name."""
    module = str(referenced.__module__)
    if isinstance(referenced, type):
        return True
    is_method = "." in referenced.__qualname__
    return not is_method and (not module.startswith("keras.") or module == _ACTIVATIONS)


def _exported(place: str) -> list[str]:
    """Return the public names of an imported package, or of a module directly in lingvo_gpipe."""
    members = vars(sys.modules[place]) if place in sys.modules else {}
    if "__all__" in members:
        return list(members["__all__"])
    is_package_of_project = place.startswith(f"{_PROJECT}.") and "__path__" in members
    return [] if is_package_of_project or place.count(".") > 1 else list(members)


def _import(module: str) -> bool:
    """Import a module of a registered package; return whether there is one of this name.

    Raises:
        ParamsError: its code raises something.
    """
    if module in sys.modules:
        return True
    parent, _, name = module.rpartition(".")
    is_in_file = parent in sys.modules and not hasattr(sys.modules[parent], "__path__")
    if is_in_file or not name.isidentifier() or name.startswith("__"):
        return False
    try:
        if importlib.util.find_spec(module) is None:
            return False
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ParamsError(f"{module} cannot be imported: {reason}") from error
    return True
