"""Where the params of a command come from: a registered recipe, a run's folder, or a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lingvo_gpipe import errors, hyperparams, registry, regular_files

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_MAX_FILE_BYTES = 2**26
_SHOWN_RUNS = 3


class Kept(registry.Model):
    """A model from params as text, such as those that a run keeps beside its checkpoints."""

    def __init__(self, params: Task.Params) -> None:
        """Hold them."""
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
            is one of another model.
    """
    if params is not None:
        if model is not None:
            raise errors.ParamsError(
                "--params and --model both name a model. Leave one of them out"
            )
        task = _of_file(os.path.expanduser(params))
        return task.name or Path(params).stem, Kept(task)
    place = None if logdir is None else Path(os.path.expanduser(logdir)) / "checkpoints"
    if model is not None:
        recipe = models.model(model)()
        kept = None if trains or checkpoint or place is None else _of_run(place, quiet=True)
        if kept is None:
            return model, recipe
        if kept.name not in ("", model):  # a run that was started in Python may have no name
            raise errors.ParamsError(
                f"{logdir} holds a run of {kept.name}, not of {model}. Leave --model out, or name "
                "the run's"
            )
        return model, Kept(kept)
    if checkpoint is not None and not trains:
        place = Path(os.path.expanduser(checkpoint))
    found = None if place is None else _of_run(place, quiet=False)
    if found is None:
        raise errors.ParamsError(_no_model(checkpoint if checkpoint and not trains else logdir))
    return found.name, Kept(found)


def _no_model(folder: str | None) -> str:
    """Return what to do where no flag names a model, nor a checkpoint in a folder."""
    missing = "--model=NAME is missing"
    if folder is None:
        return (
            f"{missing}. --list_models shows all names; the --logdir of a run that has a "
            "checkpoint names its own"
        )
    place = Path(os.path.expanduser(folder))
    if place.name in ("best", "checkpoints") and os.path.isdir(place.parent / "checkpoints"):
        run = place.parent
        best = f" --checkpoint={folder}" if place.name == "best" else ""
        return f"{missing}: {folder} is a part of a run. Use --logdir={run}{best}"
    is_folder = os.path.isdir(place)
    where = place if is_folder else place.parent
    runs = [path.parent.name for path in sorted(where.glob("*/checkpoints"))]
    if is_folder:
        text = f"{missing}, and {folder} has no checkpoint"
        near = runs[:_SHOWN_RUNS]
    else:
        text = f"{missing}, and {folder} does not exist"
        near = errors.nearest(place.name, runs)
    if near:
        flags = " or ".join(f"--logdir={where / name}" for name in near)
        return f"{text}. Use {flags}; --list_models shows all names"
    return f"{text}. --list_models shows all names"


def _of_file(path: str) -> Task.Params:
    try:
        text = regular_files.read_text(path, _MAX_FILE_BYTES)
    except OSError as error:
        kept = sorted(Path(path, "checkpoints").glob("ckpt-*.params.txt"))
        if kept:
            raise errors.ParamsError(
                f"--params={path} is the folder of a run. --logdir={path} alone takes its params; "
                f"for a new run, use --params={kept[-1]}"
            ) from error
        raise errors.ParamsError(
            f"--params={path} cannot be read: {error.strerror}. Name a file with the text that "
            "--mode=params --text prints, or ckpt-N.params.txt of a run's checkpoints"
        ) from error
    return _of_text(text, path)


def _of_run(place: Path, *, quiet: bool) -> Task.Params | None:
    """Return the params of a checkpoint, or of the newest one of a folder; None without one.

    Args:
        place: the checkpoint or the folder.
        quiet: what cannot be read is None, too.
    """
    from lingvo_gpipe.run import checkpoints

    try:
        if os.path.isdir(place / "checkpoints"):  # Path.is_dir raises without permissions
            place = place / "checkpoints"
        if os.path.isdir(place):
            kept = checkpoints.newest_text(str(place))
            text = None if kept is None else kept[1]
        elif place.name == "checkpoints":
            text = None
        else:
            text = checkpoints.params_text(checkpoints.at(str(place)))
        return None if text is None else _of_text(text, str(place))
    except errors.UserError:
        if quiet:
            return None
        raise


def _of_text(text: str, source: str) -> Task.Params:
    from lingvo_gpipe.task import Task

    lines = text.split("\n", 1)
    body = lines[1] if lines[0].startswith("# ") and len(lines) > 1 else text
    try:
        params = hyperparams.from_text(body)
    except errors.ParamsError as error:
        raise errors.ParamsError(f"{source}: {error}") from error
    if not isinstance(params, Task.Params):
        raise errors.ParamsError(
            f"{source} holds params of {params.class_name()}, not of a task. Give --model=NAME"
        )
    return params
