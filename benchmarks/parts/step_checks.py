"""What do the checks of a step cost: range of labels and ids, the watchdog's progress, times?

`python -m benchmarks.parts.step_checks [--quick]`: K=2, M=32, two devices of one thread each, the
blocks of `benchmarks.speedup` with a softmax over 10 classes. In a process, four pipelines of the
same network take a step in turn: without checks, with the range check, with the watchdog, with the
times of slots (`--profile_steps`). Differences are between steps of the same turn. Two pipelines
without checks differ, too, by where their tensors lie in memory; a fifth one shows by how much. So
each kind is measured in several processes, and a figure is the median of theirs.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from benchmarks.support import machine, processes

TURNS = 12
ROUNDS, QUICK_ROUNDS = 7, 1
CHECKS = ("again", "range", "watchdog", "times")
AIM = 0.01


def measure(kind: str) -> dict[str, Any]:
    """Return seconds of a step without checks, and the share that each check adds to it."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe import layers, pipelining
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.execution.monitoring import watchdog

    placement.prepare_logical_cpus(blocks.K)
    placement.prepare_threads(blocks.K, blocks.K)
    stack, batch = blocks.network(kind)
    rows = batch["x"].shape[:2] if kind == "transformer" else batch["x"].shape[:1]
    head: layers.Layer.Params = layers.Softmax.Params(classes=10)
    if kind == "transformer":
        head = layers.SequenceSoftmax.Params(vocabulary=10)
    ends = [layers.Flatten.Params()] if kind == "convolution" else []
    batch = {"x": batch["x"], "label": tf.zeros(rows, tf.int32)}

    def pipeline(*, check_values: bool) -> pipelining.PipeliningLayer:
        pipe: pipelining.PipeliningLayer = pipelining.PipeliningLayer.Params(
            layers=[*stack[:-1], *ends, head],
            num_partitions=blocks.K,
            num_micro_batches=blocks.M,
            schedule="1f1b",
            check_values=check_values,
        ).instantiate()
        pipe.build(batch)
        return pipe

    pipes = {name: pipeline(check_values=name == "range") for name in ("none", *CHECKS)}
    pipes["times"].executor.note_times()
    dog = watchdog.of_executor(pipes["watchdog"].executor, 600.0, print)
    times: dict[str, list[float]] = {name: [] for name in pipes}
    with dog:
        for turn in range(TURNS + 3):
            names = list(pipes)[turn % len(pipes) :] + list(pipes)[: turn % len(pipes)]
            for name in names:
                begun = time.perf_counter()
                if name == "watchdog":
                    with dog.watching("step"):
                        float(pipes[name].value_and_gradients(batch).loss)
                else:
                    float(pipes[name].value_and_gradients(batch).loss)
                if turn > 2:
                    times[name].append(time.perf_counter() - begun)
    step_s = statistics.median(times["none"])
    added = {
        name: statistics.median(a - b for a, b in zip(times[name], times["none"], strict=True))
        for name in CHECKS
    }
    return {"s": step_s, **{name: seconds / step_s for name, seconds in added.items()}}


def main() -> None:
    """Measure each kind in processes of its own, and print a table."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    from benchmarks.support import blocks

    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    found = processes.rounds("benchmarks.parts.step_checks", blocks.KINDS, count)
    print(
        f"K={blocks.K}, M={blocks.M}, 1F1B; medians of {count} processes of {TURNS} turns; least "
        "and most in brackets"
    )
    heads = ("no check, again", "range check", "watchdog", "times")
    print(f"{'cells':<12} {'step s':>7}  " + " ".join(f"{head:<25}" for head in heads))
    of_times = []
    for kind in blocks.KINDS:
        runs = processes.quiet(found[kind])
        texts = []
        for check in CHECKS:
            shares = [run[check] for run in runs]
            middle = statistics.median(shares)
            texts.append(f"{middle:+.2%} ({min(shares):+.2%}, {max(shares):+.2%})")
        of_times.append(processes.median(runs, "times"))
        shown = " ".join(f"{text:<25}" for text in texts)
        print(f"{kind:<12} {processes.median(runs, 's'):7.3f}  {shown}")
    figure = f"times of slots {max(of_times):.2%}"
    processes.conclude("step_checks", figure, f"at most {AIM:.0%}", found)


if __name__ == "__main__":
    main()
