"""Runs of the trainer that go on where they were stopped, within the minutes of a sitting."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.support import scalars
from lingvo_gpipe.task import Task


class SittingOver(Exception):  # noqa: N818 (not an error: the same command goes on)
    """The minutes of this sitting are over."""


class Trainer:
    """Runs the trainer in processes of their own, one after the other.

    Attributes:
        folder: of all runs; each has its log directory, params and cost there.
    """

    def __init__(
        self, folder: Path, minutes: float, program: Callable[[Sequence[str]], int] | None = None
    ) -> None:
        """Begin a sitting.

        Args:
            folder: see the class.
            minutes: after which it ends: the run that is trained saves a checkpoint.
            program: what runs the trainer's arguments; None: a process.
        """
        self.folder = folder
        self._ends_s = time.monotonic() + 60 * minutes
        self._program = program or self._by_process

    def train(
        self, name: str, params: Task.Params, seed: int, checkpoint: Path | None = None
    ) -> Path:
        """Train until `params.train.max_steps`, or go on; return the log directory.

        Args:
            name: of the run.
            params: its task. A run that is done goes on if they have more steps.
            seed: of its weights and data.
            checkpoint: of the weights that it starts from; None: random ones.
        """
        logdir = self.folder / name
        text = params.to_text()
        done, file = logdir / "done.txt", logdir / "params.txt"
        if not (done.exists() and done.read_text() == text):
            logdir.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            flags = [f"--params={file}", f"--logdir={logdir}", f"--seed={seed}"]
            if checkpoint is not None:
                flags.append(f"--checkpoint={checkpoint}")
            self._run(logdir, ["--mode=train_eval", *flags])
            done.write_text(text)
        return logdir

    def score(self, logdir: Path) -> Path:
        """Translate and score the test split by a run's best checkpoint; return the folder."""
        folder = logdir / "score"
        if not (folder / "test.tsv").exists():
            best = logdir / "best"
            self._run(logdir, ["--mode=score", f"--logdir={logdir}", f"--checkpoint={best}"])
        return folder

    def _run(self, logdir: Path, arguments: Sequence[str]) -> None:
        """Run the trainer; add what it cost to the run's file.

        Raises:
            SittingOver: the sitting is over.
            RuntimeError: the trainer failed.
        """
        if time.monotonic() > self._ends_s:
            raise SittingOver
        with _cost_added(logdir / "cost.json"):
            code = self._program(arguments)
        if code:
            if time.monotonic() > self._ends_s:
                raise SittingOver
            raise RuntimeError(f"the trainer failed with {code}: {' '.join(arguments)}")

    def _by_process(self, arguments: Sequence[str]) -> int:
        command = [sys.executable, "-m", "lingvo_gpipe.trainer", *arguments]
        with subprocess.Popen(command) as process:
            try:
                return process.wait(timeout=max(1.0, self._ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return 1
            finally:
                process.terminate()  # it saves a checkpoint
                process.wait()


def sit(runs: Iterable[Path]) -> None:
    """Print the folder of each run as it is done, until the sitting is over or interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the trainer's process, too
    try:
        for folder in runs:
            print(folder, flush=True)
    except (SittingOver, KeyboardInterrupt):
        print("the sitting is over; the same command goes on")


def accuracies(logdir: Path) -> list[scalars.Point]:
    """Return the accuracies of a run's evaluations, in their order."""
    return scalars.read(logdir / "eval")["accuracy"]


def core_minutes(logdir: Path) -> float:
    """Return the processor minutes that a run took so far."""
    return float(json.loads((logdir / "cost.json").read_text())["core_minutes"])


@contextlib.contextmanager
def _cost_added(file: Path) -> Iterator[None]:
    """Add the minutes of the `with` block to a file, also where it is interrupted."""
    cost = json.loads(file.read_text()) if file.exists() else {"minutes": 0.0, "core_minutes": 0.0}
    begun_s, before = time.monotonic(), _processor_s()
    try:
        yield
    finally:
        cost["minutes"] += (time.monotonic() - begun_s) / 60
        cost["core_minutes"] += (_processor_s() - before) / 60
        file.write_text(json.dumps(cost))


def _processor_s() -> float:
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    return sum(each.ru_utime + each.ru_stime for each in spent)
