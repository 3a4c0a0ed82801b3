"""A grid of settings: fields of a task and the values that each of them takes.

`--sweep=PATH=VALUE,VALUE` is one axis; the settings are all combinations of the axes' values.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence

from lingvo_gpipe import errors, modes, recipes, registry, trainer
from lingvo_gpipe.imports import tensorflow_import

_EXAMPLE = "--sweep=train.optimizer.learning_rate=1e-3,3e-3"
_MAX_NAME_CHARS = 100
_NOT_IN_FILE_NAMES = re.compile(r"[^\w.+\-=]+")
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A field of a task, and the values that it takes.

    Attributes:
        path: of the field.
        values: as overrides write them.
    """

    path: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One value for each axis.

    Attributes:
        paths: of the fields.
        values: of each path, as overrides write it.
    """

    paths: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """The assignments that `--params_override` takes."""
        return tuple(map("=".join, zip(self.paths, self.values, strict=True)))

    @property
    def names(self) -> tuple[str, ...]:
        """A short name for each path: its last parts, so many that all names differ."""
        for count in range(1, 50):
            short = tuple(".".join(path.split(".")[-count:]) for path in self.paths)
            if len(set(short)) == len(short):
                break
        return short

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of folders, one inside the other, of the runs with this setting."""
        pairs = map("=".join, zip(self.names, self.values, strict=True))
        return tuple(_NOT_IN_FILE_NAMES.sub("_", pair)[:_MAX_NAME_CHARS] for pair in pairs)

    def __str__(self) -> str:
        return ", ".join(map("=".join, zip(self.names, self.values, strict=True)))


def axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes that the values of --sweep name.

    Raises:
        ParamsError: one has no path or no values, or names something twice.

    >>> axes(["train.optimizer.learning_rate=1e-3,3e-3"])[0].values
    ('1e-3', '3e-3')
    >>> axes(["model.cuts=(1, 2),(1, 3)"])[0].values
    ('(1, 2)', '(1, 3)')
    """
    found: list[Axis] = []
    for text in texts:
        path, _, rest = (part.strip() for part in text.partition("="))
        values = tuple(part.strip() for part in _parts(rest))
        if not path or not all(values):
            raise errors.ParamsError(
                f"--sweep={text} is not a path and its values. Write {_EXAMPLE}"
            )
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise errors.ParamsError(f"--sweep={text} has {twice} twice. Give it once")
        if path in [axis.path for axis in found]:
            raise errors.ParamsError(f"--sweep={path} comes twice. Give all values to one")
        if path == "model.seed":
            raise errors.ParamsError(f"--sweep={text}: seeds are not swept. Use --seeds")
        found.append(Axis(path, values))
    folders = [setting.folders for setting in settings(found)]
    same = next((each for each in folders if folders.count(each) > 1), None)
    if same is not None:
        raise errors.ParamsError(
            f"--sweep: two settings would have one folder, {'/'.join(same)}. Write the values so "
            "that their letters and digits differ"
        )
    return found


def settings(found: Sequence[Axis]) -> list[Setting]:
    """Return all combinations of the axes' values, those of the last axis changing first."""
    paths = tuple(axis.path for axis in found)
    return [Setting(paths, values) for values in itertools.product(*(a.values for a in found))]


def number(text: str) -> float | str:
    """Return the finite number that a value is, or its text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else text


def check(arguments: Sequence[str], wanted: Sequence[Setting]) -> None:
    """Refuse settings that the model does not have.

    Args:
        arguments: flags of the trainer.
        wanted: the settings.

    Raises:
        UserError: names what is refused, and why.
    """
    values = trainer.read_flags(arguments)
    if values is None:
        raise errors.ParamsError("--help is not a flag of a run. Leave it out")
    os.environ.setdefault(trainer.LOG_LEVEL, "2")
    modes.register()
    tensorflow_import.defer()  # most recipes need it when they run
    models = registry.Registry(values.params_package)
    from lingvo_gpipe import task

    values.model, recipe = recipes.find(
        models,
        model=values.model,
        params=values.params,
        logdir=values.logdir,
        checkpoint=values.checkpoint,
        trains=True,
    )
    own = values.params_override
    for setting in wanted:
        values.params_override = [*own, *setting.overrides]
        try:
            task.check(trainer.task_of(values, recipe))
        except errors.ParamsError as error:
            raise errors.ParamsError(_of_axes(str(error), setting, wanted)) from error


def _of_axes(text: str, setting: Setting, wanted: Sequence[Setting]) -> str:
    """Return the message for an override of `setting`: the axis that it suggests has all values."""
    for place, (path, value) in enumerate(zip(setting.paths, setting.values, strict=True)):
        if f"'{path}'" in text and text.endswith(f"={value}"):
            every = dict.fromkeys(each.values[place] for each in wanted)
            text = f"{text.removesuffix(value)}{','.join(every)}"
    return text.replace("--params_override=", "--sweep=")


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between the commas that are outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING + _CLOSING:
            depth += 1 if character in _OPENING else -1
        elif character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]
