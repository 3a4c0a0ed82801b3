"""What does a call of a cell cost beside the work in it?

Steps of K cells of one small dense layer and M micro-batches: nearly all of a slot's time is its
call. Each is also compiled by XLA.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from benchmarks.accelerator.question import Answers, Setting, attempt, median_s
from lingvo_gpipe import layers, pipelining

UNITS, ROWS = 16, 4


def answers(setting: Setting) -> Answers:
    """Yield the microseconds of a call."""
    partitions, micro_batches = setting.sized(((1, 2), (4,)), ((1, 2, 4), (16, 64)))
    devices = setting.devices(max(partitions))
    for k, m, jit in itertools.product(partitions, micro_batches, (False, True)):
        found = attempt(_call, devices[:k], m, jit, setting.sized(0.0, 0.5))
        yield f"K={k}, M={m}{', XLA' if jit else ''}", found


def _call(devices: list[str], micro_batches: int, jit: bool, least_s: float) -> dict[str, Any]:
    dense = [layers.Dense.Params(name=f"dense_{n}", units=UNITS) for n in range(len(devices))]
    pipe = pipelining.PipeliningLayer.Params(
        layers=[*dense, layers.MeanSquaredError.Params()],
        num_partitions=len(devices),
        num_micro_batches=micro_batches,
        cuts=(*([1] * (len(devices) - 1)), 2),
        devices=tuple(devices),
        fuse=False,
        jit_compile=jit,
    ).instantiate()
    x = tf.random.stateless_normal([ROWS * micro_batches, UNITS], [1, 2])
    batch = {"x": x, "target": tf.zeros_like(x)}
    step_s = median_s(lambda: float(pipe.value_and_gradients(batch).loss), least_s=least_s)
    calls = 2 * len(devices) * micro_batches
    return {"step ms": 1e3 * step_s, "calls": calls, "us a call": 1e6 * step_s / calls}
