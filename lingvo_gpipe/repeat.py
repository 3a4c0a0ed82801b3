"""One model trained from several seeds: each result, their mean and deviation.

    python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=image.digits.MLP --logdir=runs/five

All flags after `--` are the trainer's. It runs once for each seed, in a process of its own and in
the folder LOGDIR/seed_N, with --mode=train_eval. A run that was cut off continues when the same
command is given again, and one that is done is not run again.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lingvo_gpipe import errors, regular_files, trainer
from lingvo_gpipe.console import command, output, signals
from lingvo_gpipe.console.flags import Flags

_PROGRAM = (sys.executable, "-m", "lingvo_gpipe.trainer")
_MODE = "train_eval"
_RESULT = "result.json"  # of a run, written by the training loop when it is done
_FLAGS = "repeat.json"  # the trainer's flags with which a run was done
_USAGE = "python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=NAME --logdir=FOLDER"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The results of several runs.

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
            [str(seed), *(f"{values[name]:.4f}" for name in self.names)]
            for seed, values in self.metrics.items()
        ]
        rows.append(
            ["mean", *(f"{self.mean(n):.4f} ± {self.deviation(n):.4f}" for n in self.names)]
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        shown = [name for name in self.names if not name.startswith("loss")] or self.names
        count = len(self.metrics)
        lines += [
            f"{n} mean={self.mean(n):.4f} std={self.deviation(n):.4f} n={count}" for n in shown
        ]
        return "\n".join(lines)

    def _values(self, name: str) -> list[float]:
        return [values[name] for values in self.metrics.values()]


def _flags() -> Flags:
    """Return the flags of this command alone, without those of the trainer."""
    flags = Flags(f"{__doc__}")
    flags.repeated("seeds", "Seeds of the runs, between commas.")
    return flags


def _seeds(texts: Sequence[str]) -> list[int]:
    """Return the seeds that the values of --seeds name.

    Raises:
        ParamsError: they are not whole numbers, or not all different.
    """
    if len(texts) != 1:
        raise errors.ParamsError(f"give --seeds once. Write {_USAGE}")
    (text,) = texts
    parts = text.split(",")
    for part in parts:
        if not part.strip().isdecimal():
            raise errors.ParamsError(
                f"--seeds={text}: {part!r} is not a whole number. Write --seeds=1,2,3,4,5"
            )
    seeds = [int(part) for part in parts]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise errors.ParamsError(f"--seeds={text} has {twice} twice. Give it once")
    return seeds


def _logdir(arguments: Sequence[str]) -> Path:
    """Return the folder of all runs; refuse flags that this command sets itself.

    Raises:
        ParamsError: a flag is unknown or set by this command, or the folder is missing.
    """
    values = trainer.read_flags(arguments)
    if values is None or values.model is None:
        raise errors.ParamsError(f"--model=NAME is missing after --. Write {_USAGE}")
    overridden = any(text.startswith("model.seed") for text in values.params_override)
    if values.seed is not None or overridden:
        raise errors.ParamsError("--seed is set for each run. Leave it out, and use --seeds")
    if values.mode not in (None, _MODE):
        raise errors.ParamsError(
            f"--mode={values.mode} has no result to compare. Leave it out: it is {_MODE}"
        )
    if values.logdir is None:
        raise errors.ParamsError(
            "--logdir=FOLDER is missing after --. Each run has a folder in it, seed_1 and so on"
        )
    return Path(os.path.expanduser(values.logdir))


def _metrics(folder: Path, seed: int) -> dict[str, float]:
    """Return the result of a run that is done.

    Raises:
        TrainingError: there is no result, or it has no metric.
    """
    try:
        metrics = _result(folder)
    except OSError as error:
        raise errors.TrainingError(
            f"seed {seed} ended without a result in {folder / _RESULT}: {error.strerror}. Start "
            "the same command again; if that does not help, remove the folder"
        ) from error
    if not metrics:
        raise errors.TrainingError(f"seed {seed} evaluated nothing: {folder / _RESULT} is empty")
    return metrics


def _result(folder: Path) -> dict[str, float]:
    """Return the metrics in a run's record.

    Raises:
        OSError: there is no record, or it is damaged.
    """
    result = regular_files.read_json(folder / _RESULT)
    metrics = result.get("metrics") if isinstance(result, dict) else None
    if not isinstance(metrics, dict) or not all(isinstance(v, float) for v in metrics.values()):
        raise OSError(errno.EILSEQ, "it has no metrics", folder / _RESULT)
    return metrics


def _is_done(folder: Path, arguments: Sequence[str]) -> bool:
    """Return whether a run was finished with the same flags, and its record is whole."""
    try:
        _result(folder)
        return regular_files.read_json(folder / _FLAGS) == list(arguments)
    except OSError:
        return False


def _keep_flags(path: Path, arguments: Sequence[str]) -> None:
    """Write the flags with which a run was done.

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


def repeat(
    seeds: Sequence[int], arguments: Sequence[str], program: Sequence[str] = _PROGRAM
) -> Summary | int:
    """Train once for each seed, one after the other.

    Args:
        seeds: seeds of the runs.
        arguments: flags of the trainer.
        program: the trainer.

    Returns:
        Their results, or the exit code of a signal that came meanwhile.

    Raises:
        UserError: a flag is wrong, or a run failed.
    """
    logdir = _logdir(arguments)
    metrics: dict[int, dict[str, float]] = {}
    for seed in seeds:
        folder = logdir / f"seed_{seed}"
        if _is_done(folder, arguments):
            output.report(f"seed {seed} is done: {folder}")
        else:
            flags = [*arguments, f"--mode={_MODE}", f"--seed={seed}", f"--logdir={folder}"]
            output.report(f"seed {seed}: {shlex.join(flags)}")
            code, received = signals.run_program([*program, *flags])
            code = 128 - code if code < 0 else code  # as a shell reports a signal
            if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                return code
            if code:
                raise errors.TrainingError(
                    f"seed {seed} failed with exit code {code}, for the reason above; "
                    f"{len(metrics)} of {len(seeds)} are done. The same command goes on with it"
                )
            _metrics(folder, seed)
            _keep_flags(folder / _FLAGS, arguments)
            if received is not None:
                return 128 + received
        metrics[seed] = _metrics(folder, seed)
    return Summary(metrics)


def run(argv: Sequence[str], program: Sequence[str] = _PROGRAM) -> int:
    """Do what the arguments `argv` ask; return the exit code."""
    return command.exit_code(lambda: _run(list(argv), program))


def _run(arguments: list[str], program: Sequence[str]) -> command.Exit:
    place = arguments.index("--") if "--" in arguments else None
    values = _flags().read(arguments[:place])
    if values is None:
        return command.Exit()
    if place is None:
        raise errors.ParamsError(f"the trainer's flags are missing after --. Write {_USAGE}")
    result = repeat(_seeds(values.seeds), arguments[place + 1 :], program)
    if isinstance(result, int):
        return command.Exit(result)
    output.report(result.table())
    return command.Exit()


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
