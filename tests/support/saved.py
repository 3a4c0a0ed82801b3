"""What a checkpoint holds, and a run without its last one."""

from __future__ import annotations

import glob
import os
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.run import loop


def values(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a checkpoint by key, without TensorFlow's own count of saves."""
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    ours = [name for name in names if not name.startswith(("_CHECKPOINT", "save_counter"))]
    return {name: np.asarray(reader.get_tensor(name)) for name in ours}


def forget(result: loop.Result) -> None:
    """Remove a run's last checkpoint, as if it had been killed before that was written."""
    for path in glob.glob(f"{glob.escape(result.checkpoint)}.*"):
        os.remove(path)
