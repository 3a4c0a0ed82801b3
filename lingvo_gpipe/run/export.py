"""Export: a trained network as a SavedModel, which TensorFlow alone loads and runs.

    import tensorflow as tf
    model = tf.saved_model.load("runs/mine/export/1000")
    model.signatures["serving_default"](image_bytes=tf.constant([png]))["probabilities"]

It is traced from the network in inference (`inference`), so it does not depend on partitions,
micro-batches, schedule, devices or this package. Averages are used as weights if training keeps
them. If evaluation takes several crops of an image, the model returns the mean of their
probabilities.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf
from absl import logging
from tensorflow.types.experimental import ConcreteFunction

from lingvo_gpipe import errors, network, task
from lingvo_gpipe.input import Batch
from lingvo_gpipe.input.serving import Function, Program, ServedNetwork, Serving
from lingvo_gpipe.run import checkpoints, log_directory, restoring
from lingvo_gpipe.run.inference import InferenceNetwork
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
    source = restoring.source(params, logdir=logdir, which=which)
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
        except OSError:
            if before.exists():
                before.rename(folder)
            raise
        shutil.rmtree(before, ignore_errors=True)
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(partial, ignore_errors=True)
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
