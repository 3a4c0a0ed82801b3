"""Do text fields stay on the host, where all their kernels are, and does the step train?

The second cell hashes words; its gradients must be those with the same ids as numbers.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt
from lingvo_gpipe import keras_layers, layers, pipelining

BUCKETS = 7
WORDS = ("cell", "slot", "micro", "batch", "replica", "table", "bubble", "link")


def answers(setting: Setting) -> Answers:
    """Yield how far gradients with text are from those with numbers."""
    devices = setting.devices(2, memory_mib=2048)
    hashing = keras.layers.Hashing(BUCKETS)
    hashed = keras_layers.from_keras(hashing, reads=("word",), writes=("ids",))
    texts = attempt(_gradients, devices, {"word": tf.constant(WORDS)}, [hashed])
    yield "step with text", texts if "error" in texts else "ran"
    if "error" not in texts:
        numbers = _gradients(devices, {"ids": hashing(tf.constant(WORDS))}, [])
        differences = [np.abs(texts[path] - value).max() for path, value in numbers.items()]
        yield "largest difference", float(max(differences))


def _gradients(
    devices: list[str], words: dict[str, tf.Tensor], hashed: list[layers.Layer.Params]
) -> dict[str, Any]:
    pipe = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(units=4, reads=("x",), writes=("dense",)),
            *hashed,
            layers.Embedding.Params(vocabulary=BUCKETS, units=4, reads=("ids",), writes=("rows",)),
            layers.Add.Params(reads=("dense", "rows"), writes=("x",)),
            layers.Softmax.Params(classes=3),
        ],
        num_partitions=2,
        num_micro_batches=2,
        cuts=(1, 3 + len(hashed)),
        devices=tuple(devices),
    ).instantiate()
    count = len(WORDS)
    batch = {"x": tf.ones([count, 3]), "label": tf.range(count) % 3, **words}
    gradients = pipe.value_and_gradients(batch).gradients
    return {path: tf.convert_to_tensor(gradient).numpy() for path, gradient in gradients.items()}
