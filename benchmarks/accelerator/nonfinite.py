"""Is it named where a value first stops being finite: layer or field, and micro-batch?"""

from __future__ import annotations

import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt
from tests.lingvo_gpipe.execution import diagnosis_test
from tests.networks import pipelines


def answers(setting: Setting) -> Answers:
    """Yield what is named, beside what should be."""
    setting.devices(3, memory_mib=2048)
    batch = pipelines.batch()
    yield "nowhere", attempt(pipelines.three().first_nonfinite, batch)
    spoiled = pipelines.mlp(diagnosis_test.Poison.Params(name="spoiled"))
    pipe = pipelines.three(layers=spoiled, cuts=None)
    yield "layer spoiled, micro-batch 0", attempt(pipe.first_nonfinite, batch)
    infinite = tf.constant([float("inf")], batch["target"].dtype)
    batch["target"] = tf.tensor_scatter_nd_update(batch["target"], [[5, 1]], infinite)
    yield "field target, micro-batch 2", attempt(pipelines.three().first_nonfinite, batch)
