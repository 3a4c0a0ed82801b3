"""How close does the executor come to its schedule's bound, when cells only wait?

`python -m benchmarks.bound`: K=8, M=32, and two schedules; see `benchmarks.waiting`.
"""

from __future__ import annotations

import json
import sys

ROUNDS = 5
K, M = 8, 32
PAIRS_MS = (20.0, 4.0)


def main() -> None:
    """Run every configuration in processes of their own and print a table."""
    if len(sys.argv) == 2:
        from benchmarks import waiting

        schedule, pair = sys.argv[1].split(",")
        print(json.dumps(waiting.measure(schedule, float(pair), K, M)))
        return
    from benchmarks import machine, processes

    print(machine.describe())
    print(f"K={K}, M={M}; waiting cells, each wait measured, medians of {ROUNDS} rounds")
    names = [f"{schedule},{pair}" for pair in PAIRS_MS for schedule in ("gpipe", "1f1b")]
    found = processes.rounds("benchmarks.bound", names, ROUNDS)
    print(f"{'pair ms':>8} {'schedule':<8} {'step s':>7} {'simulated s':>12} {'share':>6}  spread")
    for name in names:
        schedule, pair = name.split(",")
        runs = found[name]
        load = max(run["other_load"] for run in runs)
        print(
            f"{pair:>8} {schedule:<8} {processes.median(runs, 's'):7.3f} "
            f"{processes.median(runs, 'simulated_s'):12.3f} {processes.median(runs, 'share'):6.3f}"
            f"  {processes.spread(runs, 'share')}; other load {load:.2f}"
        )


if __name__ == "__main__":
    main()
