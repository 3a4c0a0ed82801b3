"""How accurate is the plan's memory, compared with that of a real step?

`python -m benchmarks.plans.activations [--quick]`: the most bytes that tensors request at once in a
step (by the profiler's events), less those held before its mini-batch was made, beside those of
`--mode=plan --profile`: activations, gradients and copies of weights. Further columns: what the CPU
allocator holds, whose blocks are larger than requested, and what is resident. Each point is a
process of its own. Logical CPU devices share one allocator, so that all of them are compared
together: at K=2 the plan is an upper bound, since two devices need not be at their peaks at one
moment.

`python -m benchmarks.plans.activations gelu,never,1` measures one point.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.support import processes

M = 4
MIB = 2**20
KINDS = ("dense", "wide", "gelu", "convolution", "transformer")
POLICIES = {  # text → schedule, recompute, fuse
    "full": ("gpipe", "full", False),
    "fused": ("1f1b", "full", True),
    "never": ("gpipe", "never", False),
    "except_last": ("gpipe", "except_last", False),
}
POINTS = [f"{kind},{policy},{k}" for kind in KINDS for policy in POLICIES for k in (1, 2)]


def network(kind: str) -> tuple[list[Any], list[int]]:
    """Return (layers, shape of the mini-batch's x, which is the target's too)."""
    from lingvo_gpipe import layers

    block: list[Any]
    if kind == "dense":
        block = [layers.Dense.Params(units=512, activation="relu")]
        return block * 8, [32768, 512]
    if kind == "wide":  # weights of 16 MiB each, activations of 4
        block = [layers.Dense.Params(units=2048, activation="relu")]
        return block * 8, [2048, 2048]
    if kind == "gelu":
        block = [layers.Dense.Params(units=512, activation="gelu")]
        return [layers.Residual.Params(body=block)] * 8, [32768, 512]
    if kind == "transformer":
        block = [layers.TransformerLayer.Params(units=256, heads=4, hidden=1024)]
        return block * 4, [128, 128, 256]
    block = [
        layers.Conv2D.Params(filters=32, use_bias=False),
        layers.BatchNorm.Params(),
        layers.Activation.Params(activation="relu"),
    ]
    return block * 6, [128, 64, 64, 32]


def measure(point: str) -> dict[str, Any]:
    """Return the bytes of a step, measured and planned, of `kind,policy,K`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, policy, partitions = point.split(",")
    schedule, recompute, fuse = POLICIES[policy]
    import tensorflow as tf

    from benchmarks import memory
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import step_plan

    placement.prepare_logical_cpus(int(partitions))
    blocks, shape = network(kind)
    params = pipelining.PipeliningLayer.Params(
        layers=[*blocks, layers.MeanSquaredError.Params()],
        num_partitions=int(partitions),
        num_micro_batches=M,
        schedule=schedule,
        recompute=recompute,
        fuse=fuse,
    )
    fields = {name: tf.TensorSpec(shape) for name in ("x", "target")}
    pipe = params.instantiate()
    pipe.build(fields)
    held, resident = held_bytes("current"), memory.status("VmRSS")
    batch = {name: tf.random.stateless_normal(shape, [1, 2]) for name in fields}

    def step() -> None:
        float(pipe.value_and_gradients(batch).loss)

    step()
    before = held_bytes("current") - held
    tf.config.experimental.reset_memory_stats("CPU:0")
    tensors = traced_peak_bytes(step)
    return {
        "mib": (before + tensors) / MIB,
        "allocator_mib": (held_bytes("peak") - held) / MIB,
        "resident_mib": (memory.status("VmHWM") - resident) / MIB,
        "planned_mib": step_plan.make(params, fields, profile=True).step_bytes / MIB,
    }


def traced_peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes that tensors of a step request at once, by the profiler's events."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    space = xplane_pb2.XSpace()
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options):
            step()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space.ParseFromString(file.read_bytes())
    changes = []
    for plane in space.planes:
        kinds = {number: meta.name for number, meta in plane.event_metadata.items()}
        names = {number: meta.name for number, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(
                    kinds[event.metadata_id]
                )
                if sign is not None:
                    stats = {names[stat.metadata_id]: stat.int64_value for stat in event.stats}
                    when = line.timestamp_ns * 1000 + event.offset_ps
                    changes.append((when, sign * stats["requested_bytes"]))
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def held_bytes(figure: str) -> int:
    """Return the bytes of all CPU tensors, `current` or at their `peak` since the last reset."""
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("CPU:0")[figure])


def main() -> None:
    """Run every point in processes of their own and print a table."""
    options = processes.parser(__doc__).parse_args()
    found = processes.measured(options, "benchmarks.plans.activations", POINTS, measure)
    print(
        f"{'':<26} {'planned MiB':>11} {'measured':>9} {'ratio':>6} {'allocator':>9} "
        f"{'resident':>8}  spread"
    )
    alone = []
    for name in POINTS:
        runs = found[name]
        keys = "planned_mib", "mib", "allocator_mib", "resident_mib"
        planned, measured, allocator, resident = (processes.median(runs, key) for key in keys)
        if name.endswith(",1"):
            alone.append(planned / measured)
        print(
            f"{name:<26} {planned:11.0f} {measured:9.0f} {planned / measured:6.2f} "
            f"{allocator:9.0f} {resident:8.0f}  {processes.spread(runs, 'mib')}"
        )
    print(f"{min(alone):.2f} to {max(alone):.2f} of the measured bytes at K=1")


if __name__ == "__main__":
    main()
