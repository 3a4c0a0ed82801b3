"""The program around a model: reads flags, sets fields, calls the mode.

    python -m lingvo_gpipe.trainer --model=image.digits.ConvNet --logdir=runs/digits

It ends with 0 when done, 1 after a user's mistake (one line, no traceback), 128 + the signal's
number (143 after SIGTERM, 130 after Ctrl-C) when a signal made it save and leave before it was
done. A second signal ends it at once.
"""

from __future__ import annotations

import os
import signal
import sys

# Ctrl-C while Python imports the rest ends a program, too, without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
    __name__ == "__main__" or os.path.basename(sys.argv[0]) == "lingvo-gpipe"
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import re
import shlex
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_gpipe import errors, hyperparams, modes, recipes, registry
from lingvo_gpipe.cluster import child, launch
from lingvo_gpipe.cluster.chief_supervisor import LOST_EXIT_CODE
from lingvo_gpipe.console import command, output
from lingvo_gpipe.console.flags import Flags
from lingvo_gpipe.console.signals import StopRequest
from lingvo_gpipe.schedule import AUTO, SCHEDULES

if TYPE_CHECKING:
    from lingvo_gpipe.input import Input
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
# Modes that choose what is auto, or only print params.
_CHOOSING = ("train", "train_eval", "plan", "params")
# Flags that only some modes read.
_OPTIONS = tuple(
    field.name for field in dataclasses.fields(registry.Options) if field.name != "num_partitions"
)
_DEFAULT_MODE = "train"
_MADE = "made"
_WITHOUT_WORKERS = ("describe", "params", "plan", "export")


def main() -> None:
    """Run the command line's arguments and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as before the imports
    if not sys.warnoptions:  # python -W asks for them
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Do what the arguments `argv` (without the program's name) ask; return the exit code."""

    def work() -> command.Exit:
        values = read_flags(argv)
        if values is None:
            return command.Exit()
        # The result of training is in its folder; of all other modes the output is the result.
        mode = values.mode or _DEFAULT_MODE
        output_required = not mode.startswith("train")
        channel = child.channel()
        if channel is not None:
            return command.Exit(_run_as_chief(values, channel), output_required)
        uses_workers = values.list_models is None and mode not in _WITHOUT_WORKERS
        code = launch.run(values, argv, output.note, uses_workers=uses_workers)
        if code is None:
            output.quiet_tensorflow("2")
            code = _run(values)
        return command.Exit(code, output_required)

    return command.exit_code(work)


def read_flags(argv: Sequence[str]) -> argparse.Namespace | None:
    """Return the flags of `argv`; None where it asked for help, which is printed.

    Raises:
        ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind.
    """
    return _flags().read(argv)


def _flags() -> Flags:
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
    flags.optional_text(
        "list_models", "Lists the models' names, or those that match a glob given with it.", "*"
    )
    flags.repeated("params_override", "Sets a field of the task: PATH=VALUE, train.accumulate=2.")
    flags.repeated("params_package", "A package of your own with params files.")
    flags.text("data_dir", "Folder of the data, for inputs that read one.")
    flags.text("data", "made: examples are made up, to rehearse a run without its data.")
    flags.text("checkpoint", "Checkpoint to evaluate, or export, or to start from.")
    flags.switch("follow", "With --mode=eval: evaluates each new checkpoint of a run to its end.")
    flags.switch("dry_run", "Tries input, a step, an evaluation, a checkpoint; leaves nothing.")
    flags.number("max_steps", "Updates to train for.")
    flags.number("save_interval_steps", "Updates between two checkpoints.")
    flags.number("seed", "Seed of the weights, of the data's order and of every random number.")
    flags.number(
        "num_partitions",
        "K: number of devices, each with V cells.",
    )
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
    from lingvo_gpipe.cluster import connection

    folder = values.logdir and os.path.expanduser(values.logdir)
    chief = connection.open_to(channel, folder)
    try:
        return _run(values, chief.note_step)
    except Exception as error:
        if not connection.lost_a_worker(error):
            raise
        output.note(f"the chief ends, to be started again: {error}")
        return LOST_EXIT_CODE


def _run(values: argparse.Namespace, note_step: Callable[[int], None] = lambda _: None) -> int:
    """List models, or find the model and call the mode; return the exit code."""
    modes.register()
    models = registry.Registry(values.params_package)
    if values.list_models is not None:
        _list_models(models, values.list_models)
        return 0
    name = values.mode or _DEFAULT_MODE
    values.model, recipe = recipes.find(
        models,
        model=values.model,
        params=values.params,
        logdir=values.logdir,
        checkpoint=values.checkpoint,
        trains=name.startswith("train"),
    )
    task = task_of(values, recipe)  # which may register a mode
    mode = modes.find(name, task)
    _check_options(values, name)
    if task.model.schedule == AUTO and name not in _CHOOSING:
        task = modes.with_kept_choice(task, values.logdir)
    # Plan and training choose by the same hosts.
    chooses = task.model.schedule == AUTO and name.startswith("train")
    if values.hosts is None and (name == "plan" or chooses):
        values.hosts = launch.hosts(values)
    _check_partitions(values, task)
    _check_data(task, registry.splits_of(name, task), of_run=_is_of_run(values, recipe))
    if name not in modes.MODES:
        from lingvo_gpipe.run import process

        process.prepare_devices(task.model)  # before the task's mode begins TensorFlow
    with StopRequest() as stop:
        mode(
            registry.Job(
                model=values.model,
                task=task,
                logdir=None if values.logdir is None else Path(os.path.expanduser(values.logdir)),
                checkpoint=values.checkpoint and os.path.expanduser(values.checkpoint),
                report=output.report,
                should_stop=stop.should_stop,
                note_step=note_step,
                rebuild=lambda size, value: task_of(values, recipe.resized(size, value)),
                options=registry.Options(
                    num_partitions=values.num_partitions,
                    **{option: getattr(values, option) for option in _OPTIONS},
                ),
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
    for flag, path in _FIELD_OF_FLAG.items():
        if getattr(values, flag) is not None:
            task.set_path(path, getattr(values, flag))
    if values.data_dir is not None:
        _set_data_dir(task, values.data_dir, values.model)
    for assignment in values.params_override:
        try:
            task.override(assignment)
        except errors.ParamsError as error:
            raise errors.ParamsError(_override_text(error, assignment, task)) from error
    return task if values.data is None else _with_made_data(values, recipe, task)


def _with_made_data(
    values: argparse.Namespace, recipe: registry.Model, task: Task.Params
) -> Task.Params:
    """Return a task with made-up examples in place of its data."""
    from lingvo_gpipe.input import synthetic

    if values.data != _MADE:
        raise errors.ParamsError(
            f"--data={values.data} is not possible: only --data={_MADE}, to rehearse a run. The "
            "folder of the data is --data_dir"
        )
    if _is_of_run(values, recipe) and not synthetic.is_synthetic(task):
        raise errors.ParamsError(
            f"--data={_MADE}, but {values.logdir or values.checkpoint} holds a run on data. Leave "
            "the flag out, or rehearse in another --logdir"
        )
    return synthetic.task(task)


def _is_of_run(values: argparse.Namespace, recipe: registry.Model) -> bool:
    """Return whether a run in a folder has kept the params."""
    return isinstance(recipe, recipes.Kept) and values.params is None


def _check_data(task: Task.Params, splits: Sequence[str | None], *, of_run: bool) -> None:
    """Refuse data that is missing.

    Args:
        task: params of the task.
        splits: the parts of the data that are needed; see `registry.splits_of`.
        of_run: a run has kept the params; its data is not replaced by a rehearsal's.
    """
    if not splits:
        return
    source: Input = task.input.instantiate()
    try:
        for split in splits:
            source.check_there(split)
    except errors.InputError as error:
        if of_run:
            raise
        first, *rest = str(error).split("\n", 1)
        text = f"{first.rstrip('.')}. --data={_MADE} rehearses the run without it"
        raise errors.InputError("\n".join([text, *rest])) from error


def _override_text(error: errors.ParamsError, assignment: str, task: Task.Params) -> str:
    """Return the message for a wrong override: it names the model and the way out."""
    text = str(error)
    if text.startswith(type(task).class_name()):
        text = task.name + text.removeprefix(type(task).class_name())
    near: tuple[str, ...] = ()
    if isinstance(error, hyperparams.UnknownFieldError):
        near = error.nearest
    elif isinstance(error, hyperparams.HoldsParamsError):
        near = error.instead
    path, _, value = (part.strip() for part in assignment.partition("="))
    # A field of several values may lack only the brackets.
    tried = [*((each, value) for each in near), (path, f"[{value}]"), (path, f"[{value!r}]")]
    tried += [(path, v) for name in hyperparams.classes_like(value) for v in (f"[{name}]", name)]
    for override in filter(None, (task.suggestion(*each) for each in tried)):
        return f"{text}. Try --params_override={_quoted(override)}"
    if near:
        return text
    present = _present(task, assignment)
    return text if present is None else f"{text}. Try --params_override={present}, as it is now"


def _present(task: Task.Params, assignment: str) -> str | None:
    """Return the assignment of the named field's present value; None where it has no value."""
    path, sign, _ = assignment.partition("=")
    lines = task.to_text().splitlines() if sign else []
    start = f"{path.strip()}: "
    value = next((line.removeprefix(start) for line in lines if line.startswith(start)), None)
    if value is None:
        return None
    # A plain string needs no quotes, which a shell would ask to be quoted again.
    word = re.fullmatch(r"'([A-Za-z_][\w./:-]*)'", value)
    plain = word[1] if word and word[1] not in ("None", "True", "False") else value
    return _quoted(f"{path.strip()}={plain}")


def _quoted(word: str) -> str:
    """Return a word as a shell reads it, in double quotes if it has single quotes inside."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def _set_data_dir(task: Task.Params, folder: str, model: str) -> None:
    places = [path for path, _, _ in task.input.iter_paths() if path.split(".")[-1] == "data_dir"]
    if not places:
        raise errors.ParamsError(
            f"--data_dir={folder}: {model} reads no folder (its input is "
            f"{task.input.class_name()}). Leave the flag out"
        )
    for path in places:
        task.input.set_path(path, folder)


def _check_partitions(values: argparse.Namespace, task: Task.Params) -> None:
    wanted = values.num_partitions
    if wanted is None or not task.model.layers:
        return
    from lingvo_gpipe import network

    try:
        count = len(network.layer_params(task.model))
    except errors.LayerError:
        return  # the input may still complete the layers; if not, their analysis says it
    if not 1 <= wanted <= count:
        raise errors.PartitionError(
            f"--num_partitions={wanted}, but {values.model} has {count} layers. "
            f"Use 1 to {count}; --mode=describe lists them"
        )


def _check_options(values: argparse.Namespace, mode: str) -> None:
    """Refuse a flag that the mode does not read."""
    for flag in _OPTIONS:
        readers = registry.modes_that_read(flag)
        if getattr(values, flag) and mode not in readers:
            raise errors.ParamsError(
                f"--{flag} goes with --mode={' or '.join(readers)}, not with --mode={mode}"
            )


if __name__ == "__main__":
    main()
