"""Runs of the trainer, one after the other, each in a process and a folder of its own."""

from __future__ import annotations

import dataclasses
import errno
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.console import command, output, signals
from lingvo_gpipe.repeat import hparams
from lingvo_gpipe.repeat.summary import Summary
from lingvo_gpipe.repeat.sweep import Setting, number

PROGRAM = (sys.executable, "-m", "lingvo_gpipe.trainer")
MODE = "train_eval"
_RESULT = "result.json"  # of a run, written by the training loop when it is done
_FLAGS = "repeat.json"  # the trainer's flags with which a run was done


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of the trainer.

    Attributes:
        setting: what it does not have in common with the others, besides the seed.
        seed: its seed.
        logdir: folder of all runs.
        arguments: flags of the trainer that are common to all runs.
    """

    setting: Setting
    seed: int
    logdir: Path
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(filter(None, (str(self.setting), f"seed {self.seed}")))

    @property
    def folder(self) -> Path:
        """Its log directory."""
        return self.logdir.joinpath(self.name)

    @property
    def name(self) -> str:
        """Its log directory's path in that of all runs."""
        return "/".join([*self.setting.folders, f"seed_{self.seed}"])

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """The common flags, and those of the setting."""
        own = (f"--params_override={override}" for override in self.setting.overrides)
        return (*self.arguments, *own)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags with which the trainer is called."""
        own = (f"--mode={MODE}", f"--seed={self.seed}", f"--logdir={self.folder}")
        return (*self.own_arguments, *own)

    @property
    def values(self) -> dict[str, float | str]:
        """What the HParams page shows of it, by name."""
        values = map(number, self.setting.values)
        return {**dict(zip(self.setting.names, values, strict=True)), "seed": str(self.seed)}

    def metrics(self) -> dict[str, float]:
        """Return the result of the run, which is done.

        Raises:
            TrainingError: there is no result, or it has no metric.
        """
        path = self.folder / _RESULT
        try:
            metrics = _result(self.folder)
        except OSError as error:
            raise errors.TrainingError(
                f"{self} ended without a result in {path}: {error.strerror}. Start the same "
                "command again; if that does not help, remove the folder"
            ) from error
        if not metrics:
            raise errors.TrainingError(f"{self} evaluated nothing: {path} is empty")
        return metrics

    def is_done(self) -> bool:
        """Return whether it was finished with the same flags, and its record is whole."""
        try:
            _result(self.folder)
            return regular_files.read_json(self.folder / _FLAGS) == list(self.own_arguments)
        except OSError:
            return False

    def keep_flags(self) -> None:
        """Write the flags with which it was done.

        Raises:
            TrainingError: they cannot be written.
        """
        path = self.folder / _FLAGS
        try:
            path.write_text(json.dumps(list(self.own_arguments)))
        except OSError as error:
            raise errors.TrainingError(
                f"{path} cannot be written: {error.strerror}. The run is done; free disk space, "
                "then start the same command again"
            ) from error


def repeat(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    arguments: Sequence[str],
    logdir: Path,
    program: Sequence[str] = PROGRAM,
) -> dict[Setting, Summary] | int:
    """Train once for each setting and seed, one after the other.

    Args:
        settings: settings of the runs.
        seeds: seeds of the runs with each setting.
        arguments: flags of the trainer.
        logdir: folder of all runs.
        program: the trainer.

    Returns:
        The results of each setting, or the exit code of a signal that came meanwhile. Of several
        settings, one with which a run fails (a rate too high) does not end the others.

    Raises:
        TrainingError: a run failed, and there is one setting.
    """
    runs = [Run(setting, seed, logdir, tuple(arguments)) for setting in settings for seed in seeds]
    metrics: dict[Setting, dict[int, dict[str, float]]] = {setting: {} for setting in settings}
    shown: tuple[str, ...] = ()
    for number_done, run in enumerate(runs):
        if run.is_done():
            output.report(f"{run} is done: {run.folder}")
        else:
            try:
                code = _train(run, f"{number_done} of {len(runs)}", program)
            except errors.TrainingError as error:
                if len(settings) == 1:
                    raise
                output.note(command.mistake(error))
                continue
            if code is not None:
                return code
        metrics[run.setting][run.seed] = found = run.metrics()
        if tuple(found) != shown:
            shown = tuple(found)
            hparams.show(logdir, _values(runs), shown)
    return {setting: Summary(by_seed) for setting, by_seed in metrics.items()}


def _train(run: Run, done: str, program: Sequence[str]) -> int | None:
    """Do a run; return the exit code of a signal that came meanwhile."""
    output.report(f"{run}: {shlex.join(run.flags)}")
    hparams.begin(run.folder, run.name, run.values)
    code, received = signals.run_program([*program, *run.flags])
    code = 128 - code if code < 0 else code  # as a shell reports a signal
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return code
    hparams.end(run.folder, failed=code != 0)
    if code:
        raise errors.TrainingError(
            f"{run} failed with exit code {code}, for the reason above; {done} are done. The same "
            "command goes on with it"
        )
    run.metrics()
    run.keep_flags()
    return None if received is None else 128 + received


def _values(runs: Sequence[Run]) -> Mapping[str, list[float | str]]:
    """Return the values of each setting over all runs."""
    return {name: list(dict.fromkeys(run.values[name] for run in runs)) for name in runs[0].values}


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
