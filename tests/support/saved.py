"""What a checkpoint holds, and a run without its last one."""

from __future__ import annotations

import glob
import os
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.run import loop


def values(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a checkpoint by key."""
    reader = tf.train.load_checkpoint(prefix)
    return {key: np.asarray(reader.get_tensor(key)) for key in reader.get_variable_to_shape_map()}


def forget(result: loop.Result) -> None:
    """Remove a run's last checkpoint, as if it had been killed before that was written."""
    for path in glob.glob(f"{glob.escape(result.checkpoint)}.*"):
        os.remove(path)
