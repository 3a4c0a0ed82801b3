"""Disturbs runs on workers, one fault each, and prints what became of them.

`python -m benchmarks.faults`: 68 runs of a small network on two workers. In each, one process is
killed or stopped, or the link of a host or between two workers is cut, at a random instant of the
start, a step, a checkpoint or an evaluation. Its last checkpoint must have the bits of the
undisturbed run, and nothing may be left behind: else the exit code is 1. `--quick` does each fault
once; `--soak=MINUTES` is one long run with a fault every `--every_s` seconds.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.faults import disturbed, soak
from benchmarks.support import machine, saved


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Return whether two checkpoints have the same keys and bits."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].tobytes() == b[key].tobytes() for key in a
    )


def cases(quick: bool) -> list[tuple[disturbed.Fault, str]]:
    """Return the (fault, phase) of all runs; the first ones are those of `quick`."""
    faults, phases = disturbed.FAULTS, disturbed.PHASES
    return [
        (fault, phases[(number + turn) % len(phases)])
        for turn in range(1 if quick else len(phases))
        for number, fault in enumerate(faults)
    ]


def _seconds(values: Sequence[float | None]) -> str:
    """Return the median and the largest of some times."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    return f"median {statistics.median(known):.2f} s, worst {max(known):.2f} s, of {len(known)}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def run_all(chosen: Sequence[tuple[disturbed.Fault, str]], seed: int, every_line: bool) -> int:
    """Do runs and print a table; return the exit code.

    Args:
        chosen: (fault, phase) of the runs.
        seed: of the instants.
        every_line: whether to print what the runs print, also where they end as they should.
    """
    print(machine.describe())
    load, outcomes = machine.Load(), []
    with tempfile.TemporaryDirectory(prefix="lingvo_gpipe_faults_") as temporary:
        base = Path(temporary)
        timings = disturbed.undisturbed(base / "undisturbed")
        expected = saved.values(base / "undisturbed" / "run")
        print(f"undisturbed: {timings}; {len(expected)} tensors", flush=True)
        print(f"{'fault':<32} {'phase':<11} {'found s':>8} {'step s':>8}  bits  left behind")
        for number, (fault, phase) in enumerate(chosen):
            folder = base / f"{number}"
            outcome = disturbed.disturbed(
                fault,
                phase,
                folder,
                timings,
                random.Random(f"{seed} {fault} {phase} {number}"),
                lambda run: same(saved.values(run), expected),
            )
            outcomes.append(outcome)
            print(
                f"{fault!s:<32} {phase:<11} {_figure(outcome.detection_s):>8} "
                f"{_figure(outcome.next_step_s):>8}  {'yes' if outcome.equal else 'NO':<4}  "
                f"{', '.join(outcome.left) or 'nothing'}{outcome.wrong and f'; {outcome.wrong}'}",
                flush=True,
            )
            if not outcome.right or every_line:
                print((folder / "printed").read_text(encoding="utf-8"), flush=True)
    right = sum(outcome.right for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} as they should; other load {load.stop():.2f} cores")
    print(f"found: {_seconds([outcome.detection_s for outcome in outcomes])}")
    print(f"next step: {_seconds([outcome.next_step_s for outcome in outcomes])}")
    return 0 if right == len(outcomes) else 1


def main() -> None:
    """Read the flags, do what they ask, and end with the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each fault once")
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--only", default="", help="only runs with this text in fault and phase")
    parser.add_argument("--first", type=int, default=0, help="number of the run to begin with")
    parser.add_argument("--lines", action="store_true", help="print what the runs print")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="one long run")
    parser.add_argument("--every_s", type=float, default=120.0, help="between its faults")
    values = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the runs, too
    if values.soak is not None:
        with tempfile.TemporaryDirectory(prefix="lingvo_gpipe_soak_") as temporary:
            code = soak.soak(Path(temporary) / "soak", values.soak, values.every_s, values.seed)
        sys.exit(code)
    chosen = [case for case in cases(values.quick) if values.only in f"{case[0]} {case[1]}"]
    sys.exit(run_all(chosen[values.first :], values.seed, values.lines))


if __name__ == "__main__":
    main()
