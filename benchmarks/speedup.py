"""How much faster are two devices of one thread each than one, on the same calls?

`python -m benchmarks.speedup [--quick] [--only=KIND,...]`: K=2, fill-drain, cells of
`benchmarks.breakdown` (M=32; AmoebaNet-D M=8). "One" is a process with one thread that runs the
very same calls; "two" has two logical CPU devices and a thread for each. Rows are recompute
policies, and what `--schedule=auto` chooses by FLOPs without a limit of memory. The speedup is
compared with that of the simulated table, from times of the cells' programs on one thread: cells
are not equal, and their programs are not equally long. "Slower" is how much longer the same
programs take while both devices run them, which share memory and caches.

Then the last cell of 1F1B fused and not, twice the layers, each with the cut that suits it; and
what I and W take of a whole backward, by `benchmarks.parts.phases`. All in interleaved rounds.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks import breakdown
from benchmarks.support import machine, processes

ROUNDS, QUICK_ROUNDS = 3, 1
HALVES_ROUNDS = 9
AIM, AIM_HALVES = 0.97, 1.05
POLICIES = ("full", "never", "recompute_grad", "auto")


def task_of(kind: str, policy: str) -> tuple[Any, dict[str, Any]]:
    """Return the task of a kind of cells under a policy, and its mini-batch."""
    from lingvo_gpipe.plan import auto

    task, batch = breakdown.task_of(kind)
    if policy != "auto":
        task.model.recompute = policy
        return task, batch
    set_input(task, batch)
    task.model.schedule = "auto"
    return auto.resolved(task, lambda _: None), batch


def set_input(task: Any, batch: dict[str, Any]) -> None:
    """Set a mini-batch as the input of a task; `auto` reads its shapes."""
    import numpy as np
    import tensorflow as tf

    from lingvo_gpipe import input as inputs

    class Specs(inputs.InMemory):
        """The mini-batch's shapes."""

        def arrays(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
            return {"train": {name: value.numpy() for name, value in batch.items()}}

        def example_spec(self) -> dict[str, tf.TensorSpec]:
            return {name: tf.TensorSpec(v.shape[1:], v.dtype) for name, v in batch.items()}

    task.input = Specs.Params(batch_size=len(next(iter(batch.values()))))


def measure_step(kind: str, policy: str, devices: str) -> dict[str, Any]:
    """Return seconds of a step and of its programs, and the speedup of the simulated table."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import network
    from lingvo_gpipe.network.traffic import links
    from lingvo_gpipe.plan import slot_times
    from lingvo_gpipe.plan.measured import cell_times

    task, batch = task_of(kind, policy)
    cpus = [device.name for device in tf.config.list_logical_devices("CPU")]
    task.model.devices = (cpus[0], cpus[0] if devices == "one" else cpus[1])
    pipe = task.model.instantiate()
    found = {
        "s": blocks.seconds(lambda: float(pipe.value_and_gradients(batch).loss)),
        "schedule": task.model.schedule,
    }
    specs = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in batch.items()}
    analysis = network.analyze(task.model, specs)
    times = cell_times.on_devices(analysis, cpus[: 1 if devices == "one" else 2]).busy
    timeline = slot_times.timeline(analysis, links.Stream(analysis), times)
    found["programs"] = sum(timeline.busy_s)
    found["table"] = found["programs"] / timeline.makespan_s
    return found


def measure_fused(kind: str, fuse: bool) -> dict[str, Any]:
    """Return seconds of a step of 1F1B on two devices, and its cuts."""
    from benchmarks.support import blocks
    from lingvo_gpipe import pipelining

    layers, batch = blocks.network(kind, 2 * blocks.K)  # lighter layers: the cut is free to move
    pipe = pipelining.PipeliningLayer.Params(
        layers=layers,
        num_partitions=blocks.K,
        num_micro_batches=blocks.M,
        schedule="1f1b",
        fuse=fuse,
    ).instantiate()
    step_s = blocks.seconds(lambda: float(pipe.value_and_gradients(batch).loss))
    return {"s": step_s, "cuts": pipe.analysis.cuts}


def measure(configuration: str) -> dict[str, Any]:
    """Return the figures of `KIND,POLICY|fused|apart|halves,one|two`."""
    import tensorflow as tf

    from benchmarks.parts import phases
    from benchmarks.support import blocks
    from lingvo_gpipe.execution import placement

    kind, what, devices = configuration.split(",")
    placement.prepare_logical_cpus(blocks.K)
    tf.config.threading.set_inter_op_parallelism_threads(1 if devices == "one" else 2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if what == "halves":
        return phases.measure(kind, HALVES_ROUNDS)
    if what in ("fused", "apart"):
        return measure_fused(kind, what == "fused")
    return measure_step(kind, what, devices)


def configurations(kind: str) -> list[str]:
    """Return what `measure` is called with for a kind of cells."""
    names = [f"{kind},{policy},{devices}" for policy in POLICIES for devices in ("one", "two")]
    if kind != "amoebanet":
        names += [f"{kind},apart,two", f"{kind},fused,two"]
    return [*names, f"{kind},halves,one"]


def print_policies(kind: str, found: dict[str, list[Any]]) -> float:
    """Print a row for each policy, and return the least share of the table's speedup."""
    shares = []
    for policy in POLICIES:
        one = processes.quiet(found[f"{kind},{policy},one"])
        two = processes.quiet(found[f"{kind},{policy},two"])
        one_s, two_s = processes.median(one, "s"), processes.median(two, "s")
        table = processes.median(one, "table")
        shares.append(one_s / two_s / table)
        slower = processes.median(two, "programs") / processes.median(one, "programs")
        name = f"{policy}: {one[0]['schedule']}" if policy == "auto" else policy
        print(
            f"{kind:<12} {name:<20} {one_s:7.3f} {two_s:7.3f} {one_s / two_s:6.2f} {table:6.2f} "
            f"{shares[-1]:6.3f} {slower:7.2f}  {processes.spread(two, 's')}"
        )
    return min(shares)


def main() -> None:
    """Run every configuration in processes of their own and print tables."""
    parser = processes.parser(__doc__)
    parser.add_argument("--only", default=",".join(breakdown.KINDS), help="kinds between commas")
    options = parser.parse_args()
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    kinds = options.only.split(",")
    if unknown := sorted(set(kinds) - set(breakdown.KINDS)):
        parser.error(f"--only={unknown[0]}: the kinds are {', '.join(breakdown.KINDS)}")
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    names = [name for kind in kinds for name in configurations(kind)]
    found = processes.rounds("benchmarks.speedup", names, count)
    print(f"K=2, medians of {count} rounds; speedup of two devices over one, and by the table")
    print(
        f"{'cells':<12} {'policy':<20} {'one s':>7} {'two s':>7} {'ratio':>6} {'table':>6} "
        f"{'share':>6} {'slower':>7}  spread of two"
    )
    shares = [print_policies(kind, found) for kind in kinds]
    print("\n1F1B, two devices, twice the layers: the last cell's forward and backward")
    print(f"{'cells':<12} {'apart s':>8} {'cut':>9} {'fused s':>8} {'cut':>9} {'less':>6}")
    for kind in kinds:
        if kind == "amoebanet":
            continue
        apart, fused = (processes.quiet(found[f"{kind},{f},two"]) for f in ("apart", "fused"))
        gain = 1 - processes.median(fused, "s") / processes.median(apart, "s")
        print(
            f"{kind:<12} {processes.median(apart, 's'):8.3f} {apart[0]['cuts']!s:>9} "
            f"{processes.median(fused, 's'):8.3f} {fused[0]['cuts']!s:>9} {gain:6.1%}"
        )
    print(f"\n{'cells':<12} {'(I+W)/B':>8}  spread")
    halves = []
    for kind in kinds:
        runs = processes.quiet(found[f"{kind},halves,one"])
        halves.append(processes.median(runs, "(I+W)/B"))
        print(f"{kind:<12} {halves[-1]:8.3f}  {processes.spread(runs, '(I+W)/B')}")
    figure = f"{min(shares):.3f} of the table's, (I+W)/B {max(halves):.3f}"
    aim = f"at least {AIM}, at most {AIM_HALVES}"
    processes.conclude("speedup", figure, aim, found)


if __name__ == "__main__":
    main()
