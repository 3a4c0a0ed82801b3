"""The scale of losses, which keeps float16 gradients from becoming zero."""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams

# A scale beyond this has no use, and doubling it without end would overflow.
_LARGEST_SCALE = 2.0**40


class LossScale(hyperparams.Configurable):
    """Scale by which losses are multiplied, so that float16 gradients do not vanish.

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
        if not 0 < params.initial < math.inf:
            raise errors.ParamsError(
                f"loss_scale.initial={params.initial} must be above 0 and finite; loss_scale=None "
                "turns scaling off"
            )
        if params.dynamic and not 1.0 <= params.initial <= _LARGEST_SCALE:
            raise errors.ParamsError(
                f"loss_scale.initial={params.initial} must be 1 to {_LARGEST_SCALE:,.0f}, between "
                "which it changes; loss_scale.dynamic=False keeps the scale constant"
            )
        if params.growth_steps < 1:
            raise errors.ParamsError(
                f"loss_scale.growth_steps={params.growth_steps} must be 1 or more; "
                "loss_scale.dynamic=False keeps the scale constant"
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
