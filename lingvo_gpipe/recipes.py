"""Where the params of a command come from: a registered recipe, a run's folder, or a file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lingvo_gpipe import errors, hyperparams, registry, text_file
from lingvo_gpipe.hyperparams.text import written_values

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task


class FromText(registry.Model):
    """A model from params as text, such as those that a run keeps beside its checkpoints."""

    def __init__(self, params: Task.Params) -> None:
        self._params = params

    def task(self) -> Task.Params:
        """Return a copy of the params."""
        return self._params.copy()

    def resized(self, name: str, value: int) -> Self:  # noqa: ARG002 (as in `Model`)
        """Refuse: params have no sizes of a recipe."""
        raise errors.ParamsError(
            f"the params have no field {name!r}, nor sizes of a recipe. Give --model "
            "without the run's folder or --params"
        )


def find(
    models: registry.Registry,
    *,
    model: str | None,
    params: str | None,
    logdir: str | None,
    checkpoint: str | None,
    trains: bool,
) -> tuple[str, registry.Model]:
    """Return the name of a command's model, and what makes its task.

    Args:
        models: the registered recipes.
        model: flag --model.
        params: flag --params.
        logdir: flag --logdir.
        checkpoint: flag --checkpoint.
        trains: whether the mode trains; then a named recipe is compared with the run later.

    Raises:
        UserError: no model is named, or none can be read where it should be; the run in `logdir`
            is one of another model, and no checkpoint is named.
    """
    if params is not None:
        if model is not None:
            raise errors.ParamsError(
                "--params and --model both name a model. Leave one of them out"
            )
        task = _of_file(models, params)
        return task.name or Path(params).stem, FromText(task)
    folder = None if logdir is None else Path(logdir).expanduser() / "checkpoints"
    if model is not None:
        recipe = models.model(model)()
        of_run = None
        place = folder if checkpoint is None else Path(checkpoint).expanduser()
        if place is not None and not trains:
            with contextlib.suppress(errors.CheckpointError):  # the recipe needs no text
                of_run = _of_run(models, place)
        if of_run is None:
            return model, recipe
        if of_run.name not in ("", model):  # a run that was started in Python may have no name
            if checkpoint is not None:
                return model, recipe  # which may share variables with that of the checkpoint
            raise errors.ParamsError(
                f"{logdir} holds a run of {of_run.name}, not of {model}. Leave --model out, or "
                "name the run's"
            )
        return model, FromText(of_run)
    place = folder if trains or checkpoint is None else Path(checkpoint).expanduser()
    of_run = None if place is None else _of_run(models, place)
    if of_run is None:
        where = "" if place is None else f", and there is no checkpoint in {place}"
        raise errors.ParamsError(f"--model=NAME is missing{where}. --list_models shows all names")
    return of_run.name, FromText(of_run)


def _of_file(models: registry.Registry, path: str) -> Task.Params:
    try:
        text = text_file.read(path)
    except OSError as error:
        raise errors.ParamsError(
            f"--params={path} cannot be read: {error.strerror}. Name a file with the text that "
            "--mode=params --text prints, or ckpt-N.params.txt of a run's checkpoints"
        ) from error
    return _of_text(models, text, path)


def _of_run(models: registry.Registry, place: Path) -> Task.Params | None:
    """Return the params of a checkpoint, or of the newest one of a folder; None without one.

    Args:
        models: the registered recipes.
        place: a checkpoint, a folder of checkpoints, or of a run.
    """
    from lingvo_gpipe.run import checkpoints

    if (place / "checkpoints").is_dir():
        place = place / "checkpoints"
    if place.is_dir():
        newest = checkpoints.newest_text(str(place))
        text = None if newest is None else newest[1]
    elif place.name == "checkpoints":
        text = None
    else:
        text = checkpoints.params_text(checkpoints.at(str(place)))
    return None if text is None else _of_text(models, text, str(place))


def _of_text(models: registry.Registry, text: str, source: str) -> Task.Params:
    from lingvo_gpipe.task import Task

    name = written_values(text).get("name", "").strip("'")
    with contextlib.suppress(errors.UserError):  # a run that was started in Python has no recipe
        models.find(name)  # the recipe's module imports the packages whose layers the text names
    try:
        params = hyperparams.from_text(text)
    except errors.ParamsError as error:
        raise errors.ParamsError(f"{source}: {error}") from error
    if not isinstance(params, Task.Params):
        raise errors.ParamsError(
            f"{source} holds params of {params.class_name()}, not of a task. Give --model=NAME"
        )
    return params
