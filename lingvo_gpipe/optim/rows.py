"""Updates of only those rows of a table that have a gradient: `Optimizer.Params.lazy`.

A row whose gradient is all zero keeps its weight and its row of every slot that has the table's
rows. All else is updated as without the option. `masked` is this definition, for any rule.
`only_rows` computes the same bits in less time where a rule is elementwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe.optim.rules.rule import RuleInputs, SlotSpec

_Updated: TypeAlias = "tuple[tf.Tensor, dict[str, tf.Tensor]]"
_Update: TypeAlias = "Callable[[RuleInputs], _Updated]"


def slots_of(slots: Iterable[SlotSpec], num_rows: int) -> frozenset[str]:
    """Return the names of those slots of a table that have its rows."""
    return frozenset(
        slot.slot for slot in slots if slot.shape[:1] == (num_rows,) and slot.has_rows is not False
    )


def masked(update: _Update, inputs: RuleInputs, row_slots: Collection[str]) -> _Updated:
    """Update all rows, then choose between old and new ones.

    Args:
        update: returns the new weight and slots.
        inputs: its gradient is summed over the update, without weight decay.
        row_slots: names of the slots that have the weight's rows.
    """
    changed = touched(inputs.gradient)

    def chosen(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(changed, [-1] + [1] * (new.shape.rank - 1)), new, old)

    weight, slots = update(inputs)
    return chosen(weight, inputs.weight), {
        name: chosen(new, inputs.slots[name]) if name in row_slots else new
        for name, new in slots.items()
    }


def only_rows(update: _Update, inputs: RuleInputs, row_slots: Collection[str]) -> _Updated:
    """Compute what `masked` computes, from the rows that have a gradient; see there."""
    numbers = tf.where(touched(inputs.gradient))

    def gathered(value: tf.Tensor) -> tf.Tensor:
        return tf.gather(value, numbers[:, 0])

    weight, slots = update(
        dataclasses.replace(
            inputs,
            weight=gathered(inputs.weight),
            gradient=gathered(inputs.gradient),
            slots={
                name: gathered(slot) if name in row_slots else slot
                for name, slot in inputs.slots.items()
            },
        )
    )
    return tf.tensor_scatter_nd_update(inputs.weight, numbers, weight), {
        name: tf.tensor_scatter_nd_update(inputs.slots[name], numbers, new)
        if name in row_slots
        else new
        for name, new in slots.items()
    }


def touched(gradient: tf.Tensor) -> tf.Tensor:
    """Return which rows have an element that is not zero, or not finite."""
    return tf.reduce_any(tf.not_equal(gradient, 0), axis=list(range(1, gradient.shape.rank)))


def of_touched(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return numbers [N, 1] and values of the `touched` rows, on their gradient's device."""
    with tf.device(gradient.device):
        numbers = tf.where(touched(gradient))
        return numbers, tf.gather_nd(gradient, numbers)
