"""The learning rate of the translation models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import optimizer


class InverseSquareRoot(optimizer.Schedule):
    """A linear rise, then a fall with the root: factor · d^−½ · min(s^−½, s · warmup^−1.5).

    s is the number of updates done, and 1. The top, at s = warmup, is factor / √(d · warmup).

    Source: Vaswani et al. 2017, section 5.3, with a factor, as Lingvo's `TransformerSchedule`.

    >>> schedule = InverseSquareRoot.Params().instantiate()
    >>> [f"{float(schedule.rate(tf.constant(step))):.3g}" for step in (0, 19_999, 39_999, 159_999)]
    ['1.17e-08', '0.000234', '0.000469', '0.000234']
    """

    class Params(optimizer.Schedule.Params):
        """Params of InverseSquareRoot."""

        factor: float = hyperparams.field(3.0, "Factor on the whole.")
        units: int = hyperparams.field(1024, "d, the model dimension.")
        warmup_steps: int = hyperparams.field(40_000, "Updates of the rise.")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("units", "warmup_steps"):
            if getattr(params, name) < 1:
                raise errors.OptimizerError(
                    f"InverseSquareRoot: {name}={getattr(params, name)} is too small. Use 1 or more"
                )
        if params.factor < 0.0:
            raise errors.OptimizerError(
                f"InverseSquareRoot: factor={params.factor} is negative. Use 0 or more"
            )

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Return the rate, a float32 scalar, of update `step` (int64 scalar, from 0)."""
        params = self.params
        s = tf.cast(step, tf.float64) + 1.0
        rate = (
            params.factor * params.units**-0.5 * tf.minimum(s**-0.5, s * params.warmup_steps**-1.5)
        )
        return tf.cast(rate, tf.float32)
