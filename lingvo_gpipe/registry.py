"""From a name to a model, and from a name to a mode.

A model is a class below a package of params files, named by where it lives:
`lingvo_gpipe.params.image.digits.ConvNet` is `image.digits.ConvNet`. The project's own package is
always searched; `--params_package` adds a user's. A file that cannot be imported does
not hide others.

A mode is what the trainer does with a model. A task adds its own modes by calling `add_mode` where
its package is imported, so that this package does not import tasks.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import fnmatch
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

from lingvo_gpipe import errors, hyperparams

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

PROJECT_PACKAGE = "lingvo_gpipe.params"


class Model:
    """Base of registered models: a recipe that builds a task's Params tree.

    A subclass in a module of a params package is registered automatically, unless its name begins
    with an underscore, which marks a base of others. Attributes that are whole numbers and from
    which `task` builds (`num_cells = 18`) are sizes of a family: `resized` makes its other members.
    """

    def task(self) -> Task.Params:
        """Return the task of the model, complete: it trains by its name alone."""
        raise errors.ParamsError(f"{type(self).__qualname__} defines no task()")

    def resized(self, name: str, value: int) -> Self:
        """Return this recipe with another value of its size `name`.

        Raises:
            ParamsError: it has no such size.
        """
        sizes = [key for key in dir(self) if key[0] != "_" and type(getattr(self, key)) is int]
        if name not in sizes:
            raise errors.ParamsError(
                f"{type(self).__name__} has no size {name!r}; {errors.suggestion(name, sizes)}"
            )
        other = copy.copy(self)
        setattr(other, name, value)
        return other


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What a mode is asked to do.

    Attributes:
        model: registered name.
        task: the model's task, with every override applied.
        logdir: where the run keeps its files; None: not set.
        checkpoint: path of the checkpoint to start from or evaluate; None: the newest of `logdir`.
        report: prints one line for the user.
        should_stop: returns whether the user asked the run to save and leave.
        rebuild: (size, value) → the task with another size of its recipe, flags applied.
        flags: the command line; some of them, only some modes read.
        note_step: called with the number of each update, before it begins.
    """

    model: str
    task: Task.Params
    logdir: Path | None
    checkpoint: str | None
    report: Callable[[str], None]
    should_stop: Callable[[], bool]
    rebuild: Callable[[str, int], Task.Params]
    flags: argparse.Namespace
    note_step: Callable[[int], None] = lambda _: None


Mode = Callable[[Job], None]
# Name → function, and the class of the tasks that have the mode.
_MODES: dict[str, tuple[Mode, type[hyperparams.Params]]] = {}


def add_mode(
    name: str, function: Mode, tasks: type[hyperparams.Params] = hyperparams.Params
) -> None:
    """Make `--mode=name` call `function`.

    Args:
        name: name of the mode.
        function: function of the mode.
        tasks: class of the task's Params that it takes; the other tasks do not have this mode.

    Raises:
        ParamsError: the name is taken by another function.
    """
    registered, _ = _MODES.setdefault(name, (function, tasks))
    if registered is not function:
        raise errors.ParamsError(
            f"mode {name!r} of {function.__module__} is already that of {registered.__module__}; "
            "give one of the two another name"
        )


def mode(name: str, task: Task.Params) -> Mode:
    """Return the function of `--mode=name`.

    Raises:
        ParamsError: the task has no such mode.
    """
    names = [each for each, (_, tasks) in _MODES.items() if isinstance(task, tasks)]
    if name not in names:
        raise errors.ParamsError(
            f"{task.name or 'the task'} has no mode {name!r}; {errors.suggestion(name, names)}"
        )
    return _MODES[name][0]


class Registry:
    """Finds models in packages of params files.

    Attributes:
        broken: module → why it could not be imported, as far as it was tried.
    """

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """Look into the project's own package and `packages`.

        Raises:
            ParamsError: one of `packages`, or the project's own, cannot be found.
        """
        self.broken: dict[str, str] = {}
        where = f"{PROJECT_PACKAGE} (a link to the folder ../params)"
        self._packages = {PROJECT_PACKAGE: _package(PROJECT_PACKAGE, where)}
        for name in packages:
            self._packages[name] = _package(name, f"--params_package={name}")
        for name in self._packages:
            # So that the text of a user's model can name the user's classes.
            hyperparams.register_package(name.split(".", 1)[0])

    def names(self, pattern: str = "*") -> list[str]:
        """Return the sorted names of all models that match the glob `pattern`.

        Raises:
            ParamsError: two packages give one name.
        """
        package_of: dict[str, str] = {}
        for package, root in self._packages.items():
            for module in _modules_below(root):
                for name in self._models_of(package, module):
                    _check_once(name, package_of.setdefault(name, package), package)
        return sorted(fnmatch.filter(package_of, pattern))

    def find(self, name: str) -> type[Model] | None:
        """Return the class of the model `name`, or None; imports its module alone.

        Raises:
            ParamsError: it is known twice, or its module cannot be imported.
        """
        place = name.rpartition(".")[0]
        match: tuple[type[Model], str] | None = None
        for package, root in self._packages.items():
            module = f"{package}.{place}" if place else package
            if module not in _modules_below(root):
                continue
            models = self._models_of(package, module)
            if module in self.broken:
                reason = self.broken[module]
                raise errors.ParamsError(f"{name}: {module} cannot be imported: {reason}")
            if name in models:
                match = match or (models[name], package)
                _check_once(name, match[1], package)
        if match is None:
            return None
        _let_texts_name_imports(sys.modules[match[0].__module__])
        return match[0]

    def model(self, name: str) -> type[Model]:
        """Return the class of the model `name`.

        Raises:
            ParamsError: it is unknown, known twice, or its module cannot be imported.
        """
        kind = self.find(name)
        if kind is not None:
            return kind
        names = self.names()
        near = errors.suggestion(name, names)
        text = f"no model {name!r}; {near}. --list_models shows all {len(names)}"
        broken = [f"\n    {where}: {why}" for where, why in self.broken.items()]
        if broken:
            text += ". Not looked into, since it cannot be imported:" + "".join(broken)
        raise errors.ParamsError(text)

    def _models_of(self, package: str, module: str) -> dict[str, type[Model]]:
        """Return name → class of the models that a module defines; none if it is broken."""
        try:
            members = vars(importlib.import_module(module))
        except Exception as error:  # noqa: BLE001 - another's code: reported, and does not hide others.
            self.broken[module] = errors.cause(error, __file__)
            return {}
        return {
            f"{module}.{kind.__name__}".removeprefix(f"{package}."): kind
            for kind in members.values()
            if inspect.isclass(kind) and issubclass(kind, Model) and kind.__module__ == module
            if not kind.__name__.startswith("_")
        }


def _check_once(name: str, first: str, second: str) -> None:
    if first != second:
        raise errors.ParamsError(
            f"two packages have a model {name!r}: {first} and {second}. Rename one, or leave one "
            "package out"
        )


def _package(name: str, where: str) -> ModuleType:
    """Import a package of params files.

    Raises:
        ParamsError: it is not there, its code raises something, or it is a single file.
    """
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise errors.ParamsError(
            f"{where}: {errors.cause(error, __file__)}. The folder around the package must be on "
            "PYTHONPATH, or the package be installed"
        ) from error
    if not hasattr(module, "__path__"):
        raise errors.ParamsError(
            f"{where}: {name} is a single file. Name the package (the folder) around it"
        )
    return module


def _modules_below(root: ModuleType) -> Iterator[str]:
    """Yield the names of a package and of all modules below it, none of them imported here."""
    for folder in map(Path, root.__path__):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            names = parts[:-1] if parts[-1] == "__init__" else parts
            if all(map(str.isidentifier, names)):
                yield ".".join((root.__name__, *names))


def _let_texts_name_imports(module: ModuleType) -> None:
    """Let texts name the Keras layers of the packages that a recipe's module imports.

    These are packages whose classes and functions Keras has registered, such as keras_hub.
    """
    if "keras" not in sys.modules:
        return
    import keras

    from lingvo_gpipe.layers import keras_references

    imported: list[str] = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.append(node.module)
    registered = [str(each.__module__) for each in keras.saving.get_custom_objects().values()]
    packages = {name.partition(".")[0] for name in imported}
    for package in packages.intersection(name.partition(".")[0] for name in registered):
        hyperparams.register_package(package)
        keras_references.allow_registered_functions(package)
