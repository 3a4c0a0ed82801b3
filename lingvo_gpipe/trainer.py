"""The program around a model: reads flags, sets fields, calls the mode.

    python -m lingvo_gpipe.trainer --model=image.digits.ConvNet --logdir=runs/digits

It ends with 0 when done, 1 after a user's mistake (one line, no traceback), 128 + the signal's
number (143 after SIGTERM, 130 after Ctrl-C) when a signal made it save and leave before it was
done. A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_gpipe import errors, hyperparams, modes, recipes, registry
from lingvo_gpipe.cluster import child, launch
from lingvo_gpipe.console import output
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.console.signals import StopRequest
from lingvo_gpipe.schedule import AUTO, SCHEDULES

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

_USAGE = """\
Trains, evaluates, describes and plans pipelined models.

  python -m lingvo_gpipe.trainer --list_models
  python -m lingvo_gpipe.trainer --model=NAME --mode=describe
  python -m lingvo_gpipe.trainer --model=NAME --logdir=FOLDER --mode=train_eval
"""

# Flags that only set a field of the task.
_FIELD_OF_FLAG = {
    "max_steps": "train.max_steps",
    "save_interval_steps": "train.save_interval_steps",
    "seed": "model.seed",
    "num_partitions": "model.num_partitions",
    "cells_per_device": "model.cells_per_device",
    "num_micro_batches": "model.num_micro_batches",
    "num_replicas": "model.num_replicas",
    "schedule": "model.schedule",
    "recompute": "model.recompute",
}
# What a recipe says of its devices, without it.
_FOR_PARTITIONS = {"cuts": None, "devices": None, "device_speeds": ()}
_DEFAULT_MODE = "train"
_WITHOUT_WORKERS = ("describe", "params", "plan", "export")


def main() -> None:
    """Run the command line's arguments and end the process."""
    if not sys.warnoptions:  # python -W asks for them
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Do what the arguments `argv` (without the program's name) ask; return the exit code."""

    def work() -> int:
        values = read_flags(argv)
        values.mode = values.mode or _DEFAULT_MODE
        channel = child.channel()
        if channel is not None:
            return _run_as_chief(values, channel)
        uses_workers = values.list_models is None and values.mode not in _WITHOUT_WORKERS
        code = launch.run(values, argv, output.note, uses_workers=uses_workers)
        if code is None:
            output.quiet_tensorflow("2")
            code = _run(values)
        return code

    return output.exit_code(work)


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of `argv`.

    Raises:
        ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind.
        SystemExit: help was asked for, and is printed.
    """
    return flags().read(argv)


def flags() -> Flags:
    """Return the trainer's flags."""
    flags = Flags(_USAGE)
    flags.text(
        "model",
        "Name of the model: the path of its class below params/. A run in --logdir names its own.",
    )
    flags.text("params", "File with params as text, in place of --model; --mode=params --text.")
    flags.text("logdir", "Folder of checkpoints and TensorBoard files; made where it is missing.")
    flags.text(
        "mode",
        "train, eval, train_eval, export, describe, params, plan, or one of the task; "
        "train if not given.",
    )
    flags.add_argument(
        "--list_models",
        nargs="?",
        const="*",
        help="Lists the models' names, or those that match a glob given with it.",
    )
    flags.repeated("params_override", "Sets a field of the task: PATH=VALUE, train.accumulate=2.")
    flags.repeated("params_package", "A package of your own with params files.")
    flags.text("data_dir", "Folder of the data, for inputs that read one.")
    flags.add_argument(
        "--data",
        choices=["made"],
        help="made: examples are made up, to rehearse a run without its data.",
    )
    flags.text("checkpoint", "Checkpoint, or run, to evaluate or export, or to start from.")
    flags.number("max_steps", "Updates to train for.")
    flags.number("save_interval_steps", "Updates between two checkpoints.")
    flags.number("seed", "Seed of the weights, of the data's order and of every random number.")
    flags.number("num_partitions", "K: number of devices, each with V cells.")
    flags.number("cells_per_device", "V: cells on each device; what the schedule has if not given.")
    flags.number("num_micro_batches", "M: micro-batches per mini-batch; auto may choose it.")
    flags.number("num_replicas", "R: replicas of the pipeline, each of K devices and a part of M.")
    flags.text("schedule", f"auto, {', '.join(SCHEDULES)}, a table as text, or @FILE.")
    flags.text(
        "recompute",
        "full, early, except_last, never or recompute_grad; or one for each cell: full,full,never.",
    )
    flags.text("fields", "With --mode=params: only fields that match, 'train.optimizer.*'.")
    flags.switch("text", "With --mode=params: prints them as text that --params reads.")
    flags.text("fit", "With --mode=plan: bytes of a device, such as 8GiB, to fill with --grow.")
    flags.text("grow", "With --fit: the field whose largest value is searched.")
    flags.switch("profile", "Plans, or chooses by --schedule=auto, by measured times of layers.")
    flags.text("profile_steps", "Steps whose slots are timed, A:B; see TensorBoard and timeline/.")
    flags.text(
        "hosts", "For a plan, or --schedule=auto: hosts x devices, and speeds: 2x4,between=1.25GB."
    )
    launch.add_flags(flags)
    return flags


def _run_as_chief(values: argparse.Namespace, channel: child.Channel) -> int:
    """Do the work with the workers of the supervisor that started this process."""
    output.quiet_tensorflow("3")  # the supervisor reports the loss of a worker
    from lingvo_gpipe.cluster import chief

    folder = values.logdir and os.path.expanduser(values.logdir)
    note_step = chief.make_current(channel, folder).note_step
    try:
        return _run(values, note_step)
    except Exception as error:
        if not chief.lost_a_worker(error):
            raise
        output.note(f"the chief ends, to be started again: {error}")
        return child.START_AGAIN


def _run(values: argparse.Namespace, note_step: Callable[[int], None] = lambda _: None) -> int:
    """List models, or find the model and call the mode; return the exit code."""
    modes.register()
    models = registry.Registry(values.params_package)
    if values.list_models is not None:
        _list_models(models, values.list_models)
        return 0
    trains = values.mode.startswith("train")
    if values.checkpoint is not None:
        named = Path(values.checkpoint).expanduser()
        of_run = named / "checkpoints"  # if the folder of a run is named
        values.checkpoint = str(of_run if of_run.is_dir() else named)
    values.model, recipe = recipes.find(
        models,
        model=values.model,
        params=values.params,
        logdir=values.logdir,
        checkpoint=values.checkpoint,
        trains=trains,
    )
    task = task_of(values, recipe)  # which may register a mode
    for name in _FOR_PARTITIONS:
        if recipe.task().model.get(name) and not task.model.get(name):
            output.note(
                f"model.{name} of {values.model} is left out: it is for another number of "
                f"partitions than {task.model.num_partitions}"
            )
    mode = registry.mode(values.mode, task)
    modes.check_flags(values)
    chooses = trains and task.model.schedule == AUTO
    if values.hosts is None and (chooses or values.mode == "plan"):
        values.hosts = launch.hosts(values)  # plan and training choose by the same hosts
    if task.model.schedule == AUTO and not trains and values.mode not in ("plan", "params"):
        task = modes.with_kept_choice(task, values.logdir)
    if values.mode not in modes.MODES:
        from lingvo_gpipe.run import process

        process.prepare_devices(task.model)  # before the task's mode begins TensorFlow
    with StopRequest() as stop:
        mode(
            registry.Job(
                model=values.model,
                task=task,
                logdir=None if values.logdir is None else Path(values.logdir).expanduser(),
                checkpoint=values.checkpoint,
                report=output.report,
                should_stop=stop.should_stop,
                note_step=note_step,
                rebuild=lambda size, value: task_of(values, recipe.resized(size, value)),
                flags=values,
            )
        )
    return 0 if stop.seen is None else 128 + stop.seen


def _list_models(models: registry.Registry, pattern: str) -> None:
    names = models.names(pattern)
    for where, why in models.broken.items():
        print(f"{where} is left out: {why}", file=sys.stderr)
    if not names:
        raise errors.ParamsError(f"no model matches {pattern!r}. --list_models shows all")
    output.report("\n".join(names))


def task_of(values: argparse.Namespace, recipe: registry.Model) -> Task.Params:
    """Return the recipe's task with flags and overrides applied.

    Raises:
        ParamsError: an override names no field, or its value does not fit.
    """
    task = recipe.task()
    if not isinstance(task, hyperparams.Params):
        raise errors.ParamsError(
            f"{values.model}: task() returns {type(task).__name__}. Let it return task.Task.Params"
        )
    task.set_path("name", values.model)
    if values.num_partitions not in (None, task.model.num_partitions):
        task.model.set(_FOR_PARTITIONS)
    for flag, path in _FIELD_OF_FLAG.items():
        if getattr(values, flag) is not None:
            task.set_path(path, getattr(values, flag))
    if values.data_dir is not None:
        _set_data_dir(task, values.data_dir, values.model)
    for assignment in values.params_override:
        try:
            task.override(assignment)
        except errors.ParamsError as error:
            text = str(error).replace(task.class_name(), task.name, 1)
            raise errors.ParamsError(text) from error
    if values.data is None:
        return task
    from lingvo_gpipe.input import synthetic

    is_of_run = isinstance(recipe, recipes.FromText) and values.params is None
    if is_of_run and not synthetic.is_synthetic(task):
        raise errors.ParamsError(
            f"--data=made, but {values.logdir or values.checkpoint} holds a run on data. Leave the "
            "flag out, or rehearse in another --logdir"
        )
    return synthetic.task(task)


def _set_data_dir(task: Task.Params, folder: str, model: str) -> None:
    places = [path for path, _, _ in task.input.iter_paths() if path.split(".")[-1] == "data_dir"]
    if not places:
        raise errors.ParamsError(
            f"--data_dir={folder}: {model} reads no folder (its input is "
            f"{task.input.class_name()}). Leave the flag out"
        )
    for path in places:
        task.input.set_path(path, folder)


if __name__ == "__main__":
    main()
