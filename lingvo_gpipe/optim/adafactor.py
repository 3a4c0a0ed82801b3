"""Adafactor: an optimizer whose state for a matrix is a row and a column."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe import hyperparams
from lingvo_gpipe.optim import checks
from lingvo_gpipe.optim.rule import Rule, RuleInputs, Shape, SlotSpec


class Adafactor(Rule):
    """Adafactor with the optimizer's learning rate ("relative step" off).

    With t = updates done + 1 and β = 1 − t^−decay_exponent, the second moment v of g² + ε is a
    moving average by β. Where the two largest dimensions of a weight are both `min_factored` or
    more, only the means of v along each of the two are kept, and v is their product divided by the
    mean of both. u = g / √v is scaled down where its root mean square is above `clip_threshold`.
    Then w ← w − rate · u; with momentum, w ← w − m for m ← momentum · m + (1 − momentum) · rate ·
    u.

    Keras' Adafactor keeps a slot of full size beside row and column, and caps the rate.

    Source: Shazeer and Stern 2018 (1804.04235), algorithms 4 and 5; the momentum as in their code
    (tensor2tensor), of updates and not of gradients.

    >>> rule = Adafactor.Params().instantiate()
    >>> [slot.shape for slot in rule.slots("softmax/kernel", (64_000, 1024), tf.float32)]
    [(64000,), (1024,)]
    """

    class Params(Rule.Params):
        """Params of Adafactor."""

        decay_exponent: float = hyperparams.field(0.8, "β = 1 − t^−decay_exponent.")
        epsilon: float = hyperparams.field(1e-30, "ε₁, added to squared gradients.")
        clip_threshold: float | None = hyperparams.field(
            1.0, "Largest root mean square of an update, before the rate; None: no limit."
        )
        momentum: float = hyperparams.field(
            0.0, "Share of the last update in the next; 0: no momentum."
        )
        min_factored: int = hyperparams.field(
            128, "A weight is factored if its two largest dimensions are both at least this."
        )

    params: Params

    def __init__(self, params: Adafactor.Params) -> None:
        super().__init__(params)
        threshold = params.clip_threshold
        checks.check(
            params,
            decay_exponent=(params.decay_exponent > 0.0, "more than 0, such as 0.8"),
            epsilon=(params.epsilon > 0.0, "more than 0, such as 1e-30"),
            clip_threshold=(threshold is None or threshold > 0.0, "more than 0, or None"),
            momentum=(0.0 <= params.momentum < 1.0, "0 or more, and less than 1"),
            min_factored=(params.min_factored >= 1, "1 or more"),
        )

    def slots(self, path: str, shape: tuple[int, ...], dtype: tf.DType) -> tuple[SlotSpec, ...]:
        """Return the slots of a weight: row and column, or the whole second moment."""
        axes = self._factored_axes(shape)
        if axes is None:
            shapes = {"second_moment": shape}
        else:
            row, column = axes
            shapes = {"row": _without(shape, column), "column": _without(shape, row)}
        if self.params.momentum:
            shapes["momentum"] = shape
        return tuple(SlotSpec(path, name, own, dtype, 0.0) for name, own in shapes.items())

    def update(self, inputs: RuleInputs) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots; see `Rule.update`."""
        params = self.params
        weight, gradient, slots = inputs.weight, inputs.gradient, inputs.slots
        time = tf.cast(inputs.step, tf.float64) + 1.0
        beta = tf.cast(1.0 - time**-params.decay_exponent, weight.dtype)
        square = tf.square(gradient) + tf.constant(params.epsilon, weight.dtype)

        def averaged(name: str, value: tf.Tensor) -> tf.Tensor:
            return beta * slots[name] + (1.0 - beta) * value

        axes = self._factored_axes(tuple(weight.shape))
        if axes is None:
            new = {"second_moment": averaged("second_moment", square)}
            change = gradient * tf.math.rsqrt(new["second_moment"])
        else:
            row, column = axes
            new = {
                "row": averaged("row", tf.reduce_mean(square, column)),
                "column": averaged("column", tf.reduce_mean(square, row)),
            }
            rows = tf.expand_dims(new["row"], column)
            mean = tf.reduce_mean(rows, row, keepdims=True)
            columns = tf.expand_dims(new["column"], row)
            # One factor after the other, since products and quotients of small numbers would be 0.
            change = gradient * tf.math.rsqrt(rows) * tf.sqrt(mean) * tf.math.rsqrt(columns)
        if params.clip_threshold is not None:
            size = tf.sqrt(tf.reduce_mean(tf.square(change)))
            change /= tf.maximum(size / params.clip_threshold, 1.0)
        change *= tf.cast(inputs.rate, weight.dtype)
        if params.momentum:
            share = params.momentum
            change = new["momentum"] = share * slots["momentum"] + (1.0 - share) * change
        return weight - change, new

    def _factored_axes(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the axes of the two largest dimensions in order; None: not factored."""
        largest = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
        if len(largest) < 2 or min(shape[axis] for axis in largest) < self.params.min_factored:
            return None
        return min(largest), max(largest)


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]
