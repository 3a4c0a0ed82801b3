"""What hooks for experiment trackers share: their package, the run's settings and its id there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingvo_gpipe import errors, regular_files

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_LAYERS = "model.layers["


def package(name: str) -> Any:  # a module without types
    """Return the package of a tracker, whose extra has the same name.

    Raises:
        HookError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise errors.HookError(
            f"the package {name} cannot be imported ({error}). Install it: "
            f"pip install 'lingvo-gpipe[{name}]'"
        ) from error


def settings(params: Task.Params) -> dict[str, str]:
    """Return path → value as text of the run's params; layers, which may be many, are left out."""
    return {
        path: str(value) for path, value, _ in params.iter_paths() if not path.startswith(_LAYERS)
    }


def read_id(path: Path) -> str | None:
    """Return the run's id that `path` holds; None: there is none."""
    try:
        return regular_files.read(path).decode().strip() or None
    except FileNotFoundError:
        return None


def keep_id(path: Path, identity: str) -> None:
    """Write the run's id to `path`."""
    path.write_text(f"{identity}\n", encoding="utf-8")
