"""Does `model.jit_compile=auto` choose the cells that XLA makes faster?

`python -m benchmarks.parts.compiled_cells [--quick]`: K=2, two devices of one thread each, cells of
`benchmarks.breakdown`. In one process for each kind, cells are chosen by measured programs, then
steps without XLA, with all cells compiled and with the chosen ones take turns. "First" is the
first step of each, with tracing and compilation; "choice" how long the measurement took.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from benchmarks import breakdown, speedup
from benchmarks.support import machine, processes

TURNS, QUICK_TURNS = 15, 5
ROUNDS, QUICK_ROUNDS = 3, 1
WARM_UP = 2
AIM = 1.03
NAMES = ("none", "all", "auto")


def measure(kind: str, turns: int) -> dict[str, Any]:
    """Return seconds of a step by what is compiled, and what was chosen."""
    import tensorflow as tf

    from benchmarks.support import blocks
    from lingvo_gpipe.execution import placement
    from lingvo_gpipe.plan import auto

    placement.prepare_logical_cpus(blocks.K)
    placement.prepare_threads(blocks.K, 1)
    task, batch = breakdown.task_of(kind)
    speedup.set_input(task, batch)
    task.model.jit_compile = "auto"
    begun = time.perf_counter()
    chosen = auto.resolved(task, lambda _: None, profile=True).model.jit_compile
    found: dict[str, Any] = {"choice": time.perf_counter() - begun, "chosen": str(chosen)}
    pipes = {}
    for name, jit in zip(NAMES, (False, True, chosen), strict=True):
        pipes[name] = task.model.copy().set(jit_compile=jit).instantiate()
        begun = time.perf_counter()
        float(pipes[name].value_and_gradients(batch).loss)
        found[f"first {name}"] = time.perf_counter() - begun
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(turns + WARM_UP):
        for name in NAMES[turn % 3 :] + NAMES[: turn % 3]:
            begun = time.perf_counter()
            tf.nest.map_structure(
                lambda tensor: tensor.numpy(), pipes[name].value_and_gradients(batch).losses
            )
            times[name].append(time.perf_counter() - begun)
    return found | {name: statistics.median(s[WARM_UP:]) for name, s in times.items()}


def main() -> None:
    """Measure each kind in processes of its own, and print a table."""
    parser = processes.parser(__doc__)
    options = parser.parse_args()
    if options.configuration:
        kind, turns = options.configuration.split(",")
        print(json.dumps(measure(kind, int(turns))))
        return
    turns = QUICK_TURNS if options.quick else TURNS
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    names = [f"{kind},{turns}" for kind in breakdown.KINDS]
    found = processes.rounds("benchmarks.parts.compiled_cells", names, count)
    print(f"medians of {count} rounds of {turns} turns; steps in s")
    print(
        f"{'cells':<12} {'none':>7} {'all':>7} {'auto':>7} {'all':>6} {'auto':>6}  "
        f"{'chosen':<15} {'choice s':>8} {'first s: none, all':>20}  spread of auto"
    )
    worst = 0.0
    for kind, name in zip(breakdown.KINDS, names, strict=True):
        runs = processes.quiet(found[name])
        none, every, auto = (processes.median(runs, each) for each in NAMES)
        # What all or none of the cells compiled would have been at best.
        worst = max(worst, auto / min(none, every))
        chosen = " ".join(sorted({run["chosen"] for run in runs}))
        firsts = ", ".join(f"{processes.median(runs, f'first {each}'):.1f}" for each in NAMES[:2])
        print(
            f"{kind:<12} {none:7.3f} {every:7.3f} {auto:7.3f} {every / none:6.2f} "
            f"{auto / none:6.2f}  {chosen:<15} {processes.median(runs, 'choice'):8.1f} "
            f"{firsts:>20}  {processes.spread(runs, 'auto')}"
        )
    figure = f"auto takes at most {worst:.2f} of the better of none and all"
    processes.conclude("compiled_cells", figure, f"at most {AIM}", found)


if __name__ == "__main__":
    main()
