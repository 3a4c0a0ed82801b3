"""How close does the executor come to its schedule's bound, when cells only wait?

`python -m benchmarks.bound [--quick]`: K=8, M=32; see `benchmarks.support.waiting`. Schedules of
several cells per device have two, each of which waits half as long.
"""

from __future__ import annotations

import json
import sys

from lingvo_gpipe import schedule

ROUNDS, QUICK_ROUNDS = 5, 1
K, M = 8, 32
PAIRS_MS = (20.0, 4.0)
AIM = 0.97
NAMES = tuple(name for name in schedule.SCHEDULES if name != "optimal")  # it is for small tables


def measure(configuration: str) -> dict[str, float]:
    """Return the figures of `SCHEDULE,MS`."""
    from benchmarks.support import waiting

    name, pair_ms = configuration.split(",")
    cells = schedule.SCHEDULES[name].cells_per_device
    return waiting.measure(name, float(pair_ms), K, M, cells_per_device=cells)


def main() -> None:
    """Run every configuration in processes of their own and print a table."""
    quick = sys.argv[1:] == ["--quick"]
    if len(sys.argv) == 2 and not quick:
        print(json.dumps(measure(sys.argv[1])))
        return
    from benchmarks.support import machine, processes

    count = QUICK_ROUNDS if quick else ROUNDS
    print(machine.describe())
    print(f"K={K}, M={M}; waiting cells, each wait measured, medians of {count} rounds")
    names = [f"{name},{pair}" for pair in PAIRS_MS for name in NAMES]
    found = processes.rounds("benchmarks.bound", names, count)
    print(f"{'pair ms':>8} {'schedule':<11} {'step s':>7} {'simulated s':>12} {'share':>6}  spread")
    for name in names:
        chosen, pair = name.split(",")
        runs = found[name]
        load = max(run["other_load"] for run in runs)
        print(
            f"{pair:>8} {chosen:<11} {processes.median(runs, 's'):7.3f} "
            f"{processes.median(runs, 'simulated_s'):12.3f} {processes.median(runs, 'share'):6.3f}"
            f"  {processes.spread(runs, 'share')}; other load {load:.2f}"
        )
    shares = [processes.median(found[f"{name},{PAIRS_MS[0]}"], "share") for name in NAMES]
    print(f"least share at {PAIRS_MS[0]:g} ms: {min(shares):.3f} (aim {AIM})")


if __name__ == "__main__":
    main()
