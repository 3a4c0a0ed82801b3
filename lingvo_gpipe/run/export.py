"""Export: a trained network as a SavedModel, which TensorFlow alone loads and runs.

    import tensorflow as tf
    model = tf.saved_model.load("runs/mine/export/1000")
    model.signatures["serving_default"](image_bytes=tf.constant([png]))["probabilities"]

It is traced from the plain network: its layers one after another, in inference, on whatever device
it is called. Partitions, micro-batches, schedule, devices and this package leave no trace in it;
what serves training alone (labels, losses, auxiliary heads, slots) is left out by the layers
themselves (`Layer.inference`). Averages stand for weights where training keeps them, and an image
of which evaluation takes several crops is told the mean of their probabilities.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, network, seeds, task
from lingvo_gpipe.execution import cell_calls, cell_programs, mini_batch
from lingvo_gpipe.input import Function, Program, Serving
from lingvo_gpipe.layers import base
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.network.wiring import FIELD
from lingvo_gpipe.plan import memory_timeline
from lingvo_gpipe.run import checkpoints, log_directory, restoring

SIGNATURE = "serving_default"
CLASSES = "classes"
_FOLDER = "export"


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """A network as inference has it.

    Attributes:
        params: of its pipeline: one cell, one micro-batch, and the layers that are needed alone.
        outputs: names that leave it.
    """

    params: Any
    outputs: tuple[str, ...]


def plain(model: Any, available: Collection[str]) -> Plain:
    """Return the network of a pipeline as inference has it.

    Args:
        model: a `PipeliningLayer.Params`.
        available: names of the fields that are served.

    Raises:
        LayerError: what leaves the network needs a field that is not served.
    """
    names, lost = set(available), dict[str, str]()
    kept: list[Any] = []
    given = network.layer_params(model)
    for own in given:
        changed = own.inference(frozenset(names))
        if changed is None:
            continue
        missing = next((name for name in changed.reads if name not in names), None)
        if missing is None:
            names.update(changed.writes)
            kept.append(changed)
            continue
        names.difference_update(changed.writes)
        why = lost.get(missing, f"{base.describe(own)} reads {missing!r}, which is not served")
        lost.update(dict.fromkeys(changed.writes, why))
    outputs = tuple(model.outputs or given[-1].writes)
    for name in outputs:
        if name not in names:
            why = lost.get(name, "no layer that inference has writes it")
            raise errors.LayerError(
                f"{model.name or 'the network'} cannot be exported: it gives {name!r}, but {why}. "
                "Let the layer's `inference` do without, or name other outputs in model.outputs"
            )
    return _needed(model, kept, outputs, available)


def _needed(
    model: Any, kept: list[Any], outputs: tuple[str, ...], available: Collection[str]
) -> Plain:
    """Leave out the layers that no output needs."""
    needed, unread = set(outputs), list[str]()
    chain: list[Any] = []
    for own in reversed(kept):
        if not needed & set(own.writes):
            continue
        # One of several values may be read by nobody any more, which the stream refuses.
        spare = {name: f"{own.name}_{name}" for name in own.writes if name not in needed}
        unread += spare.values()
        needed = needed - set(own.writes) | set(own.reads)
        own.writes = tuple(spare.get(name, name) for name in own.writes)
        chain.append(own)
    params = memory_timeline.uncut(model)
    unbatched = tuple(name for name in model.unbatched if name in available)
    params.set(layers=chain[::-1], outputs=(*outputs, *unread), unbatched=unbatched, frozen=())
    return Plain(params, outputs)


class Network:
    """The plain network on variables of its own; called on fields, it gives what is told of them.

    Attributes:
        analysis: of its layers.
        by_path: path → variable, zeros at first.
    """

    def __init__(self, model: Any, fields: Mapping[str, Any]) -> None:
        """Make the variables.

        Args:
            model: a `PipeliningLayer.Params`.
            fields: name → nest of specs of what is served; rows may be unknown.

        Raises:
            UserError: what is served does not fit the network.
        """
        self._plain = plain(model, fields)
        params = self._plain.params
        self.analysis = network.analyze(
            params,
            {
                name: value
                if name in params.unbatched
                else micro_batches.with_batch(value, 1, params.batch_dim)
                for name, value in fields.items()
            },
        )
        layers = [info.params.instantiate() for info in self.analysis.layers]
        self._programs = cell_programs.CellPrograms(0, self.analysis, layers, jit=False)
        with tf.device("CPU:0"):
            self.by_path: dict[str, tf.Variable] = {
                path: tf.Variable(
                    tf.zeros(spec.shape, spec.dtype), trainable=False, name=path.replace("/", ".")
                )
                for path, spec in self.analysis.variables.items()
            }

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Run the network in inference."""
        wiring, params = self.analysis.wiring, self._plain.params
        read = mini_batch.read_fields(self.analysis, fields)
        (cell,) = self.analysis.evaluation_pass(1, outputs=True).cells
        imports = {version: read[name] for name, version in wiring.fields.items()}
        values, _ = self._programs.run(
            cell,
            cell_calls.CellInputs(
                weights=[tf.convert_to_tensor(self.by_path[path]) for path in cell.weights],
                state=[tf.convert_to_tensor(self.by_path[path]) for path in cell.state],
                imports=imports,
                seed=seeds.base_seed(params.seed),
                step=tf.constant(0, tf.int64),
            ),
        )
        told: dict[str, tf.Tensor] = {}
        versions = [wiring.outputs[name] for name in self._plain.outputs]
        for number in dict.fromkeys(wiring.versions[v].producer for v in versions):
            if number == FIELD:
                own = [v for v in versions if wiring.versions[v].producer == FIELD]
                told |= {wiring.versions[v].name: values[v] for v in own}
                continue
            layer = self.analysis.layers[number].params
            written = tuple(values[version] for version in wiring.writes[number])
            found = layer.served(written if len(written) > 1 else written[0])
            prefix = f"{layer.name}_" if set(found) & set(told) else ""
            rows = self._rows(wiring.writes[number][0])
            told |= {f"{prefix}{name}": _per_example(value, rows) for name, value in found.items()}
        spare = set(params.outputs) - set(self._plain.outputs)
        return {name: value for name, value in told.items() if name not in spare}

    def _rows(self, version: int) -> int:
        """Return how many rows of a value belong to one example: its crops."""
        (first, *_) = tf.nest.flatten(self.analysis.specs[version])
        side = self._plain.params.batch_dim
        return int(first.shape[side]) if side == 0 and first.shape.rank else 1


def _per_example(value: tf.Tensor, rows: int) -> tf.Tensor:
    """Return the mean of each example's rows."""
    if rows == 1:
        return value
    return tf.reduce_mean(tf.reshape(value, [-1, rows, *value.shape[1:]]), 1)


def _program(given: Serving | Program) -> Program:
    """Return one call of the network as the program that it is."""
    if isinstance(given, Program):
        return given
    serving = given

    def read(sent: dict[str, tf.Tensor]) -> Any:
        return serving.fields(sent)

    traced = tf.function(read, autograph=False).get_concrete_function(_named(serving.signature))
    fields = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), traced.structured_outputs
    )

    def functions(own: Network) -> list[Function]:
        def call(**sent: tf.Tensor) -> dict[str, tf.Tensor]:
            return own(serving.fields(sent))

        return [Function(serving.signature, call)]

    return Program(fields, functions)


def _named(signature: Mapping[str, tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in signature.items()
    }


def _concrete(function: Function) -> Any:
    """Return a function traced for any number of examples."""

    def serve(**sent: tf.Tensor) -> dict[str, tf.Tensor]:
        return {name: tf.identity(value) for name, value in function.call(**sent).items()}

    traced = tf.function(serve, autograph=False)
    return traced.get_concrete_function(**_named(function.signature))


def run(
    params: Any,
    logdir: Path,
    *,
    which: str | None = None,
    report: Callable[[str], None] = logging.info,
) -> Path:
    """Write a checkpoint's network as a SavedModel, `LOGDIR/export/STEP`; whole or not at all.

    Functions that need another package stand beside it, in `LOGDIR/export/NAME/STEP`.

    Args:
        params: a `Task.Params`; by `serving` it tells what is served.
        logdir: of the run.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.
        report: takes the lines.

    Returns:
        Its folder.

    Raises:
        UserError: the input cannot be served, the network needs what is not served, there is no
            such checkpoint, or the folder cannot be written.
    """
    source = restoring.source(params, logdir=logdir, which=which)
    params = task.complete(params, source)
    task.check(params)
    assets = source.assets()
    log_directory.check_assets(logdir, assets)
    program = _program(params.instantiate().serving(source))
    served = Network(params.model, program.fields)
    trained = network.analyze(params.model, source.element_spec(training=True)).variables
    restored = restoring.restore(served.by_path, trained, params, logdir=logdir, which=which)
    classes = source.class_names
    more = {CLASSES: _constant(CLASSES, classes)} if classes else {}
    folders = []
    for function in program.functions(served):
        folders.append(logdir / _FOLDER / function.folder / str(restored.step))
        traced = _concrete(function)
        module = tf.Module()
        module.variables_by_path = served.by_path
        module.resources = function.resources
        _write(module, {SIGNATURE: traced, **more}, folders[-1], assets)
        for line in _told(restored, folders[-1], traced, classes):
            report(line)
    for note in program.notes:
        report(f"    {note}")
    return folders[0]


def _constant(name: str, values: tuple[str, ...]) -> Any:
    """Return a function without arguments that gives `values` under `name`."""

    def give() -> dict[str, tf.Tensor]:
        # Names of folders may be any bytes.
        return {name: tf.constant([text.encode(errors="surrogateescape") for text in values])}

    return tf.function(give, autograph=False).get_concrete_function()


def _write(
    module: tf.Module, signatures: dict[str, Any], folder: Path, assets: Mapping[str, bytes]
) -> None:
    """Save under a temporary name, then take the place of what was there."""
    partial, before = (folder.with_name(f"{folder.name}.{mark}") for mark in ("writing", "before"))
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        if before.exists() and not folder.exists():
            before.rename(folder)  # of a process that was killed between two names
        for left in (partial, before):
            shutil.rmtree(left, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            files = {name: Path(temporary, name) for name in assets}
            for name, file in files.items():
                file.write_bytes(assets[name])
            module.assets = [tf.saved_model.Asset(str(file)) for file in files.values()]
            tf.saved_model.save(module, str(partial), signatures=signatures, options=options)
        if folder.exists():
            folder.rename(before)
        try:
            partial.rename(folder)
        except OSError:
            if before.exists():
                before.rename(folder)
            raise
        shutil.rmtree(before, ignore_errors=True)
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or getattr(error, "message", "") or str(error)
        raise errors.CheckpointError(
            f"{folder} cannot be written: {reason.splitlines()[0]}. Free disk space, or give "
            "another --logdir with --checkpoint"
        ) from error


def _told(
    restored: checkpoints.Restored, folder: Path, function: Any, classes: tuple[str, ...]
) -> list[str]:
    """Tell what was exported, and how it is called."""
    inputs = ", ".join(
        f"{spec.name} {spec.dtype.name}{_sides(spec)}"
        for spec in tf.nest.flatten(function.structured_input_signature)
    )
    outputs = ", ".join(
        f"{name} {value.dtype.name}{_sides(value)}"
        for name, value in function.structured_outputs.items()
    )
    names = f"; {CLASSES}: {len(classes)} names" if classes else ""
    return [
        f"exported step={restored.step} to {folder}",
        f"    {SIGNATURE}: {inputs} → {outputs}{names}",
    ]


def _sides(spec: Any) -> str:
    return "[" + ", ".join("N" if side is None else str(side) for side in spec.shape) + "]"
