"""From a name to a model, and from a name to a mode.

A model is a class below a package of params files, named by where it lives:
`lingvo_gpipe.params.image.digits.ConvNet` is `image.digits.ConvNet`. The project's own package is
always searched; a user's package is added by `--params_package` or by an entry point of the group
`lingvo_gpipe.params`. Nothing is imported before it is needed, and a file that cannot be imported
does not hide others.

A mode is what the trainer does with a model. A task adds its own modes by calling `add_mode` where
its package is imported, so that this package does not import tasks.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self, TypeAlias

from lingvo_gpipe import errors, hyperparams

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

PROJECT_PACKAGE = "lingvo_gpipe.params"
ENTRY_POINT_GROUP = "lingvo_gpipe.params"


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
        members = {key: getattr(self, key) for key in dir(self) if not key.startswith("_")}
        sizes = [key for key, member in members.items() if type(member) is int]
        if name not in sizes:
            near = errors.nearest(name, sizes) or sizes
            hint = f"nearest {', '.join(map(repr, near))}" if near else "it has none"
            raise errors.ParamsError(f"{type(self).__name__} has no size {name!r}; {hint}")
        other = copy.copy(self)
        setattr(other, name, value)
        return other


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The trainer's flags that only some modes read; see `add_mode`.

    Attributes:
        follow: evaluate each new checkpoint of a run.
        dry_run: try everything, and leave nothing.
        fit: bytes of a device, as text.
        grow: the field whose largest value is searched.
        profile: run the layers and plan by their measured times.
        hosts: shape of the cluster, as text.
        profile_steps: the steps whose slots are timed, as text.
        fields: a glob of fields of the task.
        text: print params as text.
        num_partitions: K, in place of the task's.
    """

    follow: bool = False
    dry_run: bool = False
    fit: str | None = None
    grow: str | None = None
    profile: bool = False
    hosts: str | None = None
    profile_steps: str | None = None
    fields: str | None = None
    text: bool = False
    num_partitions: int | None = None


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
        note_step: called with the number of each update, before it begins.
        options: flags that only some modes read.
    """

    model: str
    task: Task.Params
    logdir: Path | None
    checkpoint: str | None
    report: Callable[[str], None]
    should_stop: Callable[[], bool]
    rebuild: Callable[[str, int], Task.Params]
    note_step: Callable[[int], None] = lambda _: None
    options: Options = Options()


Mode = Callable[[Job], None]
Splits: TypeAlias = "Callable[[Task.Params], Iterable[str | None]]"


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A mode, which of the job's options it reads, which parts of the data, and for which tasks."""

    function: Mode
    options: tuple[str, ...]
    splits: Splits
    tasks: type[hyperparams.Params]


_MODES: dict[str, _Entry] = {}


def add_mode(
    name: str,
    function: Mode,
    options: Iterable[str] = (),
    splits: Splits = lambda _: (),
    tasks: type[hyperparams.Params] = hyperparams.Params,
) -> None:
    """Make `--mode=name` call `function`.

    Args:
        name: name of the mode.
        function: function of the mode.
        options: names of the `Options` that it reads; the trainer refuses the others.
        splits: task → parts of the data that it reads, None for that of training; the trainer
            looks whether they are there before it imports TensorFlow.
        tasks: class of the task's Params that it takes; the other tasks do not have this mode.

    Raises:
        ParamsError: the name is taken by another function.
    """
    entry = _Entry(function, tuple(options), splits, tasks)
    known = _MODES.setdefault(name, entry).function
    if known is not function:
        raise errors.ParamsError(
            f"mode {name!r} of {function.__module__} is already that of {known.__module__}; "
            "give one of the two another name"
        )


def mode(name: str, task: Task.Params) -> Mode:
    """Return the function of `--mode=name`.

    Raises:
        ParamsError: the task has no such mode.
    """
    names = modes_of(task)
    if name not in names:
        near = errors.nearest(name, names)
        hint = f"nearest {', '.join(map(repr, near))}; " if near else ""
        raise errors.ParamsError(f"no mode {name!r}; {hint}use one of {', '.join(names)}")
    return _MODES[name].function


def modes_of(task: Task.Params) -> tuple[str, ...]:
    """Return the names of the modes that a task has."""
    return tuple(name for name, entry in _MODES.items() if isinstance(task, entry.tasks))


def modes_that_read(option: str) -> tuple[str, ...]:
    """Return the modes that read an option of the job."""
    return tuple(name for name, entry in _MODES.items() if option in entry.options)


def splits_of(name: str, task: Task.Params) -> tuple[str | None, ...]:
    """Return the parts of the data that a mode reads; None is that of training."""
    return tuple(_MODES[name].splits(task))


class Registry:
    """Finds models in packages of params files.

    Attributes:
        broken: package or module → why it could not be imported, as far as it was tried.
    """

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """Look into the project's own package, the announced ones, and `packages`.

        Raises:
            ParamsError: one of `packages`, or the project's own, cannot be found.
        """
        self.broken: dict[str, str] = {}
        self._packages: dict[str, ModuleType] = {PROJECT_PACKAGE: _project_package()}
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            where = f"entry point {point.name} = {point.value}"
            try:
                self._packages[point.module] = _user_package(point.module, where)
            except errors.ParamsError as error:
                self.broken[where] = str(error).removeprefix(f"{where}: ")
        for name in packages:
            self._packages[name] = _user_package(name, f"--params_package={name}")
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
                for kind in self._models_of(module):
                    name = _name(kind, package)
                    if name in package_of:
                        raise _named_twice(name, package_of[name], package)
                    package_of[name] = package
        return sorted(fnmatch.filter(package_of, pattern))

    def model(self, name: str) -> type[Model]:
        """Return the class of the model `name`; imports its module alone.

        Raises:
            ParamsError: it is unknown, known twice, or its module cannot be imported.
        """
        below, _, class_name = name.rpartition(".")
        models: dict[str, type[Model]] = {}
        for package in self._packages:
            module = f"{package}.{below}" if below else package
            if not _exists(module):
                continue
            for kind in self._models_of(module):
                if kind.__name__ == class_name:
                    models[package] = kind
            if module in self.broken:
                raise errors.ParamsError(
                    f"{name}: {module} cannot be imported: {self.broken[module]}"
                )
        if len(models) > 1:
            raise _named_twice(name, *list(models)[:2])
        if not models:
            raise self._unknown(name)
        return next(iter(models.values()))

    def _models_of(self, module: str) -> Iterator[type[Model]]:
        try:
            members = vars(_import(module))
        except Exception as error:  # noqa: BLE001 - another's code: reported, and does not hide others.
            self.broken[module] = errors.cause(error, __file__)
            return
        for kind in list(members.values()):
            defined_here = inspect.isclass(kind) and kind.__module__ == module
            if defined_here and issubclass(kind, Model) and not kind.__name__.startswith("_"):
                yield kind

    def _unknown(self, name: str) -> errors.ParamsError:
        names = self.names()
        near = errors.nearest(name, names)
        hint = f"nearest {', '.join(map(repr, near))}. " if near else ""
        text = f"no model {name!r}; {hint}--list_models shows all {len(names)}"
        if self.broken:
            text += ". Not looked into, since it cannot be imported:"
            text += "".join(f"\n    {where}: {why}" for where, why in self.broken.items())
        return errors.ParamsError(text)


def _named_twice(name: str, first: str, second: str) -> errors.ParamsError:
    return errors.ParamsError(
        f"two packages have a model {name!r}: {first} and {second}. Rename one, or leave one "
        "package out"
    )


def _name(kind: type[Model], package: str) -> str:
    return f"{kind.__module__}.{kind.__name__}".removeprefix(f"{package}.")


def _project_package() -> ModuleType:
    path = Path(__file__).with_name(PROJECT_PACKAGE.rsplit(".", 1)[-1])
    if path.is_file():
        raise errors.ParamsError(
            f"{path} is a file and not a link to the folder ../{path.name}: this copy lost its "
            "links (a clone with core.symlinks=false, or a .zip unpacked without them). Clone "
            "again with them, or make both again: "
            "cd lingvo_gpipe && ln -sf ../params params && ln -sf ../tasks tasks"
        )
    return importlib.import_module(PROJECT_PACKAGE)


def _user_package(name: str, where: str) -> ModuleType:
    try:
        module = _import(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise errors.ParamsError(f"{where}: {errors.cause(error, __file__)}") from error
        beside = Path(name.split(".", 1)[0]).is_dir()
        hint = "It is a folder beside you: " if beside else ""
        raise errors.ParamsError(
            f"{where}: no module {error.name!r} on Python's path. {hint}python -m "
            "lingvo_gpipe.trainer looks into the current folder, the installed command does not. "
            "Install the package, or put the folder around it on PYTHONPATH"
        ) from error
    except Exception as error:
        raise errors.ParamsError(f"{where}: {errors.cause(error, __file__)}") from error
    if not hasattr(module, "__path__"):
        raise errors.ParamsError(
            f"{where}: {name} is a single file. Name the package (the folder) around it"
        )
    return module


def _import(name: str) -> ModuleType:
    """Import a module; one that calls sys.exit is broken, and does not end this process."""
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        reason = f"it calls sys.exit({error})"
        raise ImportError(reason).with_traceback(error.__traceback__) from error


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except (Exception, SystemExit):  # noqa: BLE001 - a package around it is broken: importing it shows why.
        return True


def _modules_below(root: ModuleType) -> Iterator[str]:
    """Yield the names of `root` and of all modules below it, none of them imported here."""
    yield root.__name__
    yield from _below(root.__path__, root.__name__)


def _below(folders: Iterable[str], package: str) -> Iterator[str]:
    folders = list(folders)
    names = {module.name for module in pkgutil.iter_modules(folders)}
    # Folders without an __init__.py are packages too.
    names.update(
        path.name
        for folder in folders
        for path in Path(folder).iterdir()
        if path.name.isidentifier() and path.is_dir() and any(path.rglob("*.py"))
    )
    for name in sorted(names):
        yield f"{package}.{name}"
        inside = [str(Path(folder, name)) for folder in folders if Path(folder, name).is_dir()]
        yield from _below(inside, f"{package}.{name}")
