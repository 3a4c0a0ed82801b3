"""Does `fit` of a Keras model over devices train as plain `fit` does, in the memory it may take?

GPT-2 with float32 products and sequences of 512, by SGD with momentum, two epochs of two
mini-batches: plain, over two devices, and with `adapt_to_memory` in less memory than a step of the
plain model takes. Its variables are made in the host's memory.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lingvo_gpipe as lg
from benchmarks.accelerator import gpt2, placement, speed
from benchmarks.accelerator.question import Answers, Setting, attempt
from lingvo_gpipe.fitting import planning


def answers(setting: Setting) -> Answers:
    """Yield losses, seconds and memory of each way, and how far its weights are from plain ones."""
    devices = setting.devices(2, memory_mib=24_000)
    tf.config.experimental.enable_tensor_float_32_execution(enabled=False)
    yield "memory of devices", planning.memory_bytes()
    size = setting.sized(
        gpt2.Gpt2(2, 16, 2, vocabulary=50, length=8, rows=16),
        gpt2.Gpt2(8, 1024, 16, vocabulary=8192, length=512, rows=32),
    )
    less = {"device_memory": setting.sized("200KiB", "3GiB"), "adapt_to_memory": True}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "K=2, M=4": {"num_partitions": 2, "num_micro_batches": 4},
        "K=2, M=4, XLA": {"num_partitions": 2, "num_micro_batches": 4, "jit_compile": True},
        "K=2, less memory": {"num_partitions": 2, "num_micro_batches": 1, **less},
        "K=1, less memory": {"num_partitions": 1, "num_micro_batches": 1, **less},
    }
    plain: list[Any] = []
    for way, settings in ways.items():
        yield way, attempt(_fit, setting, size, settings, devices, plain)
        keras.backend.clear_session()


def _fit(
    setting: Setting,
    size: gpt2.Gpt2,
    settings: dict[str, Any],
    devices: list[str],
    plain: list[Any],
) -> dict[str, Any]:
    """Train; the first time, fill `plain` with the weights."""
    keras.utils.set_random_seed(1)
    with tf.device("CPU:0" if settings else devices[0]):
        model = speed.keras_model(size)
    trained = model
    if settings:
        own = devices[: settings["num_partitions"]]
        trained = lg.PipelinedModel(model, devices=own, **settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    data = speed.ids(size, 2 * size.rows)
    label = data.pop("label")
    setting.reset_peaks(devices)
    begun_s = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = trained.fit(data, label, size.rows, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *trained.optimizer.variables]
    found = {
        "losses": history.history["loss"],
        "seconds": time.perf_counter() - begun_s,
        "warnings": [str(each.message) for each in warned],
        "variables": placement.counted(variable.value for variable in variables),
    }
    found["counted MiB"] = setting.counted_mib(devices)
    weights = model.get_weights()
    plain.extend(weights[len(plain) :])
    apart = (float(np.abs(a - b).max()) for a, b in zip(weights, plain, strict=True))
    return found | {"weights apart": max(apart)}
