"""How much faster are two devices of one thread each than one device, on the same calls?

`python -m benchmarks.speedup [--quick] [--only=KIND,...]`: K=2, the networks of
`benchmarks.support.networks`. "One" is a process with one thread that runs the very same calls on
one device; "two" has two logical CPU devices and a thread for each. Rows are schedules with a
recompute policy, and what `--schedule=auto` chooses by FLOPs without a limit of memory. "Plan" is
the speedup of the simulated step by FLOPs: what fill, drain and unequal cells leave.

In the column "one s", `zb_h1 never` over `gpipe never` is what splitting every backward into the
gradients of inputs and of weights costs.
"""

from __future__ import annotations

from typing import Any

from benchmarks.support import networks, processes

CHOICES = ("gpipe full", "gpipe never", "gpipe recompute_grad", "1f1b full", "zb_h1 never", "auto")


def measure(configuration: str) -> dict[str, Any]:
    """Return seconds of a step of `KIND,CHOICE,one|two`, and the planned speedup."""
    import tensorflow as tf

    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import auto, step_plan

    kind, choice, devices = configuration.split(",")
    placement.prepare_logical_cpus(networks.K)
    tf.config.threading.set_inter_op_parallelism_threads(1 if devices == "one" else 2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    task, batch = networks.task_of(kind)
    if choice == "auto":
        task.model.schedule = "auto"
        task = auto.resolved(task, lambda _: None)
    else:
        task.model.schedule, task.model.recompute = choice.split()
    cpus = [device.name for device in tf.config.list_logical_devices("CPU")]
    task.model.devices = (cpus[0], cpus[0] if devices == "one" else cpus[1])
    pipe = task.model.instantiate()
    step_s = networks.step_s(lambda: float(pipe.value_and_gradients(batch).loss))
    specs = {name: tf.TensorSpec.from_tensor(value) for name, value in batch.items()}
    timeline = step_plan.make(task.model, specs).timeline
    return {
        "s": step_s,
        "planned": sum(timeline.busy_s) / timeline.makespan_s,
        "chosen": f"{task.model.schedule} {task.model.recompute}",
    }


def main() -> None:
    """Measure every choice and print a table."""
    options = processes.rounds_parser(__doc__, networks.KINDS).parse_args()
    names = [f"{kind},{choice}" for kind in options.only for choice in CHOICES]
    both = [f"{name},{devices}" for name in names for devices in ("one", "two")]
    runs = processes.measured(options, "benchmarks.speedup", both, measure)
    print(f"{'network':<12} {'schedule':<22} {'one s':>7} {'two s':>7} {'ratio':>6} {'plan':>6}")
    for name in names:
        kind, choice = name.split(",")
        two = runs[f"{name},two"]
        shown = f"auto: {two[0]['chosen']}" if choice == "auto" else choice
        one_s, two_s = processes.median(runs[f"{name},one"], "s"), processes.median(two, "s")
        print(
            f"{kind:<12} {shown:<22} {one_s:7.3f} {two_s:7.3f} {one_s / two_s:6.2f} "
            f"{processes.median(two, 'planned'):6.2f}  {processes.spread(two, 's')}"
        )


if __name__ == "__main__":
    main()
