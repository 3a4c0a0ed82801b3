"""RMSProp as in TensorFlow 1, with which the published image models were trained."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.optim import checks
from lingvo_gpipe.optim.rule import Rule, RuleInputs, SlotSpec


class RMSProp(Rule):
    """The rule of `tf.compat.v1.train.RMSPropOptimizer`.

    s ← decay · s + (1 − decay) · g², v ← momentum · v + rate · g / √(s + ε), w ← w − v.

    Keras' RMSprop has the same formula but begins with s = 0, this one with s = 1: with ε = 1 the
    first updates differ by up to √2, and a recipe made for one does not fit the other.

    >>> rule = RMSProp.Params(decay=0.9, momentum=0.9, epsilon=1.0).instantiate()
    >>> slots = {"mean_square": tf.ones([]), "momentum": tf.zeros([])}
    >>> inputs = RuleInputs("w", tf.constant(1.0), tf.constant(2.0), slots, tf.constant(0.1), 0)
    >>> weight, _ = rule.update(inputs)
    >>> round(float(weight), 4)
    0.8681
    """

    class Params(Rule.Params):
        """Params of RMSProp."""

        decay: float = hyperparams.field(0.9, "Share of the old mean square in the new one.")
        momentum: float = hyperparams.field(0.0, "Share of the last update in the next one.")
        epsilon: float = hyperparams.field(1e-10, "ε, added inside the square root.")

    params: Params

    def __init__(self, params: RMSProp.Params) -> None:
        super().__init__(params)
        checks.check(
            params,
            decay=(0.0 <= params.decay < 1.0, "0 or more, and less than 1"),
            momentum=(0.0 <= params.momentum < 1.0, "0 or more, and less than 1"),
            epsilon=(params.epsilon > 0.0, "more than 0, such as 1e-10"),
        )

    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Return the slots of a weight: the mean square, which begins at 1, and the last update.

        The last update is kept only with momentum.
        """
        mean_square = SlotSpec(path, "mean_square", shape, dtype, 1.0)
        if not self.params.momentum:
            return (mean_square,)
        return mean_square, SlotSpec(path, "momentum", shape, dtype, 0.0)

    def update(self, inputs: RuleInputs) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots; see `Rule.update`."""
        params, gradient = self.params, inputs.gradient
        old = inputs.slots["mean_square"]
        # In the order of TensorFlow's kernel, so that rounding agrees too.
        mean_square = old + (tf.square(gradient) - old) * (1.0 - params.decay)
        rate = tf.cast(inputs.rate, inputs.weight.dtype)
        change = rate * gradient / tf.sqrt(mean_square + params.epsilon)
        new = {"mean_square": mean_square}
        if params.momentum:
            change = new["momentum"] = params.momentum * inputs.slots["momentum"] + change
        return inputs.weight - change, new
