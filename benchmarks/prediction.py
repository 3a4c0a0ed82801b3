"""How near are the time and the memory of a step that `--mode=plan --profile` predicts?

`python -m benchmarks.prediction [--quick]` prints two tables, predicted and measured.

Time: the networks of `benchmarks.support` (K=2 devices of one thread each; M=32, AmoebaNet-D M=8)
by fill-drain; by 1F1B, whose last cell runs forward and backward as one program; and by ZB-H1,
whose backwards are split. Each process predicts the step and runs updates by Adam, in turn; a ratio
is the predicted time of slots and update, divided by the median of the updates before and after.

Memory: the most bytes that tensors request at once in a step (by the profiler's events), less those
held before its mini-batch was made, beside activations, gradients and copies of weights as planned.
Further columns: what the allocator holds, and what is resident. Logical CPU devices share one
allocator: with several the plan is an upper bound, since they need not be at their peaks at once.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.support import networks, processes

TURNS = 3
MIB = 2**20
SCHEDULES = {"gpipe": "full", "1f1b": "full", "zb_h1": "never"}  # → recompute policy
TIMES = [f"time,{kind},{name}" for kind in networks.KINDS for name in SCHEDULES]
POLICIES = {  # → schedule, recompute, fuse
    "full": ("gpipe", "full", False),
    "fused": ("1f1b", "full", True),
    "never": ("gpipe", "never", False),
    "except_last": ("gpipe", "except_last", False),
}
KINDS = ("dense", "wide", "gelu", "convolution", "transformer")
# → K and M; the last four show what recomputation and 1F1B save.
BYTES = [
    *(f"memory,{kind},{policy},{k},4" for kind in KINDS for policy in POLICIES for k in (1, 2)),
    *(f"memory,gelu,{row}" for row in ("full,4,8", "never,4,8", "full,4,16", "fused,4,16")),
]


def measure(configuration: str) -> dict[str, float]:
    """Return what is predicted and measured of one row."""
    table, *row = configuration.split(",")
    return step_time(*row) if table == "time" else step_memory(*row)


def step_time(kind: str, schedule: str) -> dict[str, float]:
    """Return median seconds of a step: predicted, measured, and their ratio."""
    import tensorflow as tf

    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import profiling, step_plan
    from lingvo_gpipe.run import learner

    placement.prepare_logical_cpus(networks.K)
    placement.prepare_threads(networks.K, networks.K)
    task, batch = networks.task_of(kind)
    task.model.set(schedule=schedule, recompute=SCHEDULES[schedule])
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
    learned = learner.Learner(task, specs)
    network = task.model.copy().set(cuts=learned.pipe.analysis.cuts)

    def updates() -> float:
        return networks.step_s(lambda: float(learned.update([batch]).loss))

    measured, predicted, ratios = [updates()], [], []
    for _ in range(TURNS):
        plan = step_plan.make(network, specs, profile=True)
        update_s = profiling.update_s(task.train, network, plan.analysis)
        predicted.append(plan.step_s + (update_s or 0.0))
        measured.append(updates())
        ratios.append(predicted[-1] / statistics.fmean(measured[-2:]))
    return {
        "predicted": statistics.median(predicted),
        "measured": statistics.median(measured),
        "ratio": statistics.median(ratios),
    }


def network_of(kind: str) -> tuple[list[Any], list[int]]:
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


def step_memory(kind: str, policy: str, partitions: str, micro_batches: str) -> dict[str, float]:
    """Return MiB of a step, measured and planned."""
    import tensorflow as tf

    from benchmarks.support import tensor_bytes
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import step_plan

    placement.prepare_logical_cpus(int(partitions))
    blocks, shape = network_of(kind)
    schedule, recompute, fuse = POLICIES[policy]
    params = pipelining.PipeliningLayer.Params(
        layers=[*blocks, layers.MeanSquaredError.Params()],
        num_partitions=int(partitions),
        num_micro_batches=int(micro_batches),
        schedule=schedule,
        recompute=recompute,
        fuse=fuse,
    )
    fields = {name: tf.TensorSpec(shape) for name in ("x", "target")}
    pipe = params.instantiate()
    pipe.build(fields)
    held, resident = tensor_bytes.allocated("current"), tensor_bytes.resident("VmRSS")
    batch = {name: tf.random.stateless_normal(shape, [1, 2]) for name in fields}

    def step() -> float:
        return float(pipe.value_and_gradients(batch).loss)

    step()
    before = tensor_bytes.allocated("current") - held
    tf.config.experimental.reset_memory_stats("CPU:0")
    measured = (before + tensor_bytes.peak(step)) / MIB
    predicted = step_plan.make(params, fields, profile=True).step_bytes / MIB
    return {
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted / measured,
        "allocator": (tensor_bytes.allocated("peak") - held) / MIB,
        "resident": (tensor_bytes.resident("VmHWM") - resident) / MIB,
    }


def main() -> None:
    """Run every row in processes of its own, and print two tables."""
    from lingvo_gpipe.console import units

    options = processes.rounds_parser(__doc__).parse_args()
    found = processes.measured(options, "benchmarks.prediction", TIMES + BYTES, measure)
    for title, names, digits in (("seconds", TIMES, 3), ("MiB", BYTES, 0)):
        columns = list(found[names[0]][0].keys() - {"other_load"})
        columns.sort(key=["predicted", "measured", "ratio", "allocator", "resident"].index)
        rows = [[title, *columns, "spread of the ratio"]]
        for name in names:
            figures = {key: processes.median(found[name], key) for key in columns}
            shown = [f"{v:.{2 if key == 'ratio' else digits}f}" for key, v in figures.items()]
            rows.append([name, *shown, processes.spread(found[name], "ratio")])
        print("\n".join(["", *units.table(rows, "l" + "r" * (len(rows[0]) - 1))]))
    apart = TIMES + [name for name in BYTES if name.split(",")[3] == "1"]
    ratios = [processes.median(found[name], "ratio") for name in apart]
    print(f"\nratios of {min(ratios):.2f} to {max(ratios):.2f}, MiB of several devices not counted")


if __name__ == "__main__":
    main()
