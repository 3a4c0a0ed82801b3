"""What do worker processes cost?

`python -m benchmarks.workers`: processor seconds and wall seconds of an update, in one process and
over two workers, in interleaved rounds on an idle machine. They are counted from one checkpoint to
the next, so that neither start nor end counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import machine, processes

CASES = {
    "digits": ("--model=image.digits.ConvNet",),
    **{
        name: ("--params_package=benchmarks.worker_models", f"--model=cases.{model}")
        for name, model in {
            "AmoebaNet-D": "AmoebaNet",
            "MLP": "MLP",
            "Transformer": "Transformer",
        }.items()
    },
}
UPDATES = {
    "digits": 300,
    "AmoebaNet-D": 100,
    "MLP": 100,
    "Transformer": 30,
}
"""Name of a case → updates that are measured, after as many that are not."""
ROUNDS = 5
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """What a run has used so far.

    Attributes:
        wall_s: seconds of a clock.
        processor_s: processor seconds of all of its processes.
    """

    wall_s: float
    processor_s: float


def run(case: str, folder: Path, flags: Sequence[str], marks: Sequence[int] = ()) -> list[Used]:
    """Run the trainer; return what it had used at the checkpoints of these steps."""
    words = [*CASES[case], f"--logdir={folder}", *flags]
    if case == "Transformer":
        words.append(f"--data_dir={folder.parent}/data")
    log, used = Path(f"{folder}.log"), list[Used]()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lingvo_gpipe.trainer", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            if len(used) < len(marks):
                checkpoint = folder / "checkpoints" / f"ckpt-{marks[len(used)]}.params.txt"
                used += [_used(process.pid)] if checkpoint.exists() else []
            time.sleep(0.01)
    if process.returncode or len(used) < len(marks):
        text = log.read_text()[-2000:]
        sys.exit(f"{' '.join(words)} ended with {process.returncode}:\n{text}")
    return used


def _used(root: int) -> Used:
    """Return what a process and all that it has started have used."""
    now = time.monotonic()
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
            seconds[int(path.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    total = 0.0
    for pid, used_s in seconds.items():
        ancestor = pid
        while ancestor not in (root, 0):
            ancestor = parents.get(ancestor, 0)
        total += used_s if ancestor == root else 0.0
    return Used(now, total)


def speed(case: str, rounds: int) -> None:
    """Print processor and wall milliseconds of an update, in one process and over two workers."""
    count = UPDATES[case]
    found: dict[str, list[float]] = {}
    flags = [
        "--num_partitions=2",
        f"--max_steps={2 * count + 5}",
        f"--save_interval_steps={count}",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds):
            for label, more in (("one process", []), ("two workers", ["--workers=local:2"])):
                folder = Path(temporary, f"{label.split()[0]}{number}")
                first, last = run(case, folder, [*flags, *more], [count, 2 * count])
                figures = {
                    "processor": last.processor_s - first.processor_s,
                    "wall": last.wall_s - first.wall_s,
                }
                for what, seconds in figures.items():
                    found.setdefault(f"{label}, {what}", []).append(1e3 * seconds / count)
    print(f"{case}, ms of an update")
    for what, values in found.items():
        middle = statistics.median(values)
        print(f"  {what:<24} {middle:8.2f} ({min(values):.2f} to {max(values):.2f})")
    for what in ("processor", "wall"):
        pairs = zip(found[f"two workers, {what}"], found[f"one process, {what}"], strict=True)
        ratio = statistics.median(two / one for two, one in pairs)
        print(f"  two workers / one process, {what}: {ratio:.3f}", flush=True)


def main() -> None:
    """Read the arguments."""
    parser = processes.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="the first case, one round")
    parser.add_argument("cases", nargs="*", help="names of cases; all if none is given")
    options = parser.parse_args()
    cases = options.cases or list(UPDATES)
    if options.quick:
        cases, options.rounds = cases[:1], 1
    print(f"{machine.describe()}; medians of {options.rounds} rounds (least to most)")
    for case in cases:
        speed(case, options.rounds)


if __name__ == "__main__":
    main()
