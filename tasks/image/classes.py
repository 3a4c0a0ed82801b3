"""The number of classes: told by the data, taken or checked by the model."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import errors, hyperparams

_FIELD = "classes"


def complete(task_params: Any, count: int, where: str, offset: int = 0) -> None:
    """Fill in every `classes` of a model that is not set, and check the others.

    Args:
        task_params: a `Task.Params`, which is changed.
        count: of the data's labels, `offset` included.
        where: what the data is called.
        offset: `input.label_offset`, by which labels were moved up.

    Raises:
        InputError: a layer has another number of classes.
    """
    model = task_params.model
    for path, found, declared in list(model.iter_paths()):
        if declared.name != _FIELD:
            continue
        if found is None or found is hyperparams.REQUIRED:
            model.set_path(path, count)
        elif found != count:
            moved = f" (input.label_offset={offset} included)" if offset else ""
            way = (
                "Set input.label_offset=1 where class 0 is the background, or make them equal"
                if found == count + 1 and not offset
                else f"Set it to {count}, or give other data"
            )
            raise errors.InputError(
                f"{where} has {count} classes{moved}, but model.{path}={found}. {way}"
            )
