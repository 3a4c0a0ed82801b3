"""The trainer's own modes: train, eval, train_eval, export, describe, params, plan.

What is slow to import is imported by the mode that needs it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_gpipe import errors, registry, schedule
from lingvo_gpipe.hyperparams import text

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task


def register() -> None:
    """Make these modes known to the registry."""
    for name, function in MODES.items():
        registry.add_mode(name, function)


def check_flags(flags: argparse.Namespace) -> None:
    """Refuse a flag that the mode does not read.

    Raises:
        ParamsError: naming the modes that read it.
    """
    for flag, readers in _MODES_OF_FLAG.items():
        if getattr(flags, flag) and flags.mode not in readers:
            raise errors.ParamsError(
                f"--{flag} goes with --mode={' or '.join(readers)}, not with --mode={flags.mode}"
            )
    if flags.fit and flags.hosts:
        raise errors.ParamsError(
            "--fit searches for the memory of one device, --hosts names those of all. Leave one out"
        )


def with_kept_choice(task: Task.Params, logdir: str | None) -> Task.Params:
    """Return a task with what its run has chosen by `--schedule=auto`.

    Raises:
        ParamsError: there is no such run.
    """
    from lingvo_gpipe.plan import auto
    from lingvo_gpipe.run import log_directory

    kept = None if logdir is None else log_directory.kept_values(Path(logdir).expanduser())
    if kept is None:
        raise errors.ParamsError(
            "--schedule=auto is chosen by --mode=train, train_eval or plan. Give the --logdir of a "
            "run that has chosen, or name a schedule"
        )
    return auto.resolved(task, lambda _: None, kept=kept, trains=False)


def _train(job: registry.Job, *, evaluate: bool = False) -> None:
    from lingvo_gpipe.plan import hosts
    from lingvo_gpipe.run import loop, profiles

    flags = job.flags
    if job.task.model.schedule != schedule.AUTO:
        for flag, used in (("profile", flags.profile), ("hosts", flags.hosts)):
            if used:
                raise errors.ParamsError(
                    f"training uses --{flag} only to choose by --schedule=auto. Add it, or leave "
                    f"--{flag} out"
                )
    loop.run(
        job.task,
        _logdir(job),
        evaluate=evaluate,
        start=job.checkpoint,
        report=job.report,
        should_stop=job.should_stop,
        note_step=job.note_step,
        profile_layers=flags.profile,
        profile_steps=profiles.parse_steps(flags.profile_steps)
        if flags.profile_steps
        else range(0),
        hosts=None if flags.hosts is None else hosts.parse(flags.hosts),
    )


def _evaluate(job: registry.Job) -> None:
    from lingvo_gpipe.run import evaluation, process

    logdir = job.logdir if job.checkpoint is not None else _logdir(job)
    process.prepare_devices(job.task.model)
    evaluation.run(
        job.task, logdir, which=job.checkpoint, report=job.report, should_stop=job.should_stop
    )


def _export(job: registry.Job) -> None:
    from lingvo_gpipe.run import export

    export.run(job.task, _logdir(job), which=job.checkpoint, report=job.report)


def _describe(job: registry.Job) -> None:
    from lingvo_gpipe.plan import describe

    job.report(describe.describe(_completion(job)(job.task)))


def _params(job: registry.Job) -> None:
    if job.flags.text:
        if job.flags.fields is not None:
            raise errors.ParamsError("--text prints all fields, --fields some. Leave one out")
        job.report(job.task.to_text().rstrip("\n"))
        return
    pattern = job.flags.fields or "*"
    lines = text.listed(job.task, pattern)
    if not lines:
        paths = [path for path, _, _ in job.task.iter_paths()]
        raise errors.ParamsError(
            f"no field of {job.model} matches {pattern!r}, a pattern of whole paths; "
            f"{errors.suggestion(pattern.strip('*.'), paths)}. Without --fields, all are listed"
        )
    job.report("\n".join(lines))


def _plan(job: registry.Job) -> None:
    from lingvo_gpipe.plan import report
    from lingvo_gpipe.run import process

    if job.flags.profile:
        process.prepare_devices(job.task.model)
    complete = _completion(job)
    job.report(
        report.plan(
            complete(job.task),
            fit=job.flags.fit,
            grow=job.flags.grow,
            profile=job.flags.profile,
            cluster=job.flags.hosts,
            partitions=job.flags.num_partitions,
            rebuild=lambda size, value: complete(job.rebuild(size, value)),
        )
    )


def _completion(job: registry.Job) -> Callable[[Task.Params], Task.Params]:
    """Return a function that fills the sizes of the data into a task of the job's family.

    The sizes are those of the files that the run keeps. Data is read or made for them only where a
    layer does not know its size otherwise.
    """
    from lingvo_gpipe import task
    from lingvo_gpipe.input import Input
    from lingvo_gpipe.run import log_directory

    source: Input = job.task.input.instantiate()
    kept = None if job.logdir is None else log_directory.kept_assets(job.logdir, source.asset_names)
    if kept:
        source.recall(kept)

    def complete(params: Task.Params) -> Task.Params:
        if kept or not task.is_complete(params):
            return task.complete(params, source)
        return params

    return complete


def _logdir(job: registry.Job) -> Path:
    if job.logdir is None:
        raise errors.ParamsError(
            "--logdir=FOLDER is missing: the run's folder of checkpoints and TensorBoard files"
        )
    return job.logdir


MODES: dict[str, registry.Mode] = {
    "train": _train,
    "eval": _evaluate,
    "train_eval": functools.partial(_train, evaluate=True),
    "export": _export,
    "describe": _describe,
    "params": _params,
    "plan": _plan,
}
# Flags that only some modes read, and which of these modes read them.
_MODES_OF_FLAG = {
    "fit": ("plan",),
    "grow": ("plan",),
    "profile": ("plan", "train", "train_eval"),
    "hosts": ("plan", "train", "train_eval"),
    "profile_steps": ("train", "train_eval"),
    "fields": ("params",),
    "text": ("params",),
}
