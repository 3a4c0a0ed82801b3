"""What a run keeps, as everything but training uses it: weights, and what its ids mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, task
from lingvo_gpipe.input import Input
from lingvo_gpipe.layers import base
from lingvo_gpipe.run import checkpoint, log_directory

_USED = ("model.", "input.", "train.average")
_COUNTED = re.compile(r"\.(languages|reads)\b")
_SHOWN = 3


def saved_keys(specs: Mapping[str, base.VariableSpec], train: task.Train) -> dict[str, str]:
    """Return path → the key under which checkpoints hold what evaluation uses.

    Averages stand for weights and statistics where training keeps them; frozen weights have none.

    Args:
        specs: path → spec of the network in training.
        train: of the task.
    """
    return {
        path: f"average/{path}"
        if train.average is not None and (spec.trainable or spec.is_state)
        else f"variables/{path}"
        for path, spec in specs.items()
    }


def restore(
    by_path: Mapping[str, tf.Variable],
    specs: Mapping[str, base.VariableSpec],
    params: Any,
    *,
    logdir: Path | None,
    which: str | None,
) -> checkpoint.Restored:
    """Give a network's variables the values that evaluation uses.

    Args:
        by_path: path → variable; some of the network's, or all.
        specs: see `saved_keys`.
        params: a `Task.Params`.
        logdir: of the run.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    keys = saved_keys(specs, params.train)
    objects = {keys[path]: variable for path, variable in by_path.items()}
    directory = str(which if logdir is None else logdir / log_directory.CHECKPOINTS)
    restored = checkpoint.Checkpoints(directory, objects, read_only=True).restore(
        which, subset=True
    )
    if restored is None:
        raise errors.CheckpointError(
            f"{directory} has no checkpoint. Train first, or name one by --checkpoint"
        )
    warn_of_torn(restored)
    warn_of_change(params, restored)
    return restored


def folders(logdir: Path | None, which: str | None) -> list[Path]:
    """Return where files that a run keeps may lie: the run of a checkpoint, then `logdir`.

    Args:
        logdir: of the run.
        which: path of a checkpoint in a folder of the run, or of that folder.
    """
    places = [] if logdir is None else [logdir]
    if which is None:
        return places
    path = Path(os.path.abspath(which))
    return [path.parent, *places] if path.is_dir() else [*path.parents[:2], *places]


def source(params: Any, *, logdir: Path | None, which: str | None) -> Input:
    """Return a task's input on what the run keeps of its data; on the data where it keeps nothing.

    Args:
        params: a `Task.Params`.
        logdir: of the run.
        which: path of a checkpoint, or of a directory of them: its run's folder is asked first.

    Raises:
        UserError: a file that is kept cannot be read or used.
    """
    found: Input = params.input.instantiate()
    for folder in folders(logdir, which):
        kept = log_directory.kept_assets(folder, found.asset_names)
        if kept:
            found.recall(kept)
            break
    return found


def warn_of_torn(restored: checkpoint.Restored) -> None:
    """Tell in the log which newer checkpoints were passed over."""
    for prefix, why in restored.torn:
        logging.warning("%s is torn, an older one is used: %s", prefix, why)


def warn_of_change(params: Any, restored: checkpoint.Restored) -> None:
    """Tell in the log how params differ from those that a checkpoint was trained with.

    Weights may fit all the same: of an input that scales otherwise, or of averages that are not
    asked for. Languages that are counted apart are left out, which serving does without.

    Args:
        params: a `Task.Params`.
        restored: the checkpoint.
    """
    text = checkpoint.params_text(restored.path)
    if text is None:
        return
    lines = [
        line
        for line in task.change(text, params.to_text()).refused
        if line.removeprefix("- ").removeprefix("+ ").startswith(_USED)
        and not _COUNTED.search(line.removeprefix("- ").removeprefix("+ ").partition(": ")[0])
    ]
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        logging.warning(
            "%s was trained with other params: %s%s",
            restored.path,
            "; ".join(lines[:_SHOWN]),
            more,
        )
