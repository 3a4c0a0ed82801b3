"""Find the first layer with a value that is not finite, by running the layers one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.execution.executor import Executor, PassInputs, PassRun, Share
from lingvo_gpipe.nests import Nest, floating
from lingvo_gpipe.network import wiring

NOWHERE = "nowhere"


def first_value(executor: Executor, inputs: PassInputs, first_micro_batch: int = 0) -> str:
    """Run micro-batches forward in the first replica; name where a value first is not finite.

    Args:
        executor: knows cells and devices.
        inputs: inputs of all micro-batches.
        first_micro_batch: number of the first one.

    Returns:
        A text such as "layer conv_1, output x, micro-batch 2", or `NOWHERE`.
    """
    for path, value in inputs.variables.items():
        if not is_finite(value):
            return f"layer {executor.analysis.layer_of(path)}, variable {path}"
    return next(_places(executor, inputs, first_micro_batch), NOWHERE)


def first_gradient(analysis: network.Analysis, gradients: Mapping[str, tf.Tensor]) -> str:
    """Name the layer nearest to the losses with a gradient that is not finite."""
    for path in sorted(gradients, key=lambda p: analysis.owner[p], reverse=True):
        if not is_finite(gradients[path]):
            return f"layer {analysis.layer_of(path)}, gradient of {path}"
    return NOWHERE


def is_finite(nest: Nest) -> bool:
    """Return whether all values of all floating tensors of a nest are finite."""
    return all(map(_all_finite, floating(nest)))


def _all_finite(tensor: tf.Tensor) -> bool:
    with tf.device(tensor.device):
        return bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _places(executor: Executor, inputs: PassInputs, first: int) -> Iterator[str]:
    """Yield the places of values that are not finite, in the order of computation."""
    analysis = executor.analysis
    first_replica = Share(0, 0, len(inputs.seeds), analysis.default_training_pass, inputs)
    run = PassRun(executor, first_replica)
    for m in range(len(inputs.seeds)):
        run.values.clear()  # of the one before: all of them may not fit the memory
        for cell in analysis.cells:
            with tf.device(run.devices[cell.index]):
                values, collected = executor.programs[cell.index].compute(
                    cell, run.cell_inputs(cell.index, m)
                )
            for v in sorted(values):
                run.values[m][v] = values[v]
                if not is_finite(values[v]):
                    yield f"{_value_name(analysis, v)}, micro-batch {first + m}"
            for name, total in collected.losses.items():
                if not is_finite(total):
                    yield f"loss {name}, micro-batch {first + m}"


def _value_name(analysis: network.Analysis, version: int) -> str:
    found = analysis.wiring.versions[version]
    if found.producer == wiring.FIELD:
        return f"field {found.name} of the mini-batch"
    return f"layer {analysis.layers[found.producer].name}, output {found.name}"
