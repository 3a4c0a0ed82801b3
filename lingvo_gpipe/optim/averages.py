"""Exponential moving averages of weights and statistics."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams


class Average(hyperparams.Configurable):
    """Exponential moving average of weights and statistics, used for evaluation."""

    class Params(hyperparams.Configurable.Params):
        """Params of Average."""

        decay: float = hyperparams.field(0.9999, "Share of the old average in the new one.")
        warmup: bool = hyperparams.field(
            True, "Uses min(decay, (1+t)/(10+t)) at update t, so that early averages follow."
        )

    params: Params

    def __init__(self, params: Average.Params) -> None:
        super().__init__(params)
        if not 0.0 <= params.decay < 1.0:
            raise errors.ParamsError(f"average.decay={params.decay} must be in [0, 1)")

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        """Return the share of the old average in the new one after update `step`, float32."""
        decay = tf.constant(self.params.decay, tf.float32)
        done = tf.cast(step, tf.float32)
        return tf.minimum(decay, (1.0 + done) / (10.0 + done)) if self.params.warmup else decay


def averaged(old: tf.Tensor, new: tf.Tensor, decay: tf.Tensor | None) -> tf.Tensor:
    """Return the average after `new` was added to it; of integers, which have none, `new`."""
    if decay is None or not old.dtype.is_floating:
        return new
    return old + (1.0 - tf.cast(decay, old.dtype)) * (new - old)
