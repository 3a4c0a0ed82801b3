"""What do the checks of a step cost: range of labels and ids, the watchdog's progress, times?

`python -m benchmarks.parts.step_checks [--quick]`: K=2, M=32, two devices of one thread each, the
blocks of `benchmarks.speedup` with a softmax over 10 classes. In a process, four pipelines of the
same network take a step in turn: without checks, with the range check, with the watchdog, with the
times of slots (`--profile_steps`). Differences are between steps of the same turn. Two pipelines
without checks differ, too, by where their tensors lie in memory; a fifth one shows by how much. So
each kind is measured in several processes, and a figure is the median of theirs.

What watchdog and times compute for a slot does not depend on how long it takes. So the same is
measured with cells of microseconds, whose steps have as many slots: what these two add there, as a
share of the other kinds' steps, is seen where differences of those steps are not. (The range check
reads the labels of a step: 32 there, 2,048, 8,192 and 128 in the others.)
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support import machine, processes

TURNS = {"small": 400}
"""Turns of a process; 12 where it does not say."""
WIDTH = 8
"""Features of the cells of microseconds."""
ROUNDS, QUICK_ROUNDS = 3, 1
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
    if kind == "small":
        layer = layers.Dense.Params(units=WIDTH, activation="relu")
        stack = [*[layer] * 2 * blocks.K, layers.MeanSquaredError.Params()]
        batch = {"x": tf.random.stateless_normal([blocks.M, WIDTH], [1, 2])}
    else:
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
        for turn in range(TURNS.get(kind, 12) + 3):
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
    kinds = (*blocks.KINDS, "small")
    found = processes.rounds("benchmarks.parts.step_checks", kinds, count)
    runs = {kind: processes.quiet(found[kind]) for kind in kinds}
    step_s = {kind: processes.median(runs[kind], "s") for kind in kinds}
    print(
        f"K={blocks.K}, M={blocks.M}, 1F1B; medians of {count} processes; least and most in "
        "brackets"
    )
    heads = ("no check, again", "range check", "watchdog", "times")
    print(f"{'cells':<12} {'step ms':>7}  " + " ".join(f"{head:<25}" for head in heads))
    for kind in blocks.KINDS:
        texts = [_median(runs[kind], check, "+.2%") for check in CHECKS]
        print(_row(kind, step_s[kind], texts))
    for run in runs["small"]:
        run.update({check: 1e6 * run["s"] * run[check] for check in CHECKS})
    texts = [_median(runs["small"], check, "+.0f") + " µs" for check in CHECKS]
    print(_row("small", step_s["small"], texts))
    print("what they add to steps of small cells, as a share of the others' steps:")
    shares = {
        kind: {
            check: 1e-6 * processes.median(runs["small"], check) / step_s[kind] for check in CHECKS
        }
        for kind in blocks.KINDS
    }
    for kind, of_kind in shares.items():
        print(_row(kind, step_s[kind], [f"{of_kind[check]:+.2%}" for check in CHECKS]))
    worst = max(of_kind["times"] for of_kind in shares.values())
    processes.conclude(
        "step_checks", f"times of slots add {worst:.2%}", f"at most {AIM:.0%}", found
    )


def _median(runs: Sequence[Any], check: str, form: str) -> str:
    """Return a figure's median, least and most as text."""
    values = [run[check] for run in runs]
    return f"{statistics.median(values):{form}} ({min(values):{form}}, {max(values):{form}})"


def _row(kind: str, step_s: float, texts: Sequence[str]) -> str:
    return f"{kind:<12} {1e3 * step_s:7.1f}  " + " ".join(f"{text:<25}" for text in texts)


if __name__ == "__main__":
    main()
