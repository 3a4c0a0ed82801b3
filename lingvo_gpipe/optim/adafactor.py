"""Adafactor: an optimizer whose state for a matrix is a row and a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import optimizer


class Adafactor(optimizer.Rule):
    """Adafactor with the rate of a schedule ("relative step" off).

    With t = updates done + 1 and β = 1 − t^−decay_exponent, the second moment v of g² + ε is a
    moving average by β. Of a weight whose two largest sides both have `min_factored` or more, only
    the means of v along each of the two are kept, and v is their product over the mean of both.
    u = g / √v is scaled down where its root mean square is above `clip_threshold`; then w ← w −
    rate · u or, with momentum, w ← w − m for m ← momentum · m + (1 − momentum) · rate · u.

    Keras' Adafactor keeps a slot of full size beside row and column, and caps the rate.

    Source: Shazeer and Stern 2018 (1804.04235), algorithms 4 and 5; the momentum as in their code
    (tensor2tensor), of updates and not of gradients.

    >>> rule = Adafactor.Params().instantiate()
    >>> [slot.shape for slot in rule.slots("softmax/kernel", (64_000, 1024), tf.float32)]
    [(64000,), (1024,)]
    """

    class Params(optimizer.Rule.Params):
        """Params of Adafactor."""

        decay_exponent: float = hyperparams.field(0.8, "β = 1 − t^−decay_exponent.")
        epsilon: float = hyperparams.field(1e-30, "ε₁, added to squared gradients.")
        clip_threshold: float | None = hyperparams.field(
            1.0, "Largest root mean square of an update, before the rate; None: any."
        )
        momentum: float = hyperparams.field(0.0, "Share of the last update in the next; 0: none.")
        min_factored: int = hyperparams.field(
            128, "Length that both of a weight's largest sides have to have to be factored."
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        wrong = {
            "decay_exponent": params.decay_exponent <= 0.0 and "more than 0, such as 0.8",
            "epsilon": params.epsilon <= 0.0 and "more than 0, such as 1e-30",
            "clip_threshold": params.clip_threshold is not None
            and params.clip_threshold <= 0.0
            and "more than 0, such as 1.0, or None",
            "momentum": not 0.0 <= params.momentum < 1.0 and "0 or more, and less than 1",
            "min_factored": params.min_factored < 1 and "1 or more",
        }
        for name, way_out in wrong.items():
            if way_out:
                raise errors.OptimizerError(
                    f"Adafactor: {name}={getattr(params, name)} is not possible. Use {way_out}"
                )

    def slots(
        self, path: str, shape: tuple[int, ...], dtype: tf.DType
    ) -> tuple[optimizer.SlotSpec, ...]:
        """Tell the slots of the weight at `path`: row and column, or all of the second moment."""
        sides = self._factored(shape)
        if sides is None:
            shapes = {"second_moment": shape}
        else:
            row, column = sides
            shapes = {"row": _without(shape, column), "column": _without(shape, row)}
        if self.params.momentum:
            shapes["momentum"] = shape
        return tuple(
            optimizer.SlotSpec(path, name, own, dtype, 0.0) for name, own in shapes.items()
        )

    def update(
        self,
        path: str,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Mapping[str, tf.Tensor],
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the new weight and slots; see `Rule.update`."""
        del path
        params = self.params
        time = tf.cast(step, tf.float64) + 1.0
        beta = tf.cast(1.0 - time**-params.decay_exponent, weight.dtype)
        square = tf.square(gradient) + tf.constant(params.epsilon, weight.dtype)

        def averaged(name: str, value: tf.Tensor) -> tf.Tensor:
            return beta * slots[name] + (1.0 - beta) * value

        sides = self._factored(tuple(weight.shape))
        if sides is None:
            new = {"second_moment": averaged("second_moment", square)}
            change = gradient * tf.math.rsqrt(new["second_moment"])
        else:
            row, column = sides
            new = {
                "row": averaged("row", tf.reduce_mean(square, column)),
                "column": averaged("column", tf.reduce_mean(square, row)),
            }
            rows = tf.expand_dims(new["row"], column)
            rows /= tf.reduce_mean(rows, row, keepdims=True)
            columns = tf.expand_dims(new["column"], row)
            # Apart, since the product of two small numbers would be 0.
            change = gradient * tf.math.rsqrt(rows) * tf.math.rsqrt(columns)
        if params.clip_threshold is not None:
            size = tf.sqrt(tf.reduce_mean(tf.square(change)))
            change /= tf.maximum(size / params.clip_threshold, 1.0)
        change *= tf.cast(rate, weight.dtype)
        if params.momentum:
            share = params.momentum
            change = new["momentum"] = share * slots["momentum"] + (1.0 - share) * change
        return weight - change, new

    def _factored(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the two largest sides of a shape, in order of place; None: it is kept whole."""
        largest = sorted(range(len(shape)), key=lambda side: shape[side])[-2:]
        if len(largest) < 2 or min(shape[side] for side in largest) < self.params.min_factored:
            return None
        return min(largest), max(largest)


def _without(shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    return shape[:side] + shape[side + 1 :]
