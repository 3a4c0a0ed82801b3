"""What a checkpoint holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def values(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return all values of a checkpoint by key, without TensorFlow's own count of saves."""
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    ours = [name for name in names if not name.startswith(("_CHECKPOINT", "save_counter"))]
    return {name: np.asarray(reader.get_tensor(name)) for name in ours}
