"""The learning rate of the published image models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import optimizer


class WarmupStaircase(optimizer.Schedule):
    """A linear rise from 0, then stairs down, peak · decay^⌊step / decay_steps⌋, to a floor.

    The stairs are counted from update 0, as the reference has it, and not from the end of the rise:
    where the rise takes n stairs, the rate reaches `peak` and then falls at once to peak · decay^n.

    Source: tensorflow/tpu, models/official/amoeba_net.

    >>> schedule = WarmupStaircase.Params(
    ...     peak=1.0, warmup_steps=6, decay=0.5, decay_steps=2.0
    ... ).instantiate()
    >>> [round(float(schedule.rate(tf.constant(step))), 3) for step in (0, 3, 5, 6, 8)]
    [0.0, 0.5, 0.833, 0.125, 0.062]
    """

    class Params(optimizer.Schedule.Params):
        """Params of WarmupStaircase."""

        peak: float = hyperparams.required("Rate at the top of the rise.")
        warmup_steps: int = hyperparams.field(0, "Updates of the rise; 0: none.")
        decay: float = hyperparams.required("Factor from one stair to the next.")
        decay_steps: float = hyperparams.required("Updates on one stair; need not be whole.")
        floor: float = hyperparams.field(0.0, "Lowest rate, as a share of `peak`.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        least = {"peak": 0.0, "warmup_steps": 0, "decay": 0.0, "floor": 0.0}
        for name, smallest in least.items():
            value = getattr(params, name)
            if value < smallest:
                raise errors.OptimizerError(
                    f"WarmupStaircase: {name}={value} is too small. Use {smallest} or more"
                )
        if params.decay_steps <= 0.0:
            raise errors.OptimizerError(
                f"WarmupStaircase: decay_steps={params.decay_steps} is not possible. Use more "
                "than 0"
            )

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float32 scalar, of update `step` (int64 scalar, from 0)."""
        params = self.params
        # Updates are counted far beyond float32's whole numbers.
        step = tf.cast(step, tf.float64)
        rate = params.peak * params.decay ** tf.floor(step / params.decay_steps)
        if params.warmup_steps:
            rise = params.peak * step / params.warmup_steps
            rate = tf.where(step < params.warmup_steps, rise, rate)
        return tf.cast(tf.maximum(rate, params.floor * params.peak), tf.float32)
