"""The trainer's own modes: train, eval, train_eval, export, describe, params, plan.

What is slow to import is imported by the mode that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_gpipe import errors, registry, schedule

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task


def register() -> None:
    """Make these modes known to the registry."""
    for name, function in MODES.items():
        registry.add_mode(
            name,
            function,
            [o for o, modes in _MODES_OF_OPTION.items() if name in modes],
            _SPLITS.get(name, lambda _: ()),
        )


def find(name: str, task: Task.Params) -> registry.Mode:
    """Return the function of a mode.

    Raises:
        ParamsError: the task has no such mode; the text names those that it has, and what is
            nearest in meaning.
    """
    known = registry.modes_of(task)
    if name in known or name not in _MEANT:
        return registry.mode(name, task)
    where = f": only {_OF_TASKS[name]} have it" if name in _OF_TASKS else ""
    does = [f"--mode={mode} {_DOES[mode]}" for mode in _MEANT[name] if mode in known]
    raise errors.ParamsError(
        f"no mode {name!r} for {task.name}{where}. {'; '.join(does)}. Use one of {', '.join(known)}"
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


def _train(job: registry.Job) -> None:
    _run_loop(job, "train", evaluate=False)


def _train_eval(job: registry.Job) -> None:
    _run_loop(job, "train_eval", evaluate=True)


def _run_loop(job: registry.Job, mode: str, *, evaluate: bool) -> None:
    from lingvo_gpipe.run.profiles import steps

    chosen = steps.parse(job.options.profile_steps) if job.options.profile_steps else range(0)
    if job.options.profile and not chosen and job.task.model.schedule != schedule.AUTO:
        raise errors.ParamsError(
            f"--profile measures layers, which --mode={mode} needs only for --schedule=auto, or to "
            "compare the steps of --profile_steps=A:B. Add one of them, or leave --profile out"
        )
    if job.options.hosts is not None and job.task.model.schedule != schedule.AUTO:
        raise errors.ParamsError(
            f"--hosts states links and memory by which --schedule=auto chooses; --mode={mode} with "
            "a schedule that is named uses the devices that are there. Add --schedule=auto, or "
            "leave --hosts out"
        )
    from lingvo_gpipe.plan import hosts
    from lingvo_gpipe.run import loop

    cluster = None if job.options.hosts is None else hosts.parse(job.options.hosts)
    profiles = steps.Profiles(chosen, layers=job.options.profile, hosts=cluster)
    if job.options.dry_run:
        if chosen:
            raise errors.ParamsError(
                "--dry_run computes one step, in which programs are traced. Leave --profile_steps "
                "out, or --dry_run"
            )
        loop.dry_run(
            job.task,
            job.logdir,
            evaluate=evaluate,
            start=job.checkpoint,
            report=job.report,
            profiles=profiles,
        )
        return
    loop.run(
        job.task,
        _logdir(job, mode),
        evaluate=evaluate,
        start=job.checkpoint,
        report=job.report,
        should_stop=job.should_stop,
        note_step=job.note_step,
        profiles=profiles,
    )


def _evaluate(job: registry.Job) -> None:
    from lingvo_gpipe.run import eval_mode, process

    logdir = job.logdir if job.checkpoint is not None else _logdir(job, "eval")
    process.prepare_devices(job.task.model)
    if not job.options.follow:
        eval_mode.run(
            job.task,
            logdir,
            which=job.checkpoint,
            report=job.report,
            should_stop=job.should_stop,
        )
        return
    if job.checkpoint is not None:
        raise errors.ParamsError(
            "--follow evaluates each new checkpoint of --logdir, --checkpoint a certain one. "
            "Give one of the two"
        )
    eval_mode.follow(job.task, _logdir(job, "eval"), report=job.report, should_stop=job.should_stop)


def _export(job: registry.Job) -> None:
    from lingvo_gpipe.run import export

    export.run(job.task, _logdir(job, "export"), which=job.checkpoint, report=job.report)


def _describe(job: registry.Job) -> None:
    from lingvo_gpipe.plan import describe

    job.report(describe.describe(_completion(job)(job.task)))


def _params(job: registry.Job) -> None:
    from lingvo_gpipe.hyperparams import listing

    if job.options.text:
        if job.options.fields is not None:
            raise errors.ParamsError("--text prints all fields, --fields some. Leave one out")
        job.report(job.task.to_text().rstrip("\n"))
        return
    pattern = job.options.fields or "*"
    lines = listing.lines(job.task, pattern)
    if not lines:
        raise errors.ParamsError(
            f"no field of {job.model} matches {pattern!r}, a pattern of whole paths. "
            f"Try --fields={listing.near(job.task, pattern)!r}; without --fields, all "
            "are listed"
        )
    job.report("\n".join(lines))


def _plan(job: registry.Job) -> None:
    from lingvo_gpipe.plan import report
    from lingvo_gpipe.run import process

    if job.options.profile:
        process.prepare_devices(job.task.model)
    complete = _completion(job)
    job.report(
        report.plan(
            complete(job.task),
            fit=job.options.fit,
            grow=job.options.grow,
            profile=job.options.profile,
            cluster=job.options.hosts,
            partitions=job.options.num_partitions,
            rebuild=lambda size, value: complete(job.rebuild(size, value)),
        )
    )


def _completion(job: registry.Job) -> Callable[[Task.Params], Task.Params]:
    """Return a function that fills the sizes of the data into a task of the job's family.

    The sizes are those of the files that the run keeps, or of the data that is there already. Data
    is read or made for them only where a layer does not know its size otherwise.
    """
    from lingvo_gpipe import task
    from lingvo_gpipe.input import Input
    from lingvo_gpipe.run import log_directory

    source: Input = job.task.input.instantiate()
    kept = None if job.logdir is None else log_directory.kept_assets(job.logdir, source.asset_names)
    if kept:
        source.recall(kept)
    is_there = bool(kept) or source.is_there()

    def complete(params: Task.Params) -> Task.Params:
        if is_there or not task.is_complete(params):
            return task.complete(params, source)
        return params

    return complete


def _logdir(job: registry.Job, mode: str) -> Path:
    if job.logdir is None:
        raise errors.ParamsError(
            f"--mode={mode} needs --logdir=FOLDER, for checkpoints and TensorBoard files; it is "
            "made where it is not there"
        )
    return job.logdir


MODES: dict[str, registry.Mode] = {
    "train": _train,
    "eval": _evaluate,
    "train_eval": _train_eval,
    "export": _export,
    "describe": _describe,
    "params": _params,
    "plan": _plan,
}
# Modes that only some tasks add, and the models that have them.
_OF_TASKS = dict.fromkeys(("decode", "score"), "translation models (mt.*)")
# What a user may ask for → the modes that serve best where they are there.
_MEANT = {
    **dict.fromkeys(("decode", "predict", "infer", "inference"), ("decode", "export", "eval")),
    **dict.fromkeys(("score", "test", "validate", "evaluate", "validation"), ("score", "eval")),
    "fit": ("train", "train_eval"),
    "serve": ("export",),
}
_DOES = {
    "decode": "writes what the model makes of a file",
    "score": "compares it with references",
    "export": "saves a program that predicts",
    "eval": "measures on held-out examples, and shows some with predictions in TensorBoard",
    "train": "trains",
    "train_eval": "trains and evaluates",
}
# Which parts of the data the modes read; None is that of training.
_SPLITS: dict[str, registry.Splits] = {
    "train": lambda _: (None,),
    "train_eval": lambda task: (None, task.eval.split),
    "eval": lambda task: (task.eval.split,),
}
# Options that only some modes read, and which of these modes read them.
_MODES_OF_OPTION = {
    "follow": ("eval",),
    "dry_run": ("train", "train_eval"),
    "fit": ("plan",),
    "grow": ("plan",),
    "profile": ("plan", "train", "train_eval"),
    "hosts": ("plan", "train", "train_eval"),
    "profile_steps": ("train", "train_eval"),
    "fields": ("params",),
    "text": ("params",),
}
