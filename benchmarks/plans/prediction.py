"""How near is the step that `--mode=plan --profile` predicts to the step itself?

`python -m benchmarks.plans.prediction [--quick]`: the networks of `benchmarks.support` (K=2
devices of one thread each; M=32, AmoebaNet-D M=8) by fill-drain; by 1F1B, whose last cell runs
forward and backward as one program; and by ZB-H1, whose backwards are split. The first two
recompute, the last one keeps everything. Each is in a process of its own, which measures layers and
cells, predicts the step, and runs updates by Adam, in turn; the cuts are those of the network in
training. A ratio is the predicted time of the slots and of the update, divided by the median of the
updates before and after it, in which cutting the mini-batch is, too. In interleaved rounds; those
during which other processes took more than 0.06 cores do not count, unless all were like that.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.support import networks, processes

TURNS, STEPS = 3, 5
# schedule → recompute policy
SCHEDULES = {"gpipe": "full", "1f1b": "full", "zb_h1": "never"}
NAMES = tuple(f"{kind},{name}" for kind in networks.KINDS for name in SCHEDULES)


def measure(configuration: str) -> dict[str, float]:
    """Return median seconds of a step of `KIND,SCHEDULE`: predicted, measured, and their ratio."""
    import tensorflow as tf

    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import profiling, step_plan
    from lingvo_gpipe.run import learner

    placement.prepare_logical_cpus(networks.K)
    placement.prepare_threads(networks.K, networks.K)
    kind, schedule = configuration.split(",")
    task, batch = networks.task_of(kind)
    task.model.set(schedule=schedule, recompute=SCHEDULES[schedule])
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
    learned = learner.Learner(task, specs)
    network = task.model.copy().set(cuts=learned.pipe.analysis.cuts)

    def updates() -> float:
        seconds = []
        for _ in range(STEPS):
            begun_s = time.perf_counter()
            float(learned.update([batch]).loss)
            seconds.append(time.perf_counter() - begun_s)
        return statistics.median(seconds)

    updates()  # traces and warms up
    found = [updates()]
    predicted, ratios = [], []
    for _ in range(TURNS):
        plan = step_plan.make(network, specs, profile=True)
        update_s = profiling.update_s(task.train, network, plan.analysis)
        predicted.append(plan.step_s + (update_s or 0.0))
        found.append(updates())
        ratios.append(predicted[-1] / statistics.fmean(found[-2:]))
    return {
        "predicted_s": statistics.median(predicted),
        "measured_s": statistics.median(found),
        "ratio": statistics.median(ratios),
    }


def furthest(ratios: list[float]) -> float:
    """Return the ratio that is furthest from 1, above or below it.

    >>> furthest([1.05, 0.9, 1.1])
    0.9
    """
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def main() -> None:
    """Run every kind in processes of its own, and print a table."""
    from lingvo_gpipe.console import units

    options = processes.parser(__doc__).parse_args()
    found = processes.measured(options, "benchmarks.plans.prediction", NAMES, measure)
    print(f"medians of {TURNS} predictions and of {TURNS + 1} times {STEPS} steps")
    rows = [["", "predicted s", "measured s", "ratio", "spread"]]
    ratios = []
    for name in NAMES:
        runs = processes.quiet(found[name])
        ratios.append(processes.median(runs, "ratio"))
        rows.append(
            [
                name,
                f"{processes.median(runs, 'predicted_s'):.3f}",
                f"{processes.median(runs, 'measured_s'):.3f}",
                f"{ratios[-1]:.3f}",
                processes.spread(runs, "ratio"),
            ]
        )
    print("\n".join(units.table(rows, "lrrrr")))
    print(f"the ratio that is furthest from 1: {furthest(ratios):.2f}")


if __name__ == "__main__":
    main()
