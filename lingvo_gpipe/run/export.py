"""Export: a trained network as a SavedModel, which TensorFlow alone loads and runs.

    import tensorflow as tf
    model = tf.saved_model.load("runs/mine/export/1000")
    model.signatures["serving_default"](image_bytes=tf.constant([png]))["probabilities"]

It is traced from the network in inference, without partitions: its layers run one after another,
without what only training needs (labels, losses, auxiliary heads, slots: `Layer.inference`). So it
does not depend on partitions, micro-batches, schedule, devices or this package. Averages are used
as weights if training keeps them.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import tensorflow as tf
from absl import logging
from tensorflow.types.experimental import ConcreteFunction

from lingvo_gpipe import errors, network, seeds, task
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.execution.executor import read_fields
from lingvo_gpipe.input import Batch
from lingvo_gpipe.input.serving import Function, Program, ServedNetwork, Serving
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, wiring
from lingvo_gpipe.network.wiring import FIELD
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.run import checkpoints, log_directory, restoring
from lingvo_gpipe.task import Task

SIGNATURE = "serving_default"
CLASSES = "classes"
_FOLDER = "export"


def _program(serving: Serving | Program) -> Program:
    """Return the program of an exported model; for a `Serving` it is one call of the network."""
    if isinstance(serving, Program):
        return serving

    def read(inputs: dict[str, tf.Tensor]) -> Batch:
        return serving.fields(inputs)

    traced = tf.function(read, autograph=False).get_concrete_function(_named(serving.signature))
    fields = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), traced.structured_outputs
    )

    def functions(served: ServedNetwork) -> list[Function]:
        def call(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            return served(serving.fields(inputs))

        return [Function(serving.signature, call)]

    return Program(fields, functions)


def _named(signature: Mapping[str, tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in signature.items()
    }


def _concrete(function: Function) -> ConcreteFunction:
    """Return a function traced for any number of examples."""

    def serve(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {name: tf.identity(value) for name, value in function.call(**inputs).items()}

    traced = tf.function(serve, autograph=False)
    return traced.get_concrete_function(**_named(function.signature))


def run(
    params: Task.Params,
    logdir: Path,
    *,
    which: str | None = None,
    report: Callable[[str], None] = logging.info,
) -> Path:
    """Write a checkpoint's network as a SavedModel, `LOGDIR/export/STEP`; whole or not at all.

    Functions that need another package are a separate SavedModel, `LOGDIR/export/NAME/STEP`.

    Args:
        params: params of the task, whose `serving` defines the functions.
        logdir: log directory of the run.
        which: path of a checkpoint, or of a directory of them; None: the newest of the run.
        report: receives the lines.

    Returns:
        Its folder.

    Raises:
        UserError: the input cannot be served, the network needs a field that is not served, there
            is no such checkpoint, or the folder cannot be written.
    """
    source = log_directory.source(params, logdir=logdir, which=which)
    params = task.complete(params, source)
    task.check(params)
    assets = source.assets()
    log_directory.check_assets(logdir, assets)
    program = _program(params.instantiate().serving(source))
    served = InferenceNetwork(params.model, program.fields)
    trained = network.analyze(network.uncut(params.model), source.element_spec(training=True))
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
        for line in _lines(restored, folders[-1], traced, classes):
            report(line)
    for note in program.notes():
        report(f"    {note}")
    return folders[0]


def _constant(name: str, values: tuple[str, ...]) -> ConcreteFunction:
    """Return a function without arguments that returns `values` under `name`."""

    def constant() -> dict[str, tf.Tensor]:
        # Folder names, from which class names come, may be any bytes.
        return {name: tf.constant([text.encode(errors="surrogateescape") for text in values])}

    return tf.function(constant, autograph=False).get_concrete_function()


def _write(
    module: tf.Module,
    signatures: Mapping[str, ConcreteFunction],
    folder: Path,
    assets: Mapping[str, bytes],
) -> None:
    """Save under a temporary name, then replace the folder that was there."""
    partial, before = (folder.with_name(f"{folder.name}.{mark}") for mark in ("writing", "before"))
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        if before.exists() and not folder.exists():
            before.rename(folder)  # an earlier process was killed between the two renames
        for left in (partial, before):
            shutil.rmtree(left, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            files = {name: Path(temporary, name) for name in assets}
            for name, file in files.items():
                file.write_bytes(assets[name])
            module.assets = [tf.saved_model.Asset(str(file)) for file in files.values()]
            tf.saved_model.save(module, str(partial), signatures=dict(signatures), options=options)
        if folder.exists():
            folder.rename(before)
        try:
            partial.rename(folder)
        except BaseException:
            if before.exists():
                before.rename(folder)
            raise
        shutil.rmtree(before, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError | tf.errors.OpError):
            raise
        raise errors.CheckpointError(
            f"{folder} cannot be written: {checkpoints.reason(error)}. Free disk space, or give "
            "another --logdir with --checkpoint"
        ) from error


def _lines(
    restored: checkpoints.Restored,
    folder: Path,
    function: ConcreteFunction,
    classes: tuple[str, ...],
) -> list[str]:
    """Return lines that describe what was exported and how it is called."""
    inputs = ", ".join(
        f"{spec.name} {spec.dtype.name}{_shape(spec)}"
        for spec in tf.nest.flatten(function.structured_input_signature)
    )
    outputs = ", ".join(
        f"{name} {value.dtype.name}{_shape(value)}"
        for name, value in function.structured_outputs.items()
    )
    names = f"; {CLASSES}: {len(classes)} names" if classes else ""
    return [
        f"exported step={restored.step} to {folder}",
        f"    {SIGNATURE}: {inputs} → {outputs}{names}",
    ]


def _shape(spec: tf.TensorSpec | tf.Tensor) -> str:
    return "[" + ", ".join("N" if size is None else str(size) for size in spec.shape) + "]"


# --- the network in inference ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class InferenceParams:
    """Params of a network in inference.

    Attributes:
        params: params of a pipeline with one cell, one micro-batch and only the needed layers.
        outputs: names of its outputs.
    """

    params: PipeliningLayer.Params
    outputs: tuple[str, ...]


def inference_params(model: PipeliningLayer.Params, available: Collection[str]) -> InferenceParams:
    """Return the params of a pipeline's network in inference.

    Args:
        model: the pipeline.
        available: names of the fields that are served.

    Raises:
        LayerError: an output of the network needs a field that is not served.
    """
    names, lost = set(available), dict[str, str]()
    kept: list[base.Layer.Params] = []
    all_layers = network.layer_params(model)
    for layer in all_layers:
        changed = layer.inference()
        if changed is None:
            continue
        missing = next((name for name in changed.reads if name not in names), None)
        if missing is None:
            names.update(changed.writes)
            kept.append(changed)
            continue
        names.difference_update(changed.writes)
        why = lost.get(missing, f"{base.describe(layer)} reads {missing!r}, which is not served")
        lost.update(dict.fromkeys(changed.writes, why))
    outputs = wiring.names(model.outputs) or all_layers[-1].writes
    for name in outputs:
        if name not in names:
            why = lost.get(name, "no layer of inference writes it")
            raise errors.LayerError(
                f"{model.name or 'the network'} cannot be exported: its output is {name!r}, but "
                f"{why}. Change the layer's `inference` so that it does not need it, or name other "
                "outputs in model.outputs"
            )
    return _needed(model, kept, outputs)


def _needed(
    model: PipeliningLayer.Params,
    kept: list[base.Layer.Params],
    outputs: tuple[str, ...],
) -> InferenceParams:
    """Leave out the layers that no output needs."""
    needed, unread = set(outputs), list[str]()
    chain: list[base.Layer.Params] = []
    for layer in reversed(kept):
        if not needed & set(layer.writes):
            continue
        # One of several values may have lost its reader, which the wiring would refuse.
        spare = {name: f"{layer.name}_{name}" for name in layer.writes if name not in needed}
        unread += spare.values()
        needed = needed - set(layer.writes) | set(layer.reads)
        layer.writes = tuple(spare.get(name, name) for name in layer.writes)
        chain.append(layer)
    params = network.uncut(model)
    params.set(layers=chain[::-1], outputs=(*outputs, *unread))
    params.set(frozen=(), slices={})  # patterns that have selected already, of all layers
    return InferenceParams(params, outputs)


class InferenceNetwork:
    """A network in inference, with its own variables: fields of a mini-batch → outputs by name.

    Attributes:
        analysis: analysis of its layers.
        by_path: path → variable, zeros at first.
    """

    def __init__(self, model: PipeliningLayer.Params, fields: Mapping[str, SpecNest]) -> None:
        """Make the variables.

        Args:
            model: the pipeline in training.
            fields: name → nest of specs of the fields that are served; rows may be unknown.

        Raises:
            UserError: the fields do not fit the network.
        """
        self._served = inference_params(model, fields)
        params = self._served.params
        self.analysis = network.analyze(params, micro_batches.resized(fields, 1))
        layers = [info.params.instantiate() for info in self.analysis.layers]
        self._programs = cell_programs.CellPrograms(0, self.analysis, layers, jit=False)
        with tf.device("CPU:0"):
            self.by_path: dict[str, tf.Variable] = {
                path: tf.Variable(
                    tf.zeros(spec.shape, spec.dtype), trainable=False, name=path.replace("/", ".")
                )
                for path, spec in self.analysis.variables.items()
            }

    def __call__(self, fields: Mapping[str, Nest]) -> dict[str, tf.Tensor]:
        """Run the network in inference."""
        wiring, params = self.analysis.wiring, self._served.params
        (cell,) = self.analysis.evaluation_pass(1, outputs=True).cells
        imports = read_fields(self.analysis, fields)
        values, _ = self._programs.compute(
            cell,
            cell_programs.CellInputs(
                weights=[tf.convert_to_tensor(self.by_path[path]) for path in cell.weights],
                untrained=[tf.convert_to_tensor(self.by_path[path]) for path in cell.untrained],
                imports=imports,
                seed=seeds.base_seed(params.seed),
                step=tf.constant(0, tf.int64),
            ),
        )
        outputs: dict[str, tf.Tensor] = {}
        versions = [wiring.outputs[name] for name in self._served.outputs]
        for number in dict.fromkeys(wiring.versions[v].producer for v in versions):
            if number == FIELD:
                unchanged = [v for v in versions if wiring.versions[v].producer == FIELD]
                outputs |= {wiring.versions[v].name: values[v] for v in unchanged}
                continue
            layer = self.analysis.layers[number].params
            written = tuple(values[version] for version in wiring.writes[number])
            served = layer.served(written if len(written) > 1 else written[0])
            prefix = f"{layer.name}_" if set(served) & set(outputs) else ""
            outputs |= {f"{prefix}{name}": value for name, value in served.items()}
        spare = set(params.outputs) - set(self._served.outputs)
        return {name: value for name, value in outputs.items() if name not in spare}
