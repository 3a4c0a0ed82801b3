"""What a run keeps, as everything but training uses it: weights, and what its ids mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import checkpoint, errors, task
from lingvo_gpipe import input as input_lib
from lingvo_gpipe import logdir as logdir_lib
from lingvo_gpipe.layers import base


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
    train: task.Train,
    *,
    logdir: Path | None,
    which: str | None,
) -> checkpoint.Restored:
    """Give a network's variables the values that evaluation uses.

    Args:
        by_path: path → variable; some of the network's, or all.
        specs: see `saved_keys`.
        train: see `saved_keys`.
        logdir: of the run.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    keys = saved_keys(specs, train)
    objects = {keys[path]: variable for path, variable in by_path.items()}
    directory = str(which if logdir is None else logdir / logdir_lib.CHECKPOINTS)
    restored = checkpoint.Checkpoints(directory, objects, read_only=True).restore(
        which, subset=True
    )
    if restored is None:
        raise errors.CheckpointError(
            f"{directory} has no checkpoint. Train first, or name one by --checkpoint"
        )
    warn_of_torn(restored)
    return restored


def source(params: Any, *, logdir: Path | None, which: str | None) -> input_lib.Input:
    """Return a task's input on what the run keeps of its data; on the data where it keeps nothing.

    Args:
        params: a `Task.Params`.
        logdir: of the run.
        which: path of a checkpoint, or of a directory of them: its run's folder is asked first.

    Raises:
        UserError: a file that is kept cannot be read or used.
    """
    found: input_lib.Input = params.input.instantiate()
    places = [] if which is None else list(Path(which).absolute().parents[:2])
    places += [] if logdir is None else [logdir]
    for folder in places:
        kept = logdir_lib.kept_assets(folder, found.asset_names)
        if kept:
            found.recall(kept)
            break
    return found


def warn_of_torn(restored: checkpoint.Restored) -> None:
    """Tell in the log which newer checkpoints were passed over."""
    for prefix, why in restored.torn:
        logging.warning("%s is torn, an older one is used: %s", prefix, why)
