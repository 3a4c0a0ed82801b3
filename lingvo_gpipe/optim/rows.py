"""Updates of only those rows of a table that have a gradient: `Optimizer.Params.lazy`.

A row whose gradient is all zero keeps its weight and its row of every slot of the table's shape.
All other rows are updated as without the option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe.optim.rule import RuleInputs


def update_touched(
    update: Callable[[RuleInputs], tuple[tf.Tensor, dict[str, tf.Tensor]]], inputs: RuleInputs
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the new weight and slots, computed from the rows that have a gradient.

    Args:
        update: an elementwise update (`Rule.is_elementwise`) of a weight and its slots.
        inputs: its gradient is summed over the update, without weight decay.
    """
    numbers, gradient = of_touched(inputs.gradient)

    def has_rows(slot: tf.Tensor) -> bool:
        return slot.shape == inputs.weight.shape

    slots = {
        name: tf.gather_nd(slot, numbers) if has_rows(slot) else slot
        for name, slot in inputs.slots.items()
    }
    weight = tf.gather_nd(inputs.weight, numbers)
    new_weight, new_slots = update(
        dataclasses.replace(inputs, weight=weight, gradient=gradient, slots=slots)
    )
    return tf.tensor_scatter_nd_update(inputs.weight, numbers, new_weight), {
        name: tf.tensor_scatter_nd_update(slot, numbers, new_slots[name])
        if has_rows(slot)
        else new_slots[name]
        for name, slot in inputs.slots.items()
    }


def of_touched(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return numbers [N, 1] and values of the rows that are not all zero, on the tensor's device.

    A row with an element that is not finite is one of them.
    """
    with tf.device(gradient.device):
        axes = list(range(1, gradient.shape.rank))
        numbers = tf.where(tf.reduce_any(tf.not_equal(gradient, 0), axis=axes))
        return numbers, tf.gather_nd(gradient, numbers)
