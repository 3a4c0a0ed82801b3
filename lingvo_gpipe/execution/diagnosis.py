"""Why a step failed, and where a value first stops being finite.

In a step over several devices, an error in one cell cancels the transfers that wait for it, and
TensorFlow raises one of these cancellations. A slot's call that is made eagerly, alone, raises the
cause. So a step that failed is run again, slot by slot, up to the first slot that fails; and one
with a value that is not finite, layer by layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.console import units
from lingvo_gpipe.execution.executor import Executor, MiniBatch
from lingvo_gpipe.execution.replica_pass import ReplicaPass
from lingvo_gpipe.nests import Nest, differentiable
from lingvo_gpipe.network import wiring
from lingvo_gpipe.schedule.slot import Slot

NOWHERE = "nowhere"

_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# What TensorFlow's messages have for its own developers: graph, function and operation names.
_NAMES = re.compile(
    r"\[\[(\{\{node )?[^\s\]]*(\}\})?\]\]|\{\{[a-z_]+ [^}]*\}\}|\[Op:[^\]]*\]|Hint: .*"
)
_ALLOCATION = re.compile(  # by TensorFlow's kernels: those that name the tensor, others; by XLA's
    r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)"
    r"|failed to allocate memory|Out of memory while trying to allocate"
)
_FIRST_ROOT = re.compile(r"\d+ root error\(s\) found\.\s*\(0\) *[A-Z_]+: (.*?)\(1\) ", re.DOTALL)
# What a function of Python that an operation called has raised: its class and its words.
_PYTHON = re.compile(
    r"^(?:\{\{[^}]*\}\} ?)*([\w.]+: .*?)\s*\nTraceback \(most recent call last\)", re.S | re.M
)
_TRACEBACK = re.compile(r"Graph execution error|Detected at node|Stack trace for op|File \"")


def explain(
    executor: Executor,
    batch: MiniBatch,
    error: tf.errors.OpError,
    *,
    training: bool,
) -> errors.UserError:
    """Return the cause of an error: the mini-batch is checked, then run again, slot by slot.

    Args:
        executor: knows cells and devices.
        batch: the mini-batch of the step that failed.
        error: what the step raised.
        training: whether it was a step of training, or an evaluation.
    """
    try:
        executor.analysis.check_values(*batch.fields)
    except errors.InputError as at_fault:
        return at_fault
    if training:
        passes = executor.training_passes(batch)
    else:
        passes = executor.evaluation_passes(batch, outputs=True)
    for replica_pass in passes:
        try:
            replica_pass.run()
        except tf.errors.OpError as slot_error:
            if replica_pass.slot is None:
                break
            return of_slot(replica_pass, replica_pass.slot, slot_error)
    wanted = _ALLOCATION.search(error.message)
    if wanted is not None:
        return _out_of_memory(executor.analysis, error, wanted)
    return errors.StepError(
        f"a step failed ({cause(error)}), but not when its slots were run one by one. A device may "
        "have been lost: run it again"
    )


def of_slot(replica_pass: ReplicaPass, slot: Slot, error: tf.errors.OpError) -> errors.StepError:
    """Return the error of a slot's eager call, as the user reads it: with layer and micro-batch."""
    k, phase, m = dataclasses.astuple(slot)
    analysis = replica_pass.executor.analysis
    cell = replica_pass.network_pass.cells[slot.cell]
    names = [analysis.layers[number].name for number in cell.layers]
    layer, operation = next(iter(_owners(names, error.message)), ("", ""))
    if not layer:
        differentiates = phase not in "FR" or m in cell.fused
        with tf.device(replica_pass.devices[k]):
            layer = _failing_layer(replica_pass, slot, differentiates=differentiates)
    frames = _FRAME.findall(error.message)
    line = ", in {2} ({0}:{1})".format(*frames[-1]) if frames else ""
    where = f"layer {layer}" if layer else f"cell {slot.cell} ({names[0]} to {names[-1]})"
    where += f", operation {operation}" if operation else line
    message = cause(error)
    wanted = _ALLOCATION.search(message)
    if wanted is not None:
        device = replica_pass.replica * replica_pass.network_pass.table.num_devices
        message = _lack(f"device {device + cell.device_number}", wanted)
    slot, count = replica_pass.in_mini_batch(slot), replica_pass.num_micro_batches
    return errors.StepError(
        f"{where}, micro-batch {slot.micro_batch} of {count}, slot {slot}: {message}",
        layer=layer,
        micro_batch=slot.micro_batch,
    )


def _failing_layer(replica_pass: ReplicaPass, slot: Slot, *, differentiates: bool) -> str:
    """Return the layer of a cell that fails when each is run alone; empty where none does.

    TensorFlow does not name the layer of an operation inside a `tf.function` or in the gradient of
    a `tf.custom_gradient`.
    """
    analysis = replica_pass.executor.analysis
    cell = replica_pass.network_pass.cells[slot.cell]
    programs = replica_pass.executor.programs[slot.cell]
    inputs = replica_pass.cell_inputs(slot.cell, slot.micro_batch)
    values = dict(inputs.imports)
    number = cell.layers.start
    try:
        for number in cell.layers:
            values.update(programs.compute_layer(cell, number, inputs, values)[0])
        if differentiates:
            upstream = replica_pass.backward_inputs(slot.cell, slot.micro_batch)
            losses = (loss.name for loss in cell.losses)
            factors = dict(zip(losses, upstream.loss_factors, strict=True))
            gradients = {v: [leaves] for v, leaves in upstream.exports.items()}
            for number in reversed(cell.layers):
                with tf.GradientTape() as tape:
                    reads = [
                        v for v in analysis.wiring.reads[number] if v in cell.mode.differentiable
                    ]
                    sources = [differentiable(values[v]) for v in reads]
                    tape.watch([sources, inputs.weights])
                    written, collected = programs.compute_layer(cell, number, inputs, values)
                targets, starts = [], []
                for v, value in written.items():
                    targets += differentiable(value) if v in gradients else []
                    starts += [tf.add_n(same) for same in zip(*gradients.get(v, []), strict=True)]
                for name, loss in collected.losses.items():
                    targets.append(loss)
                    starts.append(precision.cast(factors[name], loss.dtype))
                by_sources = tape.gradient(
                    targets, [sources, inputs.weights], starts, unconnected_gradients="zero"
                )
                for v, leaves in zip(reads, by_sources[0], strict=True):
                    gradients.setdefault(v, []).append([tf.convert_to_tensor(g) for g in leaves])
    except tf.errors.OpError:
        return analysis.layers[number].name
    return ""


def _owners(names: Sequence[str], message: str) -> list[tuple[str, str]]:
    """Return (layer, operation below it) of the operations in a message that layers made.

    Args:
        names: names of the layers.
        message: TensorFlow's message.
    """
    owned = []
    for node in _NODE.findall(message):
        # Gradients are named after the operation that they belong to.
        path = re.sub(r"^(gradient_tape|gradients)/", "", node)
        owners = [name for name in names if path == name or path.startswith(f"{name}/")]
        if owners:
            layer = max(owners, key=len)
            owned.append((layer, path.removeprefix(layer).strip("/").rpartition("/")[2]))
    return owned


def cause(error: tf.errors.OpError) -> str:
    """Return TensorFlow's message on one line, without traceback, graph and function names."""
    raised = _PYTHON.search(error.message)
    if raised is not None:
        return " ".join(raised[1].split())
    paragraphs = [
        paragraph.strip()
        for paragraph in re.split(r"\n\s*\n", error.message)
        if not _TRACEBACK.match(paragraph.strip())
    ]
    text = paragraphs[-1] if paragraphs else error.message
    root = _FIRST_ROOT.search(text)
    text = _NAMES.sub("", root[1] if root else text)
    return " ".join(text.split()) or type(error).__name__


def _out_of_memory(
    analysis: network.Analysis, error: tf.errors.OpError, wanted: re.Match[str]
) -> errors.StepError:
    """Return the error for a lack of memory that a step had, but none of its slots alone."""
    layers = _owners([layer.name for layer in analysis.layers], error.message)
    if not layers:
        return errors.StepError(_lack("a device", wanted))
    layer, device = layers[0][0], "a device"
    if analysis.params.num_replicas == 1:  # of several, the message does not say which
        number = next(n for n, info in enumerate(analysis.layers) if info.name == layer)
        device = f"device {analysis.cells[analysis.cell_of(number)].device_number}"
    return errors.StepError(f"layer {layer}: {_lack(device, wanted)}", layer=layer)


def _lack(device: str, wanted: re.Match[str]) -> str:
    """Return the message about memory that a device lacks, for a tensor if that is known."""
    tensor = ""
    if wanted[2] is not None:
        tensor = f", for a tensor {wanted[2]} [{wanted[1]}]"
        count = math.prod(map(int, filter(None, wanted[1].split(","))))
        with contextlib.suppress(TypeError):  # a dtype that Python does not know
            tensor += f" of {units.size(count * tf.dtypes.as_dtype(wanted[2]).size)}"
    return (
        f"out of memory on {device}{tensor}. "
        "Raise num_micro_batches or num_partitions, or set recompute='full'; --mode=plan shows "
        "what each device needs"
    )


def first_nonfinite_value(passes: Sequence[ReplicaPass]) -> str:
    """Run micro-batches forward, layer by layer; name where a value first is not finite.

    Args:
        passes: what each replica computes.

    Returns:
        A text such as "layer conv_1, output x, micro-batch 2", or `NOWHERE`.
    """
    analysis = passes[0].executor.analysis
    for path, value in passes[0].variables.items():
        if not is_finite(value):
            return f"layer {analysis.layer_of(path)}, variable {path}"
    places = (place for replica_pass in passes for place in _nonfinite_places(replica_pass))
    return next(places, NOWHERE)


def first_nonfinite_gradient(analysis: network.Analysis, gradients: Mapping[str, tf.Tensor]) -> str:
    """Name the layer nearest to the losses with a gradient that is not finite."""
    for path in sorted(gradients, key=lambda p: analysis.owner[p], reverse=True):
        if not is_finite(gradients[path]):
            return f"layer {analysis.layer_of(path)}, gradient of {path}"
    return NOWHERE


def is_finite(nest: Nest) -> bool:
    """Return whether all values of all differentiable tensors of a nest are finite."""
    return all(map(_all_finite, differentiable(nest)))


def _all_finite(tensor: tf.Tensor) -> bool:
    with tf.device(tensor.device):
        return bool(tf.reduce_all(tf.math.is_finite(tf.abs(tensor))))


def _nonfinite_places(replica_pass: ReplicaPass) -> Iterator[str]:
    """Yield the places of values that are not finite, in the order of computation."""
    analysis = replica_pass.executor.analysis
    for m, number in enumerate(replica_pass.micro_batches):
        replica_pass.values.clear()  # of the one before: all of them may not fit the memory
        for cell, device in zip(replica_pass.network_pass.cells, replica_pass.devices, strict=True):
            programs = replica_pass.executor.programs[cell.index]
            with tf.device(device):
                values, collected = programs.compute(cell, replica_pass.cell_inputs(cell.index, m))
            replica_pass.values[m].update(values)
            for v in sorted(values):
                if not is_finite(values[v]):
                    yield f"{_value_name(analysis, v)}, micro-batch {number}"
            for name, total in collected.losses.items():
                if not is_finite(total):
                    yield f"loss {name}, micro-batch {number}"


def _value_name(analysis: network.Analysis, version: int) -> str:
    value = analysis.wiring.versions[version]
    if value.producer == wiring.FIELD:
        return f"field {value.name} of the mini-batch"
    return f"layer {analysis.layers[value.producer].name}, output {value.name}"
