"""Names of a package that are imported when they are first used, not with the package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def exports(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`.

    Args:
        package: its dotted name.
        homes: module or package below it → the names that it defines. An empty sequence exports
            the module itself.

    >>> getter, _, names = exports("lingvo_gpipe", {"seeds": ["base_seed"], "errors": []})
    >>> names
    ['base_seed', 'errors']
    >>> getter("base_seed").__module__
    'lingvo_gpipe.seeds'
    """
    home_of = {name: home for home, names in homes.items() for name in names or (home,)}
    exported = sorted(home_of)

    def get(name: str) -> object:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home}")
        value: object = getattr(module, name) if homes[home] else module
        # Later uses find it without this function.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: exported, exported
