"""The command line of `python -m lingvo_gpipe.repeat`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lingvo_gpipe import errors, repeat, trainer
from lingvo_gpipe.console import command, output
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.repeat import runs, sweep
from lingvo_gpipe.repeat.runs import MODE, PROGRAM
from lingvo_gpipe.repeat.summary import sweep_table

_USAGE = "python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=NAME --logdir=FOLDER"
_OF_TRAINER = ("model=", "logdir=", "params=")
Check = Callable[[Sequence[str], Sequence[sweep.Setting]], None]


def _flags() -> Flags:
    """Return the flags of this command alone, without those of the trainer."""
    flags = Flags(f"{repeat.__doc__}")
    flags.repeated("seeds", "Seeds of the runs, between commas; with --sweep, 1 if not given.")
    flags.repeated("sweep", "A field and its values, PATH=VALUE,VALUE; several make a grid.")
    return flags


def _seeds(texts: Sequence[str], *, swept: bool) -> list[int]:
    """Return the seeds that the values of --seeds name; 1 where none are given for a sweep.

    Raises:
        ParamsError: they are not whole numbers, or not all different.
    """
    if not texts and swept:
        return [1]
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


def _logdir(values: argparse.Namespace) -> Path:
    """Return the folder of all runs; refuse flags that this command sets itself.

    Args:
        values: the trainer's flags.

    Raises:
        ParamsError: a flag is set by this command, or the folder is missing.
    """
    if not (values.model or values.params):
        raise errors.ParamsError(f"--model=NAME is missing after --. Write {_USAGE}")
    overridden = any(text.startswith("model.seed") for text in values.params_override)
    if values.seed is not None or overridden:
        raise errors.ParamsError("--seed is set for each run. Leave it out, and use --seeds")
    if values.mode not in (None, MODE):
        raise errors.ParamsError(
            f"--mode={values.mode} has no result to compare. Leave it out: it is {MODE}"
        )
    if values.logdir is None:
        raise errors.ParamsError(
            "--logdir=FOLDER is missing after --. Each run has a folder in it, seed_1 and so on"
        )
    return Path(os.path.expanduser(values.logdir))


def run(argv: Sequence[str], program: Sequence[str] = PROGRAM, check: Check = sweep.check) -> int:
    """Do what the arguments `argv` ask; return the exit code.

    Args:
        argv: arguments without the program's name.
        program: the trainer.
        check: refuses settings of a sweep before the first run.
    """
    return command.exit_code(lambda: _run(list(argv), program, check))


def _run(arguments: list[str], program: Sequence[str], check: Check) -> command.Exit:
    place = arguments.index("--") if "--" in arguments else None
    if place is None and any(name.lstrip("-").startswith(_OF_TRAINER) for name in arguments):
        raise errors.ParamsError(f"the trainer's flags come after --. Write {_USAGE}")
    values = _flags().read(arguments[:place])
    if values is None:
        return command.Exit()
    if place is None:
        raise errors.ParamsError(f"the trainer's flags are missing after --. Write {_USAGE}")
    of_trainer = arguments[place + 1 :]
    named = trainer.read_flags(of_trainer)
    if named is None:
        return command.Exit()
    axes = sweep.axes(values.sweep)
    seeds = _seeds(values.seeds, swept=bool(axes))
    logdir = _logdir(named)
    settings = sweep.settings(axes)
    if axes:
        check(of_trainer, settings)
    results = runs.repeat(settings, seeds, of_trainer, logdir, program)
    if isinstance(results, int):
        return command.Exit(results)
    output.report(f"to compare the runs: tensorboard --logdir {shlex.quote(str(logdir))}, HParams")
    output.report(sweep_table(results) if axes else results[settings[0]].table())
    failed = len(settings) * len(seeds) - sum(len(each.metrics) for each in results.values())
    return command.Exit(int(failed > 0))


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))
