"""Every operation of a cell has a kernel for GPUs and one of XLA, which TPUs need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import keras_layers, layers, optim, pipelining, registry
from lingvo_gpipe import task as tasks
from lingvo_gpipe.run import learner
from lingvo_gpipe.tasks.lm import transformer
from lingvo_gpipe.tasks.mt.decoding import search, translator
from lingvo_gpipe.tasks.mt.decoding.search import Decode
from tests.lingvo_gpipe.keras_layers import families_test
from tests.support import device_kernels
from tests.tasks.mt import toy_model

# Nothing but cells is on these: the host of the process is CPU:0.
DEVICES = ("/device:CPU:1", "/device:CPU:2")
MODEL = registry.Registry().model


def convolutions() -> tuple[Any, dict[str, Any]]:
    task = MODEL("image.digits.ConvNet")().task()
    task.train.loss_scale = optim.LossScale.Params()
    source = task.input.set(batch_size=8).instantiate()
    return tasks.complete(task, source), zeros(source.element_spec(training=True))


def language_model() -> tuple[Any, dict[str, Any]]:
    task = MODEL("lm.transformer.L13")().task()
    task.model.layers = transformer.language_model(
        2, units=8, heads=2, hidden=16, vocabulary=11, dropout=0.1
    )
    task.model.num_micro_batches = 2
    source = task.input.set(batch_size=4, length=6).instantiate()
    return task, zeros(source.element_spec(training=True))


def keras_model(name: str) -> tuple[Any, dict[str, Any]]:
    make, inputs = families_test.HAND_BUILT[name]
    model = make()
    cut = keras_layers.from_keras_model(model)
    names = keras.tree.flatten(cut.inputs)
    batch = {
        name: tf.cast(array, tensor.dtype)
        for name, array, tensor in zip(names, inputs(), model.inputs, strict=True)
    }
    heads = []
    for number, (name, tensor) in enumerate(
        zip(keras.tree.flatten(cut.outputs), model.outputs, strict=True)
    ):
        batch[f"target_{number}"] = tf.zeros([5, *tensor.shape[1:]])
        reads, loss = (name, f"target_{number}"), f"loss_{number}"
        heads.append(layers.MeanSquaredError.Params(name=loss, loss_name=loss, reads=reads))
    params = pipelining.PipeliningLayer.Params(
        layers=[*cut.layers, *heads], outputs=cut.outputs, num_micro_batches=2
    )
    train = tasks.Train(
        optimizer=optim.Optimizer.Params(name="Adam", learning_rate=1e-3),
        clip_norm=1.0,
        average=optim.Average.Params(),
        max_steps=1,
    )
    return tasks.Task.Params(model=params, train=train), batch


def zeros(specs: Any) -> Any:
    return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)


# `layers_test` looks up the kernels of every layer; these have what lies around layers, too.
POINTS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str | None]] = {
    "images with a loss scale": (convolutions, "mixed_float16"),
    "a language model": (language_model, "mixed_bfloat16"),
    "bert": (functools.partial(keras_model, "bert"), None),
    "masked_lstm": (functools.partial(keras_model, "masked_lstm"), None),
}


def lacking(graphs: list[Any], kinds: tuple[str, ...]) -> dict[str, str]:
    return device_kernels.without_kernel(graphs, DEVICES, kinds)


@pytest.mark.parametrize("name", POINTS)
def test_training_and_evaluation_run_on_gpus_and_compile(name: str) -> None:
    make, dtype = POINTS[name]
    task, batch = make()
    task.model.set(num_partitions=2, devices=DEVICES, dtype=dtype)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
    learned = learner.Learner(task, specs)
    update = device_kernels.graphs_of(lambda: learned.update([batch]))
    evaluation = device_kernels.graphs_of(lambda: learned.pipe.evaluate(batch, outputs=True))
    for graphs in (update, evaluation):
        assert len({op for g in graphs for op, _ in device_kernels.operations(g, DEVICES)}) > 50
        assert lacking(graphs, device_kernels.GPU) == {}
        assert lacking(graphs, device_kernels.XLA) == {}


@pytest.mark.parametrize("policy", ["never,recompute_grad", "early"])
def test_every_policy_and_split_backward_runs_on_gpus_and_compiles(policy: str) -> None:
    task, batch = language_model()
    task.model.set(num_partitions=2, devices=DEVICES, recompute=policy, schedule="zb_h1")
    learned = learner.Learner(task, tf.nest.map_structure(tf.TensorSpec.from_tensor, batch))
    graphs = device_kernels.graphs_of(lambda: learned.update([batch]))
    assert lacking(graphs, device_kernels.GPU) == lacking(graphs, device_kernels.XLA) == {}


def test_what_follows_a_step_reads_the_clock_on_the_host_alone() -> None:
    """With `--profile_steps`, and the counters that a stalled step is found by."""
    task, batch = language_model()
    task.model.set(num_partitions=2, devices=DEVICES)
    learned = learner.Learner(task, tf.nest.map_structure(tf.TensorSpec.from_tensor, batch))
    learned.pipe.executor.note_times()
    learned.pipe.executor.follow_progress()
    graphs = device_kernels.graphs_of(lambda: learned.update([batch]))
    assert set(lacking(graphs, device_kernels.GPU)) == {"Timestamp ()"}


@pytest.mark.parametrize("beam", [1, 3])
def test_decoding_runs_on_gpus(beam: int) -> None:
    model = toy_model.params(tie="all").set(dtype=None, num_partitions=2, devices=DEVICES)
    pipe = toy_model.built_from(model)
    params = Decode(search=search.Search(beam=beam, max_length=5), batch=2, num_shapes=1)
    decoder = translator.Translator(pipe, params, max_length=8)
    graphs = device_kernels.graphs_of(lambda: decoder.translate([[5, 4, 3], [7, 3]]))
    assert lacking(graphs, device_kernels.GPU) == {}


class Written(layers.Identity):
    """x → x, by way of text, which no GPU and no compiled cell holds."""

    def fprop(self, theta: Any, inputs: Any, ctx: Any) -> Any:
        del theta, ctx
        return inputs + tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(inputs)))


def test_an_operation_without_a_kernel_is_named() -> None:
    """In the programs of the second cell, and on the device of the first beside its programs."""
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.Dense.Params(units=3), Written.Params(), layers.MeanSquaredError.Params()],
        num_partitions=2,
        cuts=(1, 2),
        devices=DEVICES,
    ).instantiate()
    batch = {"x": tf.ones([4, 2]), "target": tf.ones([4, 3])}
    pipe.build(batch)

    @tf.function
    def step() -> Any:
        with tf.device(DEVICES[0]):
            now = tf.timestamp()
        tf.print(now)  # on no device of a cell
        return pipe.value_and_gradients(batch).loss + tf.cast(now, tf.float32)

    graphs = device_kernels.graphs_of(step)
    text = {"AsString (T=float32)", "StringToNumber (out_type=float32)"}
    for kinds in (device_kernels.GPU, device_kernels.XLA):
        found = lacking(graphs, kinds)
        assert set(found) == text | {"Timestamp ()"}
        assert all("_forward_" in found[name] or "_fused_" in found[name] for name in text)


def test_types_decide_whether_there_is_a_kernel() -> None:
    """Int32 lies on the host, by kernels of its own; a product of it is computed nowhere else."""
    gpu = device_kernels.GPU
    assert device_kernels.has_kernel("MatMul", {"T": ("float32",)}, gpu)
    assert not device_kernels.has_kernel("MatMul", {"T": ("int32",)}, gpu)
    assert device_kernels.has_kernel("MatMul", {"T": ("int32",)}, device_kernels.XLA)
    assert not device_kernels.has_kernel("Timestamp", {}, gpu)
    assert device_kernels.has_kernel("Timestamp", {}, ("CPU",))
