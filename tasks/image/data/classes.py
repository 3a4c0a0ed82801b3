"""The number of classes, which a model takes from its data or is checked against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lingvo_gpipe import errors, hyperparams

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_FIELD = "classes"


def complete(task_params: Task.Params, count: int, where: str, offset: int = 0) -> None:
    """Set every unset `classes` of a model's layers, and check the others.

    Args:
        task_params: changed in place.
        count: number of the data's classes, `offset` included.
        where: name of the data in messages.
        offset: `input.label_offset`, which is added to labels.

    Raises:
        InputError: a layer has another number of classes.
    """
    model = task_params.model
    for path, value, declared in list(model.iter_paths()):
        if declared.name != _FIELD:
            continue
        if value is None or value is hyperparams.REQUIRED:
            model.set_path(path, count)
        elif value != count:
            note = f" (input.label_offset={offset} included)" if offset else ""
            way_out = (
                "Set input.label_offset=1 where class 0 is the background, or make them equal"
                if value == count + 1 and not offset
                else f"Try --params_override='model.{path}={count}', or use other data"
            )
            raise errors.InputError(
                f"{where} has {count} classes{note}, but model.{path}={value}. {way_out}"
            )
