"""One model trained from several seeds: each result, their mean and deviation.

    python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=image.digits.MLP --logdir=runs/five

Whatever stands behind `--` goes to the trainer, which runs once for each seed in a process of its
own and in the folder LOGDIR/seed_N, by --mode=train_eval. A run that was cut off goes on when the
same command is given again, and one that is done is not run again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lingvo_gpipe import errors, trainer
from lingvo_gpipe.console import command

_PROGRAM = (sys.executable, "-m", "lingvo_gpipe.trainer")
_MODE = "train_eval"
_RESULT = "result.json"  # of a run, written by the training loop when it is done
_FLAGS = "repeat.json"  # the trainer's flags by which a run was done
_USAGE = "python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=NAME --logdir=FOLDER"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What several runs came to.

    Attributes:
        metrics: seed → name → number, of each run's last evaluation.
    """

    metrics: Mapping[int, Mapping[str, float]]

    @property
    def names(self) -> list[str]:
        """Names of metrics that every run has, in the order of the first."""
        first, *others = self.metrics.values()
        return [name for name in first if all(name in other for other in others)]

    def mean(self, name: str) -> float:
        """Return the mean of a metric."""
        return statistics.fmean(self._values(name))

    def deviation(self, name: str) -> float:
        """Return the sample standard deviation of a metric (by n − 1); NaN of one run."""
        values = self._values(name)
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def table(self) -> str:
        """Return a line per seed, then mean ± deviation, then a line for each metric.

        >>> print(Summary({1: {"accuracy": 0.5}, 2: {"accuracy": 0.7}}).table())
        seed         accuracy
        1              0.5000
        2              0.7000
        mean  0.6000 ± 0.1414
        accuracy mean=0.6000 std=0.1414 n=2
        """
        rows = [["seed", *self.names]]
        rows += [
            [str(seed), *(f"{own[name]:.4f}" for name in self.names)]
            for seed, own in self.metrics.items()
        ]
        rows.append(
            ["mean", *(f"{self.mean(n):.4f} ± {self.deviation(n):.4f}" for n in self.names)]
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        told = [name for name in self.names if not name.startswith("loss")] or self.names
        count = len(self.metrics)
        lines += [
            f"{n} mean={self.mean(n):.4f} std={self.deviation(n):.4f} n={count}" for n in told
        ]
        return "\n".join(lines)

    def _values(self, name: str) -> list[float]:
        return [own[name] for own in self.metrics.values()]


def _flags() -> command.Flags:
    """Return the flags of this command alone; the trainer's stand behind them."""
    known = command.Flags("repeat", f"{__doc__}")
    known.repeated("seeds", "Seeds of the runs, between commas.")
    return known


def _seeds(given: Sequence[str]) -> list[int]:
    """Return the seeds that a flag names.

    Raises:
        ParamsError: they are no whole numbers, or not all different.
    """
    if len(given) != 1:
        raise errors.ParamsError(f"give --seeds once. Write {_USAGE}")
    parts = given[0].split(",")
    for part in parts:
        if not part.strip().isdecimal():
            raise errors.ParamsError(
                f"--seeds={given[0]}: {part!r} is no whole number. Write --seeds=1,2,3,4,5"
            )
    found = [int(part) for part in parts]
    twice = next((seed for seed in found if found.count(seed) > 1), None)
    if twice is not None:
        raise errors.ParamsError(f"--seeds={given[0]}: {twice} stands there twice. Give it once")
    return found


def _logdir(arguments: Sequence[str]) -> Path:
    """Return the folder around all runs; refuse flags that are not the user's to give here.

    Raises:
        ParamsError: a flag is unknown or set by us, or the folder is missing.
    """
    values = trainer.read_flags(arguments)
    if values is None or values.model is None:
        raise errors.ParamsError(f"--model=NAME is missing behind --. Write {_USAGE}")
    overridden = any(text.startswith("model.seed") for text in values.params_override)
    if values.seed is not None or overridden:
        raise errors.ParamsError("--seed is set for each run. Leave it out, and use --seeds")
    if values["mode"].present and values.mode != _MODE:
        raise errors.ParamsError(
            f"--mode={values.mode} gives no result to compare. Leave it out: it is {_MODE}"
        )
    if values.logdir is None:
        raise errors.ParamsError(
            "--logdir=FOLDER is missing behind --. Each run has a folder in it, seed_1 and so on"
        )
    return Path(os.path.expanduser(values.logdir))


def _metrics(folder: Path, seed: int) -> dict[str, float]:
    """Return what a run that is done came to.

    Raises:
        TrainingError: it says nothing.
    """
    try:
        found: dict[str, float] = json.loads((folder / _RESULT).read_text())["metrics"]
    except (OSError, ValueError, KeyError) as error:
        raise errors.TrainingError(
            f"seed {seed} ended without a result in {folder / _RESULT}. Start the same command "
            "again; if that does not help, remove the folder"
        ) from error
    if not found:
        raise errors.TrainingError(f"seed {seed} evaluated nothing: {folder / _RESULT} is empty")
    return found


def _is_done(folder: Path, arguments: Sequence[str]) -> bool:
    """Tell whether a run was finished by the same flags."""
    try:
        return (folder / _RESULT).exists() and json.loads((folder / _FLAGS).read_text()) == list(
            arguments
        )
    except (OSError, ValueError):
        return False


def _keep_flags(path: Path, arguments: Sequence[str]) -> None:
    """Write by which flags a run was done.

    Raises:
        TrainingError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(list(arguments)))
    except OSError as error:
        raise errors.TrainingError(
            f"{path} cannot be written: {error.strerror}. The run is done; free disk space, then "
            "start the same command again"
        ) from error


def _train(program: Sequence[str]) -> tuple[int, int | None]:
    """Run the trainer and wait; what ends us ends it first, so that it saves.

    Ctrl-C reaches it by itself, from the terminal; another signal is handed on.

    Returns:
        Its exit code, and the signal that came meanwhile: a run that was at its end is done.
    """
    process = subprocess.Popen(program)
    came: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)
        if number != signal.SIGINT:
            process.send_signal(number)

    wanted = (signal.SIGTERM, signal.SIGINT)
    before: dict[int, Any] = {number: signal.signal(number, hand_on) for number in wanted}
    try:
        return process.wait(), came[0] if came else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def repeat(
    seeds: Sequence[int], arguments: Sequence[str], program: Sequence[str] = _PROGRAM
) -> Summary | int:
    """Train once for each seed, one after the other.

    Args:
        seeds: of the runs.
        arguments: flags of the trainer.
        program: the trainer.

    Returns:
        What they came to; or the exit code of a signal that came meanwhile.

    Raises:
        UserError: a flag is wrong, or a run failed.
    """
    logdir = _logdir(arguments)
    metrics: dict[int, dict[str, float]] = {}
    for seed in seeds:
        folder = logdir / f"seed_{seed}"
        if _is_done(folder, arguments):
            command.report(f"seed {seed} is done: {folder}")
        else:
            own = [*arguments, f"--mode={_MODE}", f"--seed={seed}", f"--logdir={folder}"]
            command.report(f"seed {seed}: {shlex.join(own)}")
            code, came = _train([*program, *own])
            code = 128 - code if code < 0 else code  # as a shell tells a signal
            if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                return code
            if code:
                raise errors.TrainingError(
                    f"seed {seed} failed with exit code {code}, as told above; {len(metrics)} of "
                    f"{len(seeds)} are done. The same command goes on with it"
                )
            _metrics(folder, seed)
            _keep_flags(folder / _FLAGS, arguments)
            if came is not None:
                return 128 + came
        metrics[seed] = _metrics(folder, seed)
    return Summary(metrics)


def run(argv: Sequence[str], program: Sequence[str] = _PROGRAM) -> int:
    """Do what the arguments `argv` ask; return the exit code."""
    arguments = list(argv)
    place = arguments.index("--") if "--" in arguments else None
    try:
        values = _flags().read(arguments[:place])
        if values is None:
            return 0
        if place is None:
            raise errors.ParamsError(f"flags of the trainer stand behind --. Write {_USAGE}")
        found = repeat(_seeds(values.seeds), arguments[place + 1 :], program)
        if isinstance(found, int):
            return found
        command.report(found.table())
        return 0 if command.finish() else 1
    except BrokenPipeError:
        command.drop_output()  # whoever read has left (head, a pager)
        return 128 + signal.SIGPIPE
    except errors.UserError as error:
        print(command.mistake(error), file=sys.stderr)
        return 1


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
