"""What do more replicas of the pipeline cost, and what do they save?

`python -m benchmarks.scaling [--quick]`:

- Cells that only wait, K=8, eight micro-batches for each of R replicas: the step against the
  simulated table, which is the same for every R.
- Seconds until the first step is done, K=2, eight micro-batches for each replica: they should grow
  as the number of calls does.
- Bytes of weights and of optimizer state on the device that has most, K=2: with R replicas an R-th.

`python -m benchmarks.scaling memory`: bytes of the tensors that each of R x K worker processes has
at most, against the plan, for 24 dense layers of 2,048 units with Adam. Beside them its resident
memory, which also has what the allocator does not use.

`python -m benchmarks.scaling paper` runs nothing: the plan of R replicas of K=8, for R of 1 to 512,
on hosts of eight devices with bandwidths of clusters that there are. A replica has as much to do
for every R, so what a step takes longer than that of R=1 is for replicas.
"""

from __future__ import annotations

import collections
import json
import os
import time
from typing import Any

from benchmarks.support import machine, processes

ROUNDS, QUICK_ROUNDS = 3, 1
AIM = 0.97
REPLICAS = (1, 2, 4)
PER_REPLICA = 8
SHAPES = ("1x1", "1x2", "2x1", "2x2")  # R x K of worker processes
WIDTH = 2048  # of their layers
PAIR_MS = 20.0
MODEL = "lm.transformer.L103"
# A host of eight A100 with NVLink (half of 312 TFLOP/s) and eight links of 200 Gbit/s; or with one
# link of 100 Gbit/s.
CLUSTERS = ("within=300GB,between=200GB,flops=156T", "within=300GB,between=12.5GB,flops=156T")


def built(num_replicas: int) -> dict[str, float]:
    """Return seconds until the first step is done, and bytes of weights and state by device."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement

    num_devices = 2 * num_replicas
    placement.prepare_logical_cpus(num_devices)
    placement.prepare_threads(num_devices, os.cpu_count() or 1)
    num_micro_batches = PER_REPLICA * num_replicas
    x = tf.ones([num_micro_batches, 64])
    batch = {"x": x, "target": tf.zeros_like(x)}
    start = time.perf_counter()
    pipe = pipelining.PipeliningLayer.Params(
        layers=[
            *(layers.Dense.Params(units=64, activation="tanh") for _ in range(32)),
            layers.MeanSquaredError.Params(),
        ],
        num_partitions=2,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
    ).instantiate()
    pipe.build(batch)
    updater = blocks.updater(pipe)

    @tf.function(autograph=False)
    def step(batch: Any, number: tf.Tensor) -> tf.Tensor:
        result = pipe.value_and_gradients(batch, step=number)
        updater.apply(result.gradients, step=number)
        return result.loss

    number = tf.constant(0, tf.int64)
    float(step(batch, number))
    first_s = time.perf_counter() - start
    found: dict[str, float] = {"first_s": first_s}
    for kind, held in (("weights", pipe.weights), ("state", updater.slots)):
        size: collections.Counter[str] = collections.Counter()
        for variable in held.values():
            size[variable.device] += variable.shape.num_elements() * variable.dtype.size
        found[kind] = max(size.values())
    return found


def measure(configuration: str) -> dict[str, Any]:
    """Return the figures of `what,R`, or of `held,RxK` and units of the layers."""
    what, replicas, *units = configuration.split(",")
    if what == "held":
        from benchmarks.support import held_memory

        return held_memory.measure(*map(int, replicas.split("x")), *map(int, units))
    if what == "built":
        return built(int(replicas))
    from benchmarks.support import waiting

    return waiting.measure(
        "1f1b", PAIR_MS, 8, PER_REPLICA * int(replicas), num_replicas=int(replicas)
    )


def paper() -> None:
    """Print the plans of many replicas."""
    from lingvo_gpipe.params.lm import transformer
    from lingvo_gpipe.plan import hosts, step_plan

    for cluster in CLUSTERS:
        print(f"{MODEL}, mixed_bfloat16, K=8, 32 micro-batches of 2 a replica; {cluster}")
        print(f"{'R':>4} {'step s':>7} {'for replicas':>13} {'GiB a device':>13}  placed")
        alone_s = None
        for replicas in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            task = transformer.L103().task()
            task.model.set(
                num_partitions=8,
                num_micro_batches=32 * replicas,
                num_replicas=replicas,
                dtype="mixed_bfloat16",
                schedule="1f1b",
                max_build_s=1e6,
            )
            task.input.batch_size = 64 * replicas
            plan = step_plan.make_for(task, cluster=hosts.parse(f"{replicas}x8,{cluster}"))
            alone_s = alone_s or plan.step_s
            order, share = "", 1.0 - alone_s / plan.step_s
            if plan.order is not None and plan.order.busiest is not None:
                by_cell = plan.order.busiest.chooses_cell_by_cell
                order = "cell by cell" if by_cell else "replica by replica"
            print(
                f"{replicas:>4} {plan.step_s:7.3f} {100 * share:11.1f} % "
                f"{plan.heaviest_bytes / 2**30:13.1f}  {order}",
                flush=True,
            )


def memory() -> None:
    """Print what workers hold, and what their plan has for them."""
    print(machine.describe())
    names = [f"held,{shape},{WIDTH}" for shape in SHAPES]
    found = processes.rounds("benchmarks.scaling", names, 1)
    print("MiB; of 24 dense layers of 2,048 units, Adam, 1f1b, 8 micro-batches of 64 a replica")
    print(
        f"{'R x K':>6} {'worker':>7} {'planned':>8} {'tensors':>8} {'/ planned':>10} "
        f"{'resident':>9} {'/ planned':>10} {'received':>9}"
    )
    shares = []
    figures = ("planned", "tensors", "resident", "received")
    for shape, (run,) in zip(SHAPES, found.values(), strict=True):
        each = zip(*(run[figure] for figure in figures), strict=True)
        for worker, (planned, tensors, resident, received) in enumerate(each):
            shares.append(tensors / planned)
            print(
                f"{shape:>6} {worker:>7} {planned / 2**20:8.0f} {tensors / 2**20:8.0f} "
                f"{shares[-1]:10.3f} {resident / 2**20:9.0f} {resident / planned:10.3f} "
                f"{received / 2**20:9.0f}"
            )
    figure = f"tensors are {min(shares):.3f} to {max(shares):.3f} of the plan"
    processes.conclude("scaling memory", figure, "0.9 to 1.1", found)


def main() -> None:
    """Run every configuration in processes of their own and print tables."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration in ("paper", "memory"):
        {"paper": paper, "memory": memory}[options.configuration]()
        return
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    names = [f"{what},{replicas}" for what in ("waiting", "built") for replicas in REPLICAS]
    found = processes.rounds("benchmarks.scaling", names, count)
    print(f"waiting cells, K=8, M={PER_REPLICA} R, medians of {count} rounds")
    print(f"{'R':>2} {'step s':>7} {'simulated s':>12} {'share':>6}  spread")
    shares = []
    for replicas in REPLICAS:
        runs = processes.quiet(found[f"waiting,{replicas}"])
        shares.append(processes.median(runs, "share"))
        print(
            f"{replicas:>2} {processes.median(runs, 's'):7.3f} "
            f"{processes.median(runs, 'simulated_s'):12.3f} {shares[-1]:6.3f}"
            f"  {processes.spread(runs, 'share')}"
        )
    print(f"32 layers, K=2, M={PER_REPLICA} R")
    print(f"{'R':>2} {'first step s':>13} {'weights':>9} {'state':>9}  bytes on the fullest device")
    for replicas in REPLICAS:
        runs = processes.quiet(found[f"built,{replicas}"])
        print(
            f"{replicas:>2} {processes.median(runs, 'first_s'):13.2f} "
            f"{processes.median(runs, 'weights'):9,.0f} {processes.median(runs, 'state'):9,.0f}"
            f"  {processes.spread(runs, 'first_s')}"
        )
    aim = f"at least {AIM} of the simulated table"
    processes.conclude("scaling", f"{min(shares):.3f}", aim, found)


if __name__ == "__main__":
    main()
