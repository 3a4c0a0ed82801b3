"""Why a step failed: it is run again, slot by slot, up to the first slot that fails.

In a step over several devices, an error in one cell cancels the transfers that wait for it, and
TensorFlow raises one of these cancellations. A slot's call that is made eagerly, alone, raises the
cause. Only a step that failed pays for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.console import units
from lingvo_gpipe.execution.cell_calls import BackwardInputs, CellInputs
from lingvo_gpipe.execution.executor import Executor, PassRun, Share
from lingvo_gpipe.nests import floating
from lingvo_gpipe.schedule.slot import Slot

_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# What TensorFlow's messages have for its own developers: graph, function and operation names.
_NAMES = re.compile(
    r"\[\[(\{\{node )?[^\s\]]*(\}\})?\]\]|\{\{[a-z_]+ [^}]*\}\}|\[Op:[^\]]*\]|Hint: .*"
)
_ALLOCATION = re.compile(r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)")
_FIRST_ROOT = re.compile(r"\d+ root error\(s\) found\.\s*\(0\) *[A-Z_]+: (.*?)\(1\) ", re.DOTALL)
# What a function of Python that an operation called has raised: its class and its words.
_PYTHON = re.compile(
    r"^(?:\{\{[^}]*\}\} ?)*([\w.]+: .*?)\s*\nTraceback \(most recent call last\)", re.S | re.M
)
_TRACEBACK = re.compile(r"Graph execution error|Detected at node|Stack trace for op|File \"")


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The first slot of a step that fails.

    Attributes:
        slot: the slot, with the number of its micro-batch in the mini-batch.
        device: number of its device, in all replicas.
        layer: name of the layer whose operation failed; empty where TensorFlow does not name it.
        operation: name of the operation below the layer; empty as above.
        line: where the operation was made, as "function (file:line)"; empty where unknown.
        message: TensorFlow's message, one line.
    """

    slot: Slot
    device: int
    layer: str
    operation: str
    line: str
    message: str


def first_failure(
    executor: Executor, shares: Sequence[Share], issue: Callable[[PassRun], None]
) -> Failure | None:
    """Run the passes that failed eagerly, one slot after the other.

    Args:
        executor: knows cells and devices.
        shares: what each replica computes.
        issue: `PassRun.train` or `PassRun.forward`.

    Returns:
        The first slot that fails; None where none does.
    """
    for run in executor.runs(shares):
        try:
            issue(run)
        except tf.errors.OpError as error:
            if run.slot is None:
                return None
            failure = describe(run, run.slot, error)
            if failure.layer:
                return failure
            k, m = run.slot.cell, run.slot.micro_batch
            cell = run.network_pass.cells[k]
            differentiates = run.slot.phase not in "FR" or m in cell.fused
            upstream = run.backward_inputs(k, m) if differentiates else None
            with tf.device(run.devices[k]):
                layer = _failing_layer(executor, cell, run.cell_inputs(k, m), upstream)
            return dataclasses.replace(failure, layer=layer)
    return None


def _failing_layer(
    executor: Executor, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs | None
) -> str:
    """Return the layer of a cell that fails when each is run alone; empty where none does.

    TensorFlow does not name the layer of an operation inside a `tf.function` or in the gradient of
    a `tf.custom_gradient`.

    Args:
        executor: knows cells and devices.
        cell: the cell in its pass.
        inputs: inputs of the micro-batch.
        upstream: inputs of the cell's backward; None: only the forward is run.
    """
    analysis, programs = executor.analysis, executor.programs[cell.index]
    values = dict(inputs.imports)
    number = cell.layers.start
    try:
        for number in cell.layers:
            values.update(programs.compute_layer(cell, number, inputs, values)[0])
        if upstream is not None:
            losses = (loss.name for loss in cell.losses)
            factors = dict(zip(losses, upstream.loss_factors, strict=True))
            gradients = {v: [leaves] for v, leaves in upstream.exports.items()}
            for number in reversed(cell.layers):
                with tf.GradientTape() as tape:
                    reads = [
                        v for v in analysis.wiring.reads[number] if v in cell.mode.differentiable
                    ]
                    sources = [floating(values[v]) for v in reads]
                    tape.watch([sources, inputs.weights])
                    written, collected = programs.compute_layer(cell, number, inputs, values)
                targets, starts = [], []
                for v, value in written.items():
                    targets += floating(value) if v in gradients else []
                    starts += [tf.add_n(same) for same in zip(*gradients.get(v, []), strict=True)]
                for name, loss in collected.losses.items():
                    targets.append(loss)
                    starts.append(precision.cast(factors[name], loss.dtype))
                found = tape.gradient(
                    targets, [sources, inputs.weights], starts, unconnected_gradients="zero"
                )
                for v, leaves in zip(reads, found[0], strict=True):
                    gradients.setdefault(v, []).append([tf.convert_to_tensor(g) for g in leaves])
    except tf.errors.OpError:
        return analysis.layers[number].name
    return ""


def describe(run: PassRun, slot: Slot, error: tf.errors.OpError) -> Failure:
    """Return which layer's operation failed in a slot's call."""
    analysis, share = run.executor.analysis, run.share
    names = [analysis.layers[number].name for number in analysis.cells[slot.cell].layers]
    layer, operation = next(iter(_owners(names, error.message)), ("", ""))
    frames = _FRAME.findall(error.message)
    line = "{2} ({0}:{1})".format(*frames[-1]) if frames else ""
    device = share.replica * share.network_pass.table.num_devices
    device += analysis.cells[slot.cell].device_number
    number = share.first_micro_batch + slot.micro_batch
    in_mini_batch = dataclasses.replace(slot, micro_batch=number)
    return Failure(in_mini_batch, device, layer, operation, line, cause(error))


def _owners(names: Sequence[str], message: str) -> list[tuple[str, str]]:
    """Return (layer, operation below it) of the operations in a message that layers made.

    Args:
        names: names of the layers.
        message: TensorFlow's message.
    """
    found = []
    for node in _NODE.findall(message):
        # Gradients are named after the operation that they belong to.
        path = re.sub(r"^(gradient_tape|gradients)/", "", node)
        owners = [name for name in names if path == name or path.startswith(f"{name}/")]
        if owners:
            layer = max(owners, key=len)
            found.append((layer, path.removeprefix(layer).strip("/").rpartition("/")[2]))
    return found


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


def to_error(
    analysis: network.Analysis, failure: Failure | None, error: tf.errors.OpError, num: int
) -> errors.StepError:
    """Return the error that the user sees.

    Args:
        analysis: analysis of the network.
        failure: the first slot that failed; None where the step did not fail again.
        error: what the step raised.
        num: number of micro-batches.
    """
    wanted = _ALLOCATION.search(error.message if failure is None else failure.message)
    if failure is None and wanted is not None:
        return _full(analysis, error, wanted)
    if failure is None:
        return errors.StepError(
            f"a step failed ({cause(error)}), but not when its slots were run one by one. A device "
            "may have been lost: run it again"
        )
    slot = failure.slot
    cell = analysis.cells[slot.cell]
    if failure.layer:
        made = f", in {failure.line}" if failure.line else ""
        where = f"layer {failure.layer}"
        where += f", operation {failure.operation}" if failure.operation else made
    else:
        first, last = (analysis.layers[n].name for n in (cell.layers.start, cell.layers.stop - 1))
        where = f"cell {slot.cell} ({first} to {last})"
        where += f", in {failure.line}" if failure.line else ""
    message = failure.message
    if wanted is not None:
        message = _lack(f"device {failure.device}", wanted)
    return errors.StepError(
        f"{where}, micro-batch {slot.micro_batch} of {num}, slot {slot}: {message}",
        layer=failure.layer,
        micro_batch=slot.micro_batch,
    )


def _full(
    analysis: network.Analysis, error: tf.errors.OpError, wanted: re.Match[str]
) -> errors.StepError:
    """Return the error for a lack of memory that a step had, but none of its slots alone."""
    layers = _owners([layer.name for layer in analysis.layers], error.message)
    if not layers:
        return errors.StepError(_lack("a device", wanted))
    layer = layers[0][0]
    if analysis.params.num_replicas > 1:  # whose device it was, the message does not say
        return errors.StepError(f"layer {layer}: {_lack('a device', wanted)}", layer=layer)
    number = next(n for n, info in enumerate(analysis.layers) if info.name == layer)
    device = analysis.cells[analysis.cell_of(number)].device_number
    return errors.StepError(f"layer {layer}: {_lack(f'device {device}', wanted)}", layer=layer)


def _lack(device: str, wanted: re.Match[str]) -> str:
    return (
        f"out of memory on {device}, for a tensor {wanted[2]} [{wanted[1]}]{_bytes(wanted)}. "
        "Raise num_micro_batches or num_partitions, or set recompute='full'; --mode=plan shows "
        "what each device needs"
    )


def _bytes(wanted: re.Match[str]) -> str:
    """Return the size of a tensor that was wanted, " of 3.00 MiB"; empty for other dtypes."""
    count = math.prod(map(int, filter(None, wanted[1].split(","))))
    try:
        return f" of {units.size(count * tf.dtypes.as_dtype(wanted[2]).size)}"
    except TypeError:
        return ""


@contextlib.contextmanager
def named(
    run: PassRun,
    slot: Slot,
    inputs: CellInputs,
    upstream: BackwardInputs | None = None,
) -> Iterator[None]:
    """Name layer and micro-batch in the error of a slot's call that is made eagerly.

    Args:
        run: the pass of a replica.
        slot: the slot.
        inputs: inputs of its micro-batch.
        upstream: inputs of the cell's backward, if the slot is one.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if not tf.executing_eagerly():
            raise
        failure = describe(run, slot, error)
        if not failure.layer:
            cell = run.network_pass.cells[slot.cell]
            with tf.device(run.devices[slot.cell]):
                layer = _failing_layer(run.executor, cell, inputs, upstream)
            failure = dataclasses.replace(failure, layer=layer)
        num = run.share.num_micro_batches
        raise to_error(run.executor.analysis, failure, error, num) from error
