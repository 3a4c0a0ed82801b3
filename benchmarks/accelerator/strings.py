"""Do text fields stay on the host, where all their kernels are, and does the step train?

The second cell hashes words; gradients must be those with the same ids as numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt
from lingvo_gpipe import layers, pipelining
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest

BUCKETS = 7
WORDS = ("cell", "slot", "micro", "batch", "replica", "table", "bubble", "link")


class Hash(base.Layer):
    """word: [B] string, or ids: [B] int64 → ids."""

    class Params(base.Layer.Params):
        """Params of Hash."""

        def _meta(self, *specs: SpecNest) -> base.Meta:
            return base.Meta(tf.TensorSpec(specs[0].shape, tf.int64))

    def fprop(self, theta: base.Theta, inputs: Nest, ctx: base.Context) -> Nest:
        """Return the bucket of each word."""
        del theta, ctx
        return _buckets(inputs) if inputs.dtype == tf.string else inputs


def answers(setting: Setting) -> Answers:
    """Yield how far gradients with text are from those with numbers."""
    devices = setting.devices(2, memory_mib=2048)
    words = tf.constant(WORDS)
    texts = attempt(_gradients, devices, words)
    yield "step with text", texts if "error" in texts else "ran"
    if "error" not in texts:
        numbers = _gradients(devices, _buckets(words))
        differences = [np.abs(texts[path] - value).max() for path, value in numbers.items()]
        yield "largest difference", float(max(differences))


def _buckets(words: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_hash_bucket_fast(words, BUCKETS)


def _gradients(devices: list[str], words: tf.Tensor) -> dict[str, Any]:
    pipe = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(units=4, reads=("x",), writes=("dense",)),
            Hash.Params(reads=("word",), writes=("ids",)),
            layers.Embedding.Params(vocabulary=BUCKETS, units=4, reads=("ids",), writes=("rows",)),
            layers.Add.Params(reads=("dense", "rows"), writes=("x",)),
            layers.Softmax.Params(classes=3),
        ],
        num_partitions=2,
        num_micro_batches=2,
        cuts=(1, 4),
        devices=tuple(devices),
    ).instantiate()
    count = len(WORDS)
    batch = {"x": tf.ones([count, 3]), "word": words, "label": tf.range(count) % 3}
    gradients = pipe.value_and_gradients(batch).gradients
    return {path: tf.convert_to_tensor(gradient).numpy() for path, gradient in gradients.items()}
