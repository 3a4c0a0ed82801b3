"""How close does the executor come to its schedule's bound, when cells only wait?

`python -m benchmarks.bound [--quick]`: K=8, M=32; see `benchmarks.support.waiting`. A pair is the
forward and the backward of a device's cells. Schedules of several cells per device have two, each
of which waits half as long, so that steps can be compared: of ZB-H1 and of interleaved with 1F1B,
as measured and as simulated. They also run with twice the pair, so that each cell waits as long as
those of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support import machine, processes
from lingvo_gpipe import schedule

ROUNDS, QUICK_ROUNDS = 5, 1
K, M = 8, 32
PAIRS_MS = (20.0, 4.0)
AIM = 0.97
CELLS = {  # schedule → cells per device
    name: made.cells_per_device
    for name, made in schedule.SCHEDULES.items()
    if name != "optimal"  # it is for small tables
}


def measure(configuration: str) -> dict[str, float]:
    """Return the figures of `SCHEDULE,MS`."""
    from benchmarks.support import waiting

    name, pair_ms = configuration.split(",")
    return waiting.measure(name, float(pair_ms), K, M, cells_per_device=CELLS[name])


def beside_1f1b(found: Mapping[str, Sequence[Any]], pair_ms: float) -> str:
    """Return the steps of two schedules divided by that of 1F1B, measured and simulated.

    Args:
        found: `SCHEDULE,MS` → its runs.
        pair_ms: milliseconds of a pair.
    """

    def ratio(name: str, key: str) -> float:
        pair = (processes.quiet(found[f"{each},{pair_ms}"]) for each in (name, "1f1b"))
        step, other = (processes.median(runs, key) for runs in pair)
        return step / other

    return ", ".join(
        f"step of {name} / 1f1b {ratio(name, 's'):.3f}, simulated {ratio(name, 'simulated_s'):.3f}"
        for name in ("zb_h1", "interleaved")
    )


def main() -> None:
    """Run every configuration in processes of their own and print a table."""
    options = processes.parser(__doc__).parse_args()
    if options.configuration:
        print(json.dumps(measure(options.configuration)))
        return
    count = QUICK_ROUNDS if options.quick else ROUNDS
    print(machine.describe())
    print(f"K={K}, M={M}; waiting cells, each wait measured, medians of {count} rounds")
    names = [f"{name},{pair}" for pair in PAIRS_MS for name in CELLS]
    alike = [f"{name},{PAIRS_MS[0] * cells}" for name, cells in CELLS.items()]
    names += [name for name in alike if name not in names]
    found = processes.rounds("benchmarks.bound", names, count)
    print(f"{'pair ms':>8} {'schedule':<11} {'step s':>7} {'simulated s':>12} {'share':>6}  spread")
    shares = {}
    for name in names:
        pair, chosen = name.split(",")[::-1]
        runs = processes.quiet(found[name])
        shares[name] = processes.median(runs, "share")
        print(
            f"{pair:>8} {chosen:<11} {processes.median(runs, 's'):7.3f} "
            f"{processes.median(runs, 'simulated_s'):12.3f} {shares[name]:6.3f}"
            f"  {processes.spread(runs, 'share')}"
        )
    least = min(shares[name] for name in alike)
    of_device = min(shares[f"{name},{PAIRS_MS[0]}"] for name in CELLS)
    for pair_ms in PAIRS_MS:
        print(f"pairs of {pair_ms:g} ms: {beside_1f1b(found, pair_ms)}")
    figure = f"{least:.3f} ({of_device:.3f} where it is the pair of all cells of a device)"
    aim = f"at least {AIM} of the simulated table where a cell's pair is {PAIRS_MS[0]:g} ms"
    processes.conclude("bound", f"{figure}; {beside_1f1b(found, PAIRS_MS[0])}", aim, found)


if __name__ == "__main__":
    main()
