"""What do the checks of a step cost: range of labels and ids, the watchdog's progress, times?

`python -m benchmarks.parts.step_checks [--quick]`: K=2, M=32, two devices of one thread each, the
blocks of `benchmarks.speedup` with a softmax over 10 classes, each kind in a process of its own.
Four pipelines of the same network take a step in turn: without checks, with the range check, with
the watchdog, with the times of slots (`--profile_steps`). Differences are between steps of the same
turn.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

TURNS, QUICK_TURNS = 60, 10
CHECKS = ("range", "watchdog", "times")


def measure(kind: str, turns: int) -> dict[str, Any]:
    """Return seconds of a step without checks, and what each check adds, turn by turn."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
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

    def pipeline(check_values: bool) -> pipelining.PipeliningLayer:
        pipe: pipelining.PipeliningLayer = pipelining.PipeliningLayer.Params(
            layers=[*stack[:-1], *ends, head],
            num_partitions=blocks.K,
            num_micro_batches=blocks.M,
            schedule="1f1b",
            check_values=check_values,
        ).instantiate()
        pipe.build(batch)
        return pipe

    pipes = {name: pipeline(name == "range") for name in ("none", *CHECKS)}
    pipes["times"].executor.note_times()
    dog = watchdog.of_executor(pipes["watchdog"].executor, 600.0, print)
    times: dict[str, list[float]] = {name: [] for name in pipes}
    with dog:
        for turn in range(turns + 3):
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
    return times


def main() -> None:
    """Measure each kind in a process of its own, and print a table."""
    quick = "--quick" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--quick"]
    if arguments:
        kind, count = arguments[0].split(",")
        print(json.dumps(measure(kind, int(count))))
        return
    from benchmarks.support import blocks, machine, processes

    turns = QUICK_TURNS if quick else TURNS
    print(machine.describe())
    print(
        f"K={blocks.K}, M={blocks.M}, 1F1B; {turns} turns; quartiles of the difference in brackets"
    )
    found = processes.rounds(
        "benchmarks.parts.step_checks", [f"{k},{turns}" for k in blocks.KINDS], 1
    )
    heads = " ".join(f"{head:<28}" for head in ("range check", "watchdog", "times"))
    print(f"{'cells':<12} {'step s':>7}  {heads} other load")
    worst = 0.0
    for kind in blocks.KINDS:
        times = found[f"{kind},{turns}"][0]
        step_s = statistics.median(times["none"])
        texts = []
        for check in CHECKS:
            added = [a - b for a, b in zip(times[check], times["none"], strict=True)]
            low, middle, high = (s / step_s for s in statistics.quantiles(added, n=4))
            worst = max(worst, middle)
            texts.append(f"{middle:+6.2%} ({low:+6.2%}, {high:+6.2%})")
        shown = " ".join(f"{text:<28}" for text in texts)
        print(f"{kind:<12} {step_s:7.3f}  {shown} {times['other_load']:.2f}")
    print(f"largest median share of a step: {worst:.2%} (aim 1 %)")


if __name__ == "__main__":
    main()
