"""What an update may do besides its rule: weight decay, loss scaling, moving averages."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import hyperparams, nests
from lingvo_gpipe.optim import checks

# A scale beyond this has no use, and doubling it without end would overflow.
_LARGEST_SCALE = 2.0**40


class WeightDecay(hyperparams.Configurable):
    """L2 decay by a weight's group: adds coefficient · ½‖w‖² to the loss of an update."""

    class Params(hyperparams.Configurable.Params):
        """Params of WeightDecay."""

        kernel: float = hyperparams.field(0.0, "Coefficient of kernels and tables.")
        bias: float = hyperparams.field(0.0, "Coefficient of biases.")
        norm: float = hyperparams.field(0.0, "Coefficient of normalisations' scale and offset.")


class LossScale(hyperparams.Configurable):
    """Scale by which losses are multiplied, so that float16 gradients do not become zero.

    Attributes:
        variables: `scale` of the next update, `good_steps` since it last changed, and `skipped`
            updates so far, by these names.
    """

    class Params(hyperparams.Configurable.Params):
        """Params of LossScale."""

        initial: float = hyperparams.field(2.0**15, "Scale of the first update.")
        dynamic: bool = hyperparams.field(
            True, "Halves the scale after an update that is not finite, which changes nothing."
        )
        growth_steps: int = hyperparams.field(2000, "Finite updates after which it doubles.")

    params: Params

    def __init__(self, params: LossScale.Params) -> None:
        super().__init__(params)
        checks.check(
            params,
            initial=(1.0 <= params.initial <= _LARGEST_SCALE, f"1 to {_LARGEST_SCALE:,.0f}"),
            growth_steps=(params.growth_steps >= 1, "1 or more"),
        )
        self.variables = {
            "scale": tf.Variable(params.initial, dtype=tf.float32),
            "good_steps": tf.Variable(0, dtype=tf.int64),
            "skipped": tf.Variable(0, dtype=tf.int64),
        }

    def read(self) -> tf.Tensor:
        """Return the scale of the next update's losses, a float32 scalar."""
        return self.variables["scale"].read_value()

    def adjust(self, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Lower or raise the scale after an update.

        Args:
            finite: bool scalar, whether the gradients of the update were finite; if not, the update
                was skipped.

        Returns:
            Scalars `loss_scale`, of the next update, and `skipped_updates`.
        """
        scale = self.read()
        skipped = self.variables["skipped"].read_value() + tf.cast(~finite, tf.int64)
        if self.params.dynamic:
            good = self.variables["good_steps"].read_value() + 1
            grown = good >= self.params.growth_steps
            larger = tf.minimum(scale * 2.0, _LARGEST_SCALE)
            raised = tf.where(grown, larger, scale)
            scale = tf.where(finite, raised, tf.maximum(scale / 2.0, 1.0))
            self.variables["good_steps"].assign(
                tf.where(finite & ~grown, good, tf.zeros_like(good)), read_value=False
            )
            self.variables["scale"].assign(scale, read_value=False)
        self.variables["skipped"].assign(skipped, read_value=False)
        return {"loss_scale": scale, "skipped_updates": skipped}


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
        checks.check(params, decay=(0.0 <= params.decay < 1.0, "0 or more, and less than 1"))

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        """Return the share of the old average in the new one after update `step`, float32."""
        decay = tf.constant(self.params.decay, tf.float32)
        done = tf.cast(step, tf.float32)
        return tf.minimum(decay, (1.0 + done) / (10.0 + done)) if self.params.warmup else decay


def averaged(old: tf.Tensor, new: tf.Tensor, decay: tf.Tensor | None) -> tf.Tensor:
    """Return the average after `new` was added to it; of integers, which have none, `new`."""
    if decay is None or not nests.is_differentiable(old.dtype):
        return new
    return old + (1.0 - tf.cast(decay, old.dtype)) * (new - old)
