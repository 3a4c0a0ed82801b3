"""Runs of the trainer that go on where they were stopped, within the minutes of a sitting.

What a run reached is a line in a file of results. A run that stands there is not trained again, so
a file that is kept (and not the checkpoints) is enough to go on on another machine. Results
of another plan need a file of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.support import scalars
from lingvo_gpipe.task import Task
from lingvo_gpipe.tasks.mt.decoding import scores


class SittingOver(Exception):  # noqa: N818 (not an error: the same command goes on)
    """The minutes of this sitting are over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run reached.

    Attributes:
        name: of the run: its log directory in the folder of all runs.
        core_minutes: processor minutes of its training and evaluations.
        evaluations: (update, accuracy, loss) of each evaluation, in their order.
        translations: pair of languages → the translations of its test sentences.
    """

    name: str
    core_minutes: float
    evaluations: Sequence[tuple[int, float, float]]
    translations: Mapping[str, Sequence[str]]

    @property
    def updates(self) -> int:
        """Number of updates at the last evaluation."""
        return self.evaluations[-1][0]

    @property
    def best(self) -> float:
        """Highest accuracy of an evaluation."""
        return max(accuracy for _, accuracy, _ in self.evaluations)


def read_results(file: Path) -> dict[str, Result]:
    """Return name → result, from a file with a line of JSON for each; no file has none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {found.name: found for found in (Result(**json.loads(line)) for line in lines)}


class Trainer:
    """Runs the trainer in processes of their own, one after the other.

    Attributes:
        folder: of all runs; each has its log directory, params and cost there.
        results: file of what they reached.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float,
        program: Callable[[Sequence[str]], int] | None = None,
        results: Path | None = None,
    ) -> None:
        """Begin a sitting.

        Args:
            folder: see the class.
            minutes: after which it ends: the run that is trained saves a checkpoint.
            program: what runs the trainer's arguments; None: a process.
            results: see the class; None: `results.jsonl` in the folder.
        """
        self.folder = folder
        self.results = results or folder / "results.jsonl"
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
            shutil.rmtree(logdir / "score", ignore_errors=True)  # of what it was before
            with _cost_added(logdir / "cost.json"):
                self._run(["--mode=train_eval", *flags])
            done.write_text(text)
        return logdir

    def result(
        self,
        name: str,
        params: Task.Params,
        seed: int,
        start: Callable[[], Path] | None = None,
        *,
        translates: bool = False,
    ) -> Result:
        """Return what a run reached; train it, or go on, if it has no result.

        Args:
            name: of the run.
            params: its task.
            seed: of its weights and data.
            start: returns the checkpoint of the weights that it starts from; None: random ones.
            translates: whether the result needs the translations of its best checkpoint.
        """
        found = read_results(self.results).get(name)
        if found is None or (translates and not found.translations):
            logdir = self.train(name, params, seed, start and start())
            found = Result(
                name,
                round(core_minutes(logdir), 2),
                evaluations(logdir),
                self._translations(logdir) if translates else {},
            )
            line = json.dumps(dataclasses.asdict(found), ensure_ascii=False)
            with open(self.results, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")  # in one piece: another command may write, too
        return found

    def _translations(self, logdir: Path) -> dict[str, Sequence[str]]:
        """Translate and score the test split by a run's best checkpoint."""
        if not (logdir / "score" / "test.tsv").exists():
            self._run(["--mode=score", f"--logdir={logdir}", f"--checkpoint={logdir / 'best'}"])
        texts, _ = scores.read(logdir / "score", "test")
        return {text.pair: text.hypotheses for text in texts}

    def _run(self, arguments: Sequence[str]) -> None:
        """Run the trainer.

        Raises:
            SittingOver: the sitting is over.
            RuntimeError: the trainer failed.
        """
        if time.monotonic() > self._ends_s:
            raise SittingOver
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


def picked(
    kinds: Iterable[tuple[str, Callable[[], Iterable[Result]]]], only: str
) -> Iterator[Result]:
    """Return an iterator over the results of runs, each made when it is reached.

    Args:
        kinds: name → what returns the results of one or more runs.
        only: beginnings of names with commas between them, such as `many,alone/ace`; "": all.

    Raises:
        SystemExit: one of them is the beginning of no name.
    """
    by_name = dict(kinds)
    beginnings = tuple(filter(None, only.split(","))) or ("",)
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in by_name):
            sys.exit(f"--only: {beginning} is none of {', '.join(by_name)}")
    asked = (by_name[name] for name in by_name if name.startswith(beginnings))
    return itertools.chain.from_iterable(results() for results in asked)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that each comparison has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--folder", type=Path, required=True, help="of the runs")
    made.add_argument("--minutes", type=float, default=1e6, help="of this sitting")
    made.add_argument("--results", type=Path, help="file; FOLDER/results.jsonl if not given")
    made.add_argument("--only", default="", help="runs, by the beginnings of their names")
    return made


def sit(results: Iterable[Result]) -> None:
    """Print the name of each run as it is done, until the sitting is over or interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the trainer's process, too
    try:
        for found in results:
            print(found.name, flush=True)
    except (SittingOver, KeyboardInterrupt):
        print("the sitting is over; the same command goes on")


def evaluations(logdir: Path) -> list[tuple[int, float, float]]:
    """Return (update, accuracy, loss) of a run's evaluations, in their order."""
    points = scalars.read(logdir / "eval")
    pairs = zip(points["accuracy"], points["loss"], strict=True)
    return [(a.step, round(a.value, 5), round(b.value, 5)) for a, b in pairs]


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
