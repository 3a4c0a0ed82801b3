"""What a run has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def values(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a run's last checkpoint by key; none without a checkpoint.

    TensorFlow's own count of saves is left out.
    """
    import tensorflow as tf

    prefix = tf.train.latest_checkpoint(str(folder / "checkpoints"))
    if prefix is None:
        return {}
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    ours = [name for name in names if not name.startswith(("_CHECKPOINT", "save_counter"))]
    return {name: np.asarray(reader.get_tensor(name)) for name in ours}
