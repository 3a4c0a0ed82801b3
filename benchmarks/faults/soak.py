"""One long run with a fault at intervals: the memory of its processes must stay flat.

A process that is lost is replaced by a new one, so each role has several processes, one after the
other. Their peaks are compared: the last may not have more than the first by `_GROWTH` and a few
MiB. The parent and the chief's supervisor live through all of it, and are compared with themselves.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults import disturbed, notes, processes

_SAMPLE_S = 1.0
_GROWN = 20  # samples until a process has imported what it needs
_GROWTH = 1.1
_SLACK_BYTES = 8 * 2**20
_SETTLE_S = 30.0
_LIMIT_S = 60.0
_STEPS = 10**7
_LONG_LIVED = (processes.PARENT, processes.CHIEF_SUPERVISOR)
_FAULTS = [
    disturbed.Fault(role, kind)
    for role in (processes.WORKER, processes.CHIEF)
    for kind in (disturbed.KILLED, disturbed.STOPPED)
]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The memory of a role's processes.

    Attributes:
        count: number of processes.
        first_bytes: of the first process its peak; of one that lives on, its first peak.
        last_bytes: the same of the last process, or at last.
        largest_bytes: largest of all.
    """

    count: int
    first_bytes: int
    last_bytes: int
    largest_bytes: int

    @property
    def is_flat(self) -> bool:
        """Whether the last is as small as the first, or a little larger."""
        return self.last_bytes <= self.first_bytes * _GROWTH + _SLACK_BYTES


Samples = dict[tuple[int, int], list[int]]


def rows(samples: Mapping[str, Samples]) -> dict[str, Row]:
    """Return role → row of samples role → {(start, process) → bytes over time}.

    >>> found = rows({"chief": {(1, 7): [5, 9, 8], (4, 8): [6, 7]}, "parent": {(0, 1): [3, 5, 4]}})
    >>> found["chief"]
    Row(count=2, first_bytes=9, last_bytes=7, largest_bytes=9)
    >>> found["parent"]
    Row(count=1, first_bytes=5, last_bytes=4, largest_bytes=5)
    """
    found = {}
    for role, of_role in samples.items():
        each = [of_role[key] for key in sorted(of_role)]
        if role in _LONG_LIVED:
            first, last = max(each[0][:_GROWN]), each[-1][-1]
        else:
            first, last = max(each[0]), max(each[-1])
        found[role] = Row(len(each), first, last, max(map(max, each)))
    return found


def soak(folder: Path, minutes: float, every_s: float, seed: int) -> int:
    """Do the run, print what its processes occupied; return the exit code.

    Args:
        folder: for the run.
        minutes: how long.
        every_s: seconds between two faults.
        seed: chooses processes and instants.
    """
    run, numbers = disturbed.Run(folder, None), random.Random(seed)
    run.start([f"--max_steps={_STEPS}"])
    samples: dict[str, Samples] = {}
    done: list[disturbed.Fault] = []
    end_s, next_s = time.monotonic() + 60 * minutes, time.monotonic() + every_s
    files: list[dict[str, int]] = []
    try:
        while time.monotonic() < end_s and not run.has_ended():
            now = run.processes()
            for process in now:
                if process.state not in "ZX":
                    key = (process.start, process.pid)
                    samples.setdefault(process.role, {}).setdefault(key, []).append(
                        process.rss_bytes
                    )
            if time.monotonic() > next_s:
                files.append(_open_files(now))
                next_s += every_s * numbers.uniform(0.8, 1.2)
                fault = _FAULTS[len(done) % len(_FAULTS)]
                if chosen := [process for process in now if process.role == fault.role]:
                    number = signal.SIGKILL if fault.kind == disturbed.KILLED else signal.SIGSTOP
                    os.kill(numbers.choice(chosen).pid, number)
                    done.append(fault)
            time.sleep(_SAMPLE_S)
        went_on = not run.has_ended()
        for command in run.all_commands:
            command.signal(signal.SIGTERM)
        disturbed.wait(run.has_ended, _LIMIT_S)
        disturbed.wait(lambda: not run.processes(), _SETTLE_S)
        left = [process.role for process in run.processes()]
    finally:
        run.end()
        (folder / "printed").write_text(run.text(), encoding="utf-8")
    steps = sum(what == notes.TRAINING for _, _, what in run.notes())
    print(f"{len(done)} faults, {len(run.losses())} restarts, {steps} mini-batches drawn")
    found = rows(samples)
    _print(found, files)
    print(f"left behind: {', '.join(left) or 'nothing'}")
    if not went_on:
        print(f"the run ended before its time:\n{run.text()[-4000:]}")
    return 0 if went_on and not left and all(row.is_flat for row in found.values()) else 1


def _open_files(now: Sequence[processes.Process]) -> dict[str, int]:
    """Return long-lived role → number of its open files."""
    return {
        process.role: len(os.listdir(f"/proc/{process.pid}/fd"))
        for process in now
        if process.role in _LONG_LIVED
    }


def _print(found: Mapping[str, Row], files: Sequence[Mapping[str, int]]) -> None:
    print(f"{'role':<16} {'processes':>9} {'first MiB':>10} {'last MiB':>10} {'largest':>10}  flat")
    for role, row in found.items():
        first, last, largest = (
            f"{value / 2**20:10.1f}"
            for value in (row.first_bytes, row.last_bytes, row.largest_bytes)
        )
        flat = "yes" if row.is_flat else "NO"
        print(f"{role:<16} {row.count:>9} {first} {last} {largest}  {flat}")
    for role in _LONG_LIVED:
        counts = [each[role] for each in files if role in each]
        if counts:
            print(f"open files of the {role}: first {counts[0]}, last {counts[-1]}")
