"""One set of variables for a Keras model, its optimizer and its pipeline, on the cells' devices.

This module alone uses the private attribute in which Keras keeps the TensorFlow variable of one of
its own (`keras.Variable._value`), through which goes everything that Keras does with it, what an
optimizer and a tape know of that variable, and where an optimizer would sum gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

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


def share(of_model: Mapping[str, keras.Variable], created: Mapping[str, packing.Variable]) -> None:
    """Let the variables of a Keras model be those of its pipeline.

    Args:
        of_model: path → variable of the model.
        created: path → variable of the pipeline.
    """
    for path, variable in of_model.items():
        before, after = variable._value, cast(tf.Variable, created[path])  # nothing is packed here
        # An optimizer knows its slots, and what does not decay, by the id; a tape asks the other.
        after._unique_id, after._trainable = before._unique_id, before.trainable
        variable._value = after


def are_shared(
    of_model: Mapping[str, keras.Variable], created: Mapping[str, packing.Variable]
) -> bool:
    """Return whether `share` has been called with these, and not with others since then."""
    return all(variable._value is created[path] for path, variable in of_model.items())


def retrace(model: keras.Model) -> None:
    """Let a model, and the models in it, trace their functions again, with their new variables."""
    for each in model._flatten_layers():
        for name in ("train", "test", "predict", "generate"):
            if getattr(each, f"{name}_function", None) is not None:
                setattr(each, f"{name}_function", None)


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
        for slot in each.variables:
            owners = [path for path in devices if f"/{path}_" in f"/{slot.path}"]
            if owners:
                with tf.device(devices[max(owners, key=len)]):
                    slot._value = tf.Variable(slot.value, name=slot.name)


def on_largest_input(
    arguments: Sequence[tf.Tensor], devices: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Place what is traced in the `with` block on the device of its largest input.

    TensorFlow places an operation without a device on the first one, wherever its inputs are.

    Args:
        arguments: of the function that is traced.
        devices: of each of them.
    """
    devices_by_key = {
        _key(argument): name for argument, name in zip(arguments, devices, strict=True)
    }

    def device_of(tensor: tf.Tensor) -> str:
        key = _key(tensor)
        if key not in devices_by_key and tensor.op.type == "Placeholder":  # captured a moment ago
            for outside, inside in tensor.graph.captures:
                if _key(inside) not in devices_by_key:
                    is_nested = tf.is_symbolic_tensor(outside)  # in a branch of a condition
                    devices_by_key[_key(inside)] = (
                        device_of(outside) if is_nested else outside.device
                    )
        if key not in devices_by_key:
            devices_by_key[key] = tensor.op.device or device(tensor.op)
        return devices_by_key[key]

    def device(operation: tf.Operation) -> str:
        inputs = [t for t in operation.inputs if t.dtype == tf.resource or t.shape.rank != 0]
        placed = [t for t in inputs if device_of(t)]
        return device_of(max(placed, key=_num_elements)) if placed else ""

    with_device: contextlib.AbstractContextManager[None] = tf.compat.v1.device(device)
    return with_device


@contextlib.contextmanager
def unreduced(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Let an optimizer take gradients as they are in the `with` block.

    Keras hands all of them to TensorFlow to be summed over replicas, of which there is one; that
    puts all of them through one operation, and so on one device.
    """
    optimizers = _with_inner(optimizer)
    for each in optimizers:
        each._all_reduce_sum_gradients = list
    try:
        yield
    finally:
        for each in optimizers:
            del each._all_reduce_sum_gradients


def _key(tensor: tf.Tensor) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _num_elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0 if tensor.shape.is_fully_defined() else 0


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
