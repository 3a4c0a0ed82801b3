"""What checkpoints hold, whether it is the same, and a run without its last one."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import pipelining, task
from lingvo_gpipe.run import checkpoints, loop, restoring


def values(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a checkpoint by key."""
    reader = tf.train.load_checkpoint(prefix)
    return {key: np.asarray(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}


def newest(folder: Path) -> str:
    """Return the last checkpoint of a run."""
    found = checkpoints.newest(str(folder / "checkpoints"))
    assert found is not None
    return found


def check_same(one: str, other: str, **tolerance: Any) -> None:
    """Check that two checkpoints hold the same keys and bits, or values within a tolerance."""
    first, second = values(one), values(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        found = second[key]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), key
        if tolerance:
            np.testing.assert_allclose(found, value, err_msg=key, **tolerance)
        else:
            assert found.tobytes() == value.tobytes(), key


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
