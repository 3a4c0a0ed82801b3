"""One set of variables for a Keras model, its optimizer and its pipeline, on the cells' devices.

This module alone uses the private attribute in which Keras keeps the TensorFlow variable of one of
its own (`keras.Variable._value`), through which goes everything that Keras does with it, and the
index by which an optimizer finds the slots of a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe import packing
from lingvo_gpipe.keras_layers import variables


def by_path(calls: Mapping[str, keras.Operation]) -> dict[str, keras.Variable]:
    """Return path in the network → variable of a Keras model, each once.

    Args:
        calls: name of a layer in the network → layer of the model.
    """
    paths: dict[str, keras.Variable] = {}
    seen: set[int] = set()
    for name, operation in calls.items():
        for path, variable in variables.find(operation).weights.items():
            if id(variable) not in seen:
                seen.add(id(variable))
                paths[f"{name}/{path}"] = variable
    return paths


def trained(calls: Mapping[str, keras.Operation]) -> dict[str, keras.Variable]:
    """Return those of `by_path` that an optimizer updates."""
    return {path: variable for path, variable in by_path(calls).items() if variable.trainable}


def share(own: Mapping[str, keras.Variable], created: Mapping[str, packing.Variable]) -> None:
    """Let the variables of a Keras model be those of its pipeline.

    Args:
        own: path → variable of the model.
        created: path → variable of the pipeline.
    """
    for path, variable in own.items():
        variable._value = created[path]


def build(optimizer: keras.optimizers.Optimizer, trained: Sequence[keras.Variable]) -> None:
    """Give an optimizer its slots, each on the device of its weight.

    An optimizer that was built before, such as one whose state was loaded, keeps the values.

    Args:
        optimizer: of `compile`.
        trained: the weights that it updates.
    """
    if not optimizer.built:
        with observed_slots(optimizer):
            optimizer.build(list(trained))
        return
    devices = {v.path.replace("/", "_"): v.value.device for v in trained}
    for each in _with_inner(optimizer):
        known = each._trainable_variables
        each._trainable_variables_indices = {each._var_key(v): n for n, v in enumerate(known)}
        for slot in each.variables:
            owners = [path for path in devices if f"/{path}_" in f"/{slot.path}"]
            if owners:
                with tf.device(devices[max(owners, key=len)]):
                    slot._value = tf.Variable(slot.value, name=slot.name)


@contextlib.contextmanager
def observed_slots(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[list[tuple[keras.Variable, keras.Variable]]]:
    """Place each slot that an optimizer creates in the `with` block on the device of its weight.

    Returns:
        Receives (weight, slot).
    """
    slots: list[tuple[keras.Variable, keras.Variable]] = []

    def placed(method: Any) -> Any:
        def add(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
            with tf.device(reference_variable.value.device):
                slot = method(reference_variable, *args, **kwargs)
            slots.append((reference_variable, slot))
            return slot

        return add

    optimizers = _with_inner(optimizer)
    for each in optimizers:
        each.add_variable_from_reference = placed(each.add_variable_from_reference)
    try:
        yield slots
    finally:
        for each in optimizers:
            del each.add_variable_from_reference


def _with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return an optimizer, and the one in a LossScaleOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]
