"""Notes that the input of a run's model writes while it runs, and that others read.

They go to the file that `FILE` names: a line "TIME PID WHAT" when a mini-batch of training or of an
evaluation is drawn, and when an evaluation has drawn its last one. TIME is of the system's
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE = "LINGVO_GPIPE_FAULTS"
"""The environment variable of the file's path; it marks the processes of a run, too."""
TRAINING, EVALUATION, EVALUATED = "training", "evaluation", "evaluated"
STEPS = 60
"""Updates of the run."""


def write(what: str) -> None:
    """Write a note, if there is a file for it."""
    if path := os.environ.get(FILE):
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{time.monotonic():.4f} {os.getpid()} {what}\n")


def read(path: Path) -> list[tuple[float, int, str]]:
    """Return (time, process, what) of all notes of a file; none if it is not there yet."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii").splitlines()
    return [(float(time_s), int(pid), what) for time_s, pid, what in map(str.split, lines)]
