"""The program around a model: reads flags, sets fields, calls the mode.

    python -m lingvo_gpipe.trainer --model=image.digits.ConvNet --logdir=runs/digits

It alone prints for users and ends the process: 0 when done, 1 after a user's mistake (one line, no
traceback), 128 + the signal's number (143 after SIGTERM, 130 after Ctrl-C) when a signal made it
save and leave before it was done. A second signal ends it at once. What is slow to import is
imported when a mode needs it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from absl import flags

from lingvo_gpipe import errors, hyperparams, registry
from lingvo_gpipe.console import command

_USAGE = """\
Trains, evaluates, describes and plans pipelined models.

  python -m lingvo_gpipe.trainer --list_models
  python -m lingvo_gpipe.trainer --model=NAME --mode=describe
  python -m lingvo_gpipe.trainer --model=NAME --logdir=FOLDER --mode=train_eval
"""

# Flags that only set a field of the task, whose help and default are the field's.
_FIELD_OF_FLAG = {
    "max_steps": "train.max_steps",
    "save_interval_steps": "train.save_interval_steps",
    "seed": "model.seed",
    "num_partitions": "model.num_partitions",
    "num_micro_batches": "model.num_micro_batches",
    "schedule": "model.schedule",
    "recompute": "model.recompute",
}
# Flags that belong to single modes, and to which of the trainer's own.
_MODES_OF_FLAG = {
    "follow": ("eval",),
    "dry_run": ("train", "train_eval"),
    "fit": ("plan",),
    "grow": ("plan",),
    "profile": ("plan",),
}


def _flags() -> command.Flags:
    """Return the trainer's flags."""
    known = command.Flags("lingvo-gpipe", _USAGE)
    known.text("model", "Name of the model: where its class lives below params/.")
    known.text("logdir", "Folder of checkpoints and TensorBoard files; made where it is not there.")
    modes = "train, eval, train_eval, export, describe, plan, or one that the task brings."
    known.text("mode", modes, "train")
    known.text("list_models", "Lists the models' names, or those that match a glob given with it.")
    known.repeated("params_override", "Sets a field of the task: PATH=VALUE, train.accumulate=2.")
    known.repeated("params_package", "A package of your own with params files.")
    known.text("data_dir", "Folder of the data, for inputs that read one.")
    known.text("checkpoint", "Checkpoint to evaluate, to export, or to start from.")
    known.switch("follow", "With --mode=eval: evaluates each new checkpoint of a run to its end.")
    known.switch("dry_run", "Tries input, a step, an evaluation, a checkpoint; leaves nothing.")
    known.number("max_steps", "Updates to train for.")
    known.number("save_interval_steps", "Updates between two checkpoints.")
    known.number("seed", "Seed of the weights, of the data's order and of every random number.")
    known.number(
        "num_partitions",
        "K: devices, each with a cell, or as a table says.",
    )
    known.number("num_micro_batches", "M: micro-batches per mini-batch.")
    known.text("schedule", "gpipe, 1f1b, or a table as text.")
    known.text("recompute", "full, except_last or never; or one for each cell: full,full,never.")
    known.text("fit", "With --mode=plan: bytes of a device, such as 8GiB, to fill with --grow.")
    known.text("grow", "With --fit: the field whose largest value is looked for.")
    known.switch("profile", "With --mode=plan: runs the layers; plans by their measured times.")
    return known


def read_flags(argv: Sequence[str]) -> flags.FlagValues | None:
    """Return the flags of `argv`; None where it asked for help, which is printed.

    Raises:
        ParamsError: a flag is unknown, misspelt, or has a value of the wrong kind.
    """
    arguments = list(argv)
    for index, argument in enumerate(arguments):
        if argument in ("-list_models", "--list_models"):
            # absl knows no flag whose value may be left out.
            following = arguments[index + 1 : index + 2]
            glob = [word for word in following if not word.startswith("-")]
            arguments[index : index + 1 + len(glob)] = [f"--list_models={(glob or '*')[0]}"]
            break
    return _flags().read(arguments)


def _task(values: flags.FlagValues, recipe: registry.Model) -> Any:
    """Return the recipe's task with flags and overrides applied.

    Raises:
        ParamsError: an override names no field, or its value does not fit.
    """
    task = recipe.task()
    if not isinstance(task, hyperparams.Params):
        raise errors.RegistryError(
            f"{values.model}: task() gives {type(task).__name__}. Let it return task.Task.Params"
        )
    task.set_path("name", values.model)
    for flag, path in _FIELD_OF_FLAG.items():
        if values[flag].value is not None:
            task.set_path(path, values[flag].value)
    if values.data_dir is not None:
        _set_data_dir(task, values.data_dir, values.model)
    for assignment in values.params_override:
        try:
            task.override(assignment)
        except errors.ParamsError as error:
            raise errors.ParamsError(_override_text(error, assignment, task)) from error
    return task


def _override_text(error: errors.ParamsError, assignment: str, task: Any) -> str:
    """Return what is wrong with an override: of the model, and with the way out."""
    text = str(error)
    if text.startswith(type(task).class_name()):
        text = task.name + text.removeprefix(type(task).class_name())
    if isinstance(error, hyperparams.UnknownFieldError) and error.nearest:
        value = assignment.partition("=")[2]
        return f"{text}. Try --params_override={error.nearest[0]}={value}"
    present = _present(task, assignment)
    return text if present is None else f"{text}. Try --params_override={present}, as it is now"


def _present(task: Any, assignment: str) -> str | None:
    """Return the assignment that leaves the named field as it is; None where it has no value."""
    path, sign, _ = assignment.partition("=")
    lines = task.to_text().splitlines() if sign else []
    start = f"{path.strip()}: "
    found = next((line.removeprefix(start) for line in lines if line.startswith(start)), None)
    if found is None:
        return None
    # A plain string needs no quotes, which a shell would ask to be quoted again.
    word = re.fullmatch(r"'([A-Za-z_][\w./:-]*)'", found)
    plain = word[1] if word and word[1] not in ("None", "True", "False") else found
    return shlex.quote(f"{path.strip()}={plain}")


def _set_data_dir(task: Any, folder: str, model: str) -> None:
    places = [path for path, _, _ in task.input.iter_paths() if path.split(".")[-1] == "data_dir"]
    if not places:
        raise errors.ParamsError(
            f"--data_dir={folder}: {model} reads no folder (its input is "
            f"{task.input.class_name()}). Leave the flag out"
        )
    for path in places:
        task.input.set_path(path, folder)


def _check_partitions(values: flags.FlagValues, task: Any) -> None:
    wanted, count = values.num_partitions, len(task.model.layers)
    if wanted is not None and count and not 1 <= wanted <= count:
        raise errors.PartitionError(
            f"--num_partitions={wanted}, but {values.model} has {count} layers. "
            f"Use 1 to {count}; --mode=describe lists them"
        )


def _check_mode(values: flags.FlagValues) -> None:
    """Refuse a flag that the mode would not read."""
    for flag in _MODES_OF_FLAG:
        modes = registry.modes_that_read(flag)
        if values[flag].value and values.mode not in modes:
            raise errors.ParamsError(
                f"--{flag} goes with --mode={' or '.join(modes)}, not with --mode={values.mode}"
            )


class _Signals:
    """Turns the first SIGTERM or Ctrl-C into a wish to stop; the second ends the process.

    From when the wish is first asked for: a mode that never asks is ended by the first signal.

    Attributes:
        told: the signal that the mode was told of, and so cut off by; None: it went to its end.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self.told: int | None = None

    def __enter__(self) -> _Signals:
        return self

    def should_stop(self) -> bool:
        if not self._before:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        self.told = self._received
        return self.told is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number
        # Python's handler waits for the operation that runs; the system's own does not.
        for known in self._before:
            signal.signal(known, signal.SIG_DFL)

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


def _logdir(job: registry.Job, mode: str) -> Path:
    if job.logdir is None:
        raise errors.ParamsError(
            f"--mode={mode} needs --logdir=FOLDER, for checkpoints and TensorBoard files; it is "
            "made where it is not there"
        )
    return job.logdir


def _describe(job: registry.Job) -> None:
    from lingvo_gpipe.plan import describe

    job.report(describe.describe(_known(job)(job.task)))


def _known(job: registry.Job) -> Callable[[Any], Any]:
    """Return what gives a task, or another member of its family, the sizes of its data.

    They are those that the run keeps, or of the data that is there already. Data is read or made
    for them only where a layer does not know its size without.
    """
    from lingvo_gpipe import task
    from lingvo_gpipe.run import log_directory

    source = job.task.input.instantiate()
    kept = None if job.logdir is None else log_directory.kept_assets(job.logdir, source.asset_names)
    if kept:
        source.recall(kept)
    is_there = bool(kept) or source.is_there()

    def known(given: Any) -> Any:
        needed = is_there or not task.is_complete(given)
        return task.complete(given, source) if needed else given

    return known


def _plan(job: registry.Job) -> None:
    from lingvo_gpipe.plan import report
    from lingvo_gpipe.run import process

    options = job.options
    if options["profile"]:
        process.prepare_devices(job.task.model)
    known = _known(job)
    job.report(
        report.plan(
            known(job.task),
            fit=options["fit"],
            grow=options["grow"],
            profile=options["profile"],
            partitions=options["num_partitions"],
            rebuild=lambda size, value: known(job.rebuild(size, value)),
        )
    )


def _training(*, evaluate: bool) -> Callable[[registry.Job], None]:
    def train(job: registry.Job) -> None:
        from lingvo_gpipe.run import loop

        if job.options["dry_run"]:
            loop.dry_run(
                job.task,
                job.logdir,
                evaluate=evaluate,
                start=job.checkpoint,
                report=job.report,
            )
            return
        loop.run(
            job.task,
            _logdir(job, "train_eval" if evaluate else "train"),
            evaluate=evaluate,
            start=job.checkpoint,
            report=job.report,
            should_stop=job.should_stop,
        )

    return train


def _evaluate(job: registry.Job) -> None:
    from lingvo_gpipe.run import eval_mode, process

    logdir = job.logdir if job.checkpoint is not None else _logdir(job, "eval")
    process.prepare_devices(job.task.model)
    if job.options["follow"]:
        if job.checkpoint is not None:
            raise errors.ParamsError(
                "--follow evaluates each new checkpoint of --logdir, --checkpoint a certain one. "
                "Give one of the two"
            )
        eval_mode.follow(
            job.task, _logdir(job, "eval"), report=job.report, should_stop=job.should_stop
        )
    else:
        eval_mode.run(
            job.task,
            logdir,
            which=job.checkpoint,
            report=job.report,
            should_stop=job.should_stop,
        )


def _export(job: registry.Job) -> None:
    from lingvo_gpipe.run import export

    export.run(job.task, _logdir(job, "export"), which=job.checkpoint, report=job.report)


_CORE_MODES: dict[str, registry.Mode] = {
    "train": _training(evaluate=False),
    "eval": _evaluate,
    "train_eval": _training(evaluate=True),
    "export": _export,
    "describe": _describe,
    "plan": _plan,
}


def _prepare_devices(task: Any) -> None:
    """Make the devices of the model before the mode of a task has TensorFlow begin."""
    from lingvo_gpipe.run import process

    process.prepare_devices(task.model)


def _load_tensorflow() -> None:
    """Import TensorFlow without the lines that it writes on any machine without a GPU.

    They bypass Python and every log level. Whatever is not of that kind is passed on.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if not _NOISE.match(line) and ("cuInit" not in line or _has_nvidia()):
                    print(line, file=sys.stderr)


_NOISE = re.compile(r"I\d{4} |WARNING: All log messages before absl::InitializeLog")


def _has_nvidia() -> bool:
    return Path("/dev/nvidiactl").exists()


def _list_models(found: registry.Registry, pattern: str) -> None:
    names = found.names(pattern)
    for where, why in found.broken.items():
        print(f"{where} is left out: {why}", file=sys.stderr)
    if not names:
        raise errors.RegistryError(f"no model matches {pattern!r}. --list_models shows all")
    command.report("\n".join(names))


def _run(values: flags.FlagValues) -> int:
    for name, function in _CORE_MODES.items():
        options = [flag for flag, modes in _MODES_OF_FLAG.items() if name in modes]
        registry.add_mode(name, function, options)
    found = registry.Registry(values.params_package)
    _load_tensorflow()
    if values.list_models is not None:
        _list_models(found, values.list_models)
        return 0
    if values.model is None:
        raise errors.ParamsError("--model=NAME is missing. --list_models shows all names")
    recipe = found.model(values.model)()
    # After the model, since its task may have brought the mode.
    mode = registry.mode(values.mode)
    task = _task(values, recipe)
    _check_mode(values)
    _check_partitions(values, task)
    if values.mode not in _CORE_MODES:
        _prepare_devices(task)
    with _Signals() as signals:
        mode(
            registry.Job(
                model=values.model,
                task=task,
                logdir=None if values.logdir is None else Path(os.path.expanduser(values.logdir)),
                checkpoint=values.checkpoint and os.path.expanduser(values.checkpoint),
                report=command.report,
                should_stop=signals.should_stop,
                rebuild=lambda size, value: _task(values, recipe.resized(size, value)),
                options={name: values[name].value for name in (*_MODES_OF_FLAG, "num_partitions")},
            )
        )
    return 0 if signals.told is None else 128 + signals.told


def run(argv: Sequence[str]) -> int:
    """Do what the arguments `argv` (without the program's name) ask; return the exit code."""
    # TensorFlow reads it when it is first imported, and speaks of its own affairs otherwise.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    values = None
    try:
        try:
            values = read_flags(argv)
            code = 0 if values is None else _run(values)
        except errors.UserError as error:
            print(command.mistake(error), file=sys.stderr)
            code = 1
        # What training comes to is in its folder; of all else the output is the result.
        lost = not command.finish() and (values is None or not values.mode.startswith("train"))
        return code or int(lost)
    except BrokenPipeError:
        command.drop_output()  # whoever read has left (head, a pager)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def main() -> None:
    """Run the command line's arguments and end the process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
