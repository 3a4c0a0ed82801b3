"""How many bytes does an update need on each device, by TensorFlow's counters and by `plan`?

Updates by Adam of Transformer blocks and of convolutions with batch norm, K = 1, 2 and 4, for three
recompute policies. The counters are those of the allocator of each logical device: chunks that it
has given out, which may be larger than what was asked for. On CPUs there are none, and the plan
stands alone.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import tensorflow as tf

from benchmarks.accelerator.question import MIB, Answers, Setting, attempt
from benchmarks.support import networks
from lingvo_gpipe import layers, optim, pipelining
from lingvo_gpipe.plan import step_plan

CASES = list(
    itertools.product(
        ("transformer", "convolution"), (1, 2, 4), ("full", "never", "recompute_grad")
    )
)
M = 8


def answers(setting: Setting) -> Answers:
    """Yield the bytes of each network, K and policy."""
    devices = setting.devices(4, memory_mib=24_000)  # of which tensors take what they need
    for kind, count, policy in setting.mine(CASES):
        found = attempt(measure, setting, kind, policy, devices[:count])
        yield f"{kind}, K={count}, {policy}", found


def network(setting: Setting, kind: str) -> tuple[list[layers.Layer.Params], list[int]]:
    """Return the layers of a kind of network, and the shape of its mini-batch."""
    count = setting.sized(3, 8)
    if kind == "transformer":
        units, heads, length = setting.sized((8, 2, 4), (1024, 16, 512))
        block = layers.TransformerLayer.Params(units=units, heads=heads, hidden=4 * units)
        return [block] * count, [2 * M, length, units]
    rows, side, filters = setting.sized((2, 8, 4), (16, 56, 64))
    convolution = layers.Conv2D.Params(filters=filters, use_bias=False)
    relu = layers.Activation.Params(activation="relu")
    return [convolution, layers.BatchNorm.Params(), relu] * count, [rows * M, side, side, filters]


def measure(setting: Setting, kind: str, policy: str, devices: list[str]) -> dict[str, Any]:
    """Return the MiB of each device: counted, and planned by formula and by traced programs."""
    blocks, shape = network(setting, kind)
    gc.collect()
    before = setting.counted_mib(devices, "current")
    with tf.device("CPU:0"):
        batch = {name: tf.random.stateless_normal(shape, [1, 2]) for name in ("x", "target")}
    model = pipelining.PipeliningLayer.Params(
        layers=[*blocks, layers.MeanSquaredError.Params()],
        num_partitions=len(devices),
        num_micro_batches=M,
        schedule="1f1b" if len(devices) > 1 else "gpipe",  # which recomputes at K=1, too
        recompute=policy,
        devices=tuple(devices),
    )
    updates = networks.learner_of(model, batch)
    # Cut as it is, not by measured times.
    params = updates.pipe.params.copy().set(cuts=updates.pipe.analysis.cuts)
    specs = {name: tf.TensorSpec.from_tensor(value) for name, value in batch.items()}
    adam = optim.Optimizer.Params(name="Adam", learning_rate=1e-4)
    plans = {
        name: step_plan.make(params, specs, optimizer_params=adam, profile=profile)
        for name, profile in (("formula", False), ("traced", True))
    }
    float(updates.update([batch]).loss)
    setting.reset_peaks(devices)
    loss = float(updates.update([batch]).loss)
    peaks = setting.counted_mib(devices)
    counted = [peak - held for peak, held in zip(peaks, before, strict=True)]
    found: dict[str, Any] = {"loss": loss, "counted": counted}
    for name, planned in plans.items():
        found[name] = [size / MIB for size in planned.device_bytes]
        if max(counted) > 0:
            found[f"{name} of counted"] = max(found[name]) / max(counted)
    return found
