"""The learning rates that a run will have, known before its first update."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lingvo_gpipe import optim

_POINTS = 200


def points(optimizer: optim.Optimizer, max_steps: int) -> dict[int, float]:
    """Return update → its rate, for 200 updates of a run, the first and the last among them.

    A rate that does not change has none.

    Args:
        optimizer: of the run.
        max_steps: its number of updates.
    """
    if not isinstance(optimizer.params.learning_rate, optim.LearningRate.Params):
        return {}
    steps = np.unique(np.linspace(0, max(max_steps - 1, 0), _POINTS).astype(np.int64))
    with tf.device("CPU:0"):
        rate = tf.function(
            optimizer.rate, autograph=False, input_signature=[tf.TensorSpec([], tf.int64)]
        )
        return {int(step): float(rate(tf.constant(step))) for step in steps}
