"""What a checkpoint holds, and a run without its last one."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import pipelining, task
from lingvo_gpipe.run import loop, restoring


def values(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a checkpoint by key."""
    reader = tf.train.load_checkpoint(prefix)
    return {key: np.asarray(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}


def forget(result: loop.Result) -> None:
    """Remove a run's last checkpoint, as if it had been killed before that was written."""
    for path in glob.glob(f"{glob.escape(result.checkpoint)}.*"):
        os.remove(path)


def restored(params: task.Task.Params, folder: Path) -> pipelining.PipeliningLayer:
    """Return the network of a task with the weights of a run's last checkpoint."""
    params = task.complete(params)
    pipe: pipelining.PipeliningLayer = params.model.instantiate()
    pipe.build(params.input.instantiate().element_spec(training=True))
    restoring.restore(pipe.by_path, pipe.analysis, params, logdir=folder, which=None)
    return pipe
