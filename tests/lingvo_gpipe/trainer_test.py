"""What a user sees: flags, one-line errors, the lines that a run prints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, registry, tensorflow_import, trainer
from lingvo_gpipe.run import process
from tests.tiny_task import tiny_task

PACKAGE = "models_of_trainer_test"
MODELS = """
import keras
from tests import tiny_task
from lingvo_gpipe import registry

class Tiny(tiny_task.Tiny):
    pass

class BeginsTensorFlow(Tiny):
    def task(self):
        keras.layers.Dense(2).build((None, 3))
        return super().task()

class Deeper(registry.Model):
    depth = 2

    def task(self):
        task = tiny_task.tiny_task()
        task.model.layers = [*task.model.layers[:1] * self.depth, *task.model.layers[1:]]
        for number in range(1, self.depth):
            task.model.layers[number].set(name=f"deep_{number}", reads=("x",))
        return task
"""
MODES = """
import os, signal
from lingvo_gpipe import hyperparams, registry
from models_of_trainer_test.lab import Deeper, Tiny
from tests import tiny_task

def show(job):
    job.report(job.task.to_text())
    job.report(f"data_dir={getattr(job.task.input, 'data_dir', None)}")
    job.report(f"logdir={job.logdir} checkpoint={job.checkpoint}")

def fail(job):
    raise ZeroDivisionError("a bug")

def end(job):
    job.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)

def leave(job):
    end(job)
    while not job.should_stop():
        pass

def watch(job):
    job.report(f"follow={job.options.follow}")

registry.add_mode("show", show)
registry.add_mode("watch", watch, options=["follow"])
registry.add_mode("end", end)
registry.add_mode("leave", leave)
registry.add_mode("fail", fail)

class Moded(Tiny):
    pass

class Widths(tiny_task.Points):
    asset_names = ("width",)
    width = 5

    class Params(tiny_task.Points.Params):
        there: bool = hyperparams.field(False, "Whether.")

    def is_there(self):
        return self.params.there

    def recall(self, assets):
        self.width = int(assets["width"])

    def complete(self, task_params):
        task_params.model.layers[0].units = self.width

class Wide(Deeper):
    def task(self):
        task = super().task()
        task.input = Widths.Params(batch_size=8)
        return task

class Wrong(registry.Model):
    def task(self):
        return {}

class Foldered(registry.Model):
    def task(self):
        from lingvo_gpipe.tasks.image import ImageFolder
        task = Tiny().task()
        task.input = ImageFolder.Params(batch_size=4, height=8, width=8)
        return task
"""

Run = Callable[..., "Outcome"]


class Outcome:
    """Exit code and lines of a call of the trainer."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out.splitlines()
        self.err = [line for line in err.splitlines() if not re.match(r"step \d+/\d+  ", line)]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return the trainer with a user's package of models; `model` is below it."""
    folder = tmp_path / "code" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "lab.py").write_text(MODELS)
    (folder / "moded.py").write_text(MODES)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(registry, "_MODES", {})

    def call(*arguments: str, model: str | None = "lab.Tiny") -> Outcome:
        own = [f"--params_package={PACKAGE}"]
        own += [] if model is None else [f"--model={model}"]
        code = trainer.run([*own, *arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield call
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_models_of_the_project_and_of_the_user_are_listed(run: Run) -> None:
    found = run("--list_models", model=None)
    assert found.code == 0
    assert {"image.digits.ConvNet", "image.digits.MLP", "lab.Tiny", "moded.Moded"} <= set(found.out)
    assert run("--list_models", "lab.T*", model=None).out == ["lab.Tiny"]
    assert run("--list_models=image.digits.M*", model=None).out == ["image.digits.MLP"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--list_models=x*"], "RegistryError: no model matches 'x*'. --list_models shows all"),
        (["--model=lab.Tony"], "RegistryError: no model 'lab.Tony'; nearest 'lab.Tiny'"),
        ([], "ParamsError: --model=NAME is missing. --list_models shows all names"),
        (["--modle=x"], "ParamsError: unknown flag --modle; nearest --mode, --model"),
        (["--max_steps=x"], "ParamsError: flag --max_steps: 'x' is not a whole number. --help"),
        (["train"], "ParamsError: 'train' stands alone: every argument is a flag"),
        (["--model=lab.Tiny"], "ParamsError: --mode=train needs --logdir=FOLDER"),
        (["--model=lab.Tiny", "--mode=trian"], "RegistryError: no mode 'trian'; nearest 'train'"),
        (["--model=lab.Tiny", "--follow"], "ParamsError: --follow goes with --mode=eval"),
        (
            ["--model=lab.Tiny", "--mode=eval", "--follow", "--checkpoint=c", "--logdir=l"],
            "ParamsError: --follow evaluates each new checkpoint of --logdir, --checkpoint a",
        ),
        (
            ["--model=lab.Tiny", "--dry_run", "--mode=eval"],
            "ParamsError: --dry_run goes with --mode=train or train_eval",
        ),
        (
            ["--model=lab.Tiny", "--fit=1GiB", "--mode=train"],
            "ParamsError: --fit goes with --mode=plan",
        ),
        (
            ["--model=lab.Tiny", "--mode=plan", "--cells_per_device=2"],
            "ScheduleError: gpipe has one cell per device, but cells_per_device=2. Use 1",
        ),
        (
            ["--model=lab.Tiny", "--mode=plan", "--schedule=interleaved", "--cells_per_device=9"],
            "PartitionError: the schedule's table has 18 cells on num_partitions=2, but there are",
        ),
        (
            ["--model=lab.Tiny", "--num_partitions=99"],
            "PartitionError: --num_partitions=99, but lab.Tiny has 4 layers. Use 1 to 4; --mode=",
        ),
        (
            ["--model=lab.Tiny", "--params_override=model.num_microbatches=4"],
            "ParamsError: lab.Tiny has no field 'model.num_microbatches'; nearest "
            "'model.num_micro_batches'",
        ),
        (
            ["--model=lab.Tiny", "--params_override=num_microbatches=4"],
            "ParamsError: lab.Tiny has no field 'num_microbatches'; nearest "
            "'model.num_micro_batches'",
        ),
        (
            ["--model=lab.Tiny", "--params_override=train.max_steps=many"],
            "ParamsError: lab.Tiny: 'train.max_steps' must be int, got many",
        ),
        (
            ["--model=lab.Tiny", "--params_override=train.max_steps"],
            "ParamsError: 'train.max_steps' is not an override; write path=value",
        ),
        (
            ["--model=lab.Tiny", "--data_dir=/data"],
            "ParamsError: --data_dir=/data: lab.Tiny reads no folder (its input is ",
        ),
        (
            ["--model=lab.Tiny", "--schedule=1f1", "--mode=describe"],
            "ScheduleError: unknown schedule '1f1'; nearest '1f1b'",
        ),
        (
            ["--model=lab.Tiny", "--mode=eval", "--checkpoint=/nowhere/ckpt-3"],
            "CheckpointError: there is no checkpoint /nowhere/ckpt-3",
        ),
        (
            ["--model=lab.Tiny", "--mode=export", "--logdir=/nowhere"],
            "InputError: a model on Points cannot be exported: that input defines no serving. Add ",
        ),
        (
            ["--model=lab.Tiny", "--mode=params", "--fields=batch_size"],
            "ParamsError: no field of lab.Tiny matches 'batch_size', a pattern of whole paths ",
        ),
        (
            ["--model=lab.Tiny", "--mode=params", "--fields=input.*", "--text"],
            "ParamsError: --text prints all fields, --fields some. Leave one out",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(run: Run, arguments: list[str], text: str) -> None:
    found = run(*arguments, model=None)
    assert found.code == 1
    assert found.err[0].startswith(text)
    assert len(found.err) == 1
    assert found.out == []


def test_params_as_text_are_those_of_the_model_with_its_flags(run: Run) -> None:
    found = run("--mode=params", "--text", "--num_micro_batches=3")
    task = tiny_task().set(name="lab.Tiny")
    task.model.num_micro_batches = 3
    assert "\n".join(found.out) == task.to_text().rstrip("\n")


def test_an_override_that_does_not_exist_comes_with_one_that_does(run: Run) -> None:
    found = run("--params_override=model.num_microbatches=4")
    assert found.err[0].endswith(". Try --params_override=model.num_micro_batches=4")


@pytest.mark.parametrize(
    ("assignment", "present"),
    [
        ("train.max_steps=many", "train.max_steps=12"),
        ("model.layers[2].rate=x y", "'model.layers[2].rate=0.25'"),
        ("eval.best_is=smallest", "eval.best_is=None"),
    ],
)
def test_an_override_of_the_wrong_kind_comes_with_the_present_value(
    run: Run, assignment: str, present: str
) -> None:
    found = run(f"--params_override={assignment}", "--mode=describe")
    assert len(found.err) == 1
    assert found.err[0].endswith(f". Try --params_override={present}, as it is now")
    (offered,) = shlex.split(present)
    assert run(f"--params_override={offered}", "--mode=describe").code == 0


@pytest.mark.parametrize(
    ("assignment", "offered"),
    [
        ("train.hooks=hooks.CSVLog", "train.hooks=[hooks.CSVLog]"),
        ("eval.metrics=accuracy", "eval.metrics=['accuracy']"),
    ],
)
def test_one_value_in_place_of_several_comes_with_its_brackets(
    run: Run, assignment: str, offered: str
) -> None:
    (line,) = run(f"--params_override={assignment}", "--mode=params").err
    text, _, way_out = line.partition(". Try --params_override=")
    assert f"'{assignment.partition('=')[0]}' must be tuple[" in text
    assert shlex.split(way_out) == [offered]
    assert run(f"--params_override={offered}", "--mode=params").code == 0


RATE = "train.optimizer.learning_rate"
RATE_CONFIG = f"{RATE}.config.initial_learning_rate"


@pytest.mark.parametrize(
    ("assignment", "end"),
    [
        (f"{RATE}=0.001", f"set '{RATE_CONFIG}'. Try --params_override={RATE_CONFIG}=0.001"),
        (f"{RATE}=os.system", "which no plain value replaces; override its fields"),
        ("train.optimizer=Adam", "set one of its fields: 'train.optimizer.name' (now 'Adam')"),
        ("train.optimizer.cls=os.system", "nearest 'model.cells'"),
        ("model.nam=os.system", "nearest 'name', 'model.layers[0].name', 'model.name'"),
        ("model.layer=3", "'model.layers', 'model.layers[0]', 'train.optimizer.lazy'"),
    ],
)
def test_an_override_is_suggested_if_it_works_and_names_no_foreign_code(
    run: Run, assignment: str, end: str
) -> None:
    (line,) = run("--model=image.digits.MLP", f"--params_override={assignment}").err
    assert line.startswith("ParamsError: image.digits.MLP")
    assert line.endswith(end)
    assert "=os.system" not in line


def test_a_rate_of_other_fields_comes_with_their_present_values(run: Run) -> None:
    (line,) = run("--model=lm.transformer.L3", f"--params_override={RATE}=0.001").err
    assert line.endswith(
        f"which no plain value replaces; set one of its fields: '{RATE}.factor' (now 0.3)"
    )


def test_deprecations_of_tensorflow_are_not_logged(run: Run) -> None:
    assert run("--list_models").code == 0
    logger, shown = tf.get_logger(), io.StringIO()
    handler = logging.StreamHandler(shown)
    logger.addHandler(handler)
    try:
        logger.warning("From %s: %s is deprecated and will be removed.", "a.py:1", "f (from g)")
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert shown.getvalue() == "something else\n"


def test_the_curves_are_shown_by_a_command_that_this_shell_has(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a run"
    for path, program in (
        (os.path.dirname(sys.executable), "tensorboard"),
        (str(tmp_path), f"{sys.executable} -m tensorboard.main"),
    ):
        monkeypatch.setenv("PATH", path)
        found = run(f"--logdir={folder}", "--max_steps=0")
        assert found.out[-1] == f"to see the curves: {program} --logdir '{folder}'"


@pytest.mark.parametrize("arguments", [["--help"], ["--model=image.digits.MLP", "--mode=describe"]])
def test_a_reader_that_leaves_is_not_a_fault(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "lingvo_gpipe.trainer", *arguments]
    found = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (128 + signal.SIGPIPE, "")


def test_after_a_mistake_nothing_is_left_that_python_would_write_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> int:
        sys.stdout.write("more than the disk takes")
        raise errors.InputError("the disk is full")

    monkeypatch.setattr(trainer, "_run", fail)
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    monkeypatch.setattr(sys, "stdout", full)
    assert trainer.run([]) == 1
    full.close()


def test_a_recipe_without_a_task_is_named(run: Run) -> None:
    found = run("--mode=describe", model="moded.Wrong")
    assert found.err == [
        "RegistryError: moded.Wrong: task() returns dict. Let it return task.Task.Params"
    ]


def test_a_bug_keeps_its_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("--mode=fail", model="moded.Moded")


def test_flags_set_fields_and_overrides_have_the_last_word(run: Run) -> None:
    found = run(
        "--mode=show",
        "--max_steps=7",
        "--save_interval_steps=5",
        "--seed=11",
        "--num_partitions=3",
        "--num_micro_batches=4",
        "--schedule=1f1b",
        "--recompute=never",
        "--params_override=model.num_micro_batches=8",
        "--params_override=model.layers[0].units=6",
        "--params_override=train.optimizer.name=SGD",
        "--logdir=there",
        "--checkpoint=that",
        model="moded.Moded",
    )
    assert found.code == 0
    assert {
        "name: 'moded.Moded'",
        "train.max_steps: 7",
        "train.save_interval_steps: 5",
        "model.seed: 11",
        "model.num_partitions: 3",
        "model.num_micro_batches: 8",
        "model.schedule: '1f1b'",
        "model.recompute: 'never'",
        "model.layers[0].units: 6",
        "train.optimizer.name: 'SGD'",
        "logdir=there checkpoint=that",
    } <= set(found.out)


def test_a_mode_of_a_task_reads_the_options_that_it_names_alone(run: Run) -> None:
    assert run("--mode=watch", "--follow", model="moded.Moded").out == ["follow=True"]
    for mode, flag, modes in (
        ("show", "dry_run", "train or train_eval"),
        ("watch", "profile", "plan"),
        ("show", "follow", "watch or eval"),
    ):
        found = run(f"--mode={mode}", f"--{flag}", model="moded.Moded")
        assert (found.code, found.out) == (1, [])
        (told,) = found.err
        assert told.startswith(f"ParamsError: --{flag} goes with --mode=")
        assert {*told.split("--mode=")[1].split(",")[0].split(" or ")} == {*modes.split(" or ")}
        assert told.endswith(f", not with --mode={mode}")


def test_a_home_folder_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run("--mode=show", "--logdir=~/a", "--checkpoint=~/b/ckpt-1", model="moded.Moded")
    assert f"logdir={tmp_path}/a checkpoint={tmp_path}/b/ckpt-1" in found.out


@pytest.mark.parametrize(("mode", "code"), [("end", 0), ("leave", 128 + signal.SIGTERM)])
def test_a_signal_counts_if_the_mode_was_informed(run: Run, mode: str, code: int) -> None:
    assert run(f"--mode={mode}", model="moded.Moded").code == code


def test_a_dry_run_tries_what_the_mode_does(run: Run) -> None:
    arguments = ["--dry_run", "--params_override=eval.split=validation"]
    found = run("--mode=train", *arguments)
    assert found.out == [
        "--mode=export will not be possible: a model on Points cannot be exported: that input "
        "defines no serving. Add the method `serving` to its class, now or after training",
        "dry run: input, an update and a checkpoint went well; nothing is kept",
    ]
    (line,) = run("--mode=train_eval", *arguments).err
    assert "has no split 'validation'" in line
    assert "name another by --params_override=eval.split=NAME" in line


@pytest.mark.parametrize(
    "mode",
    [["describe"], ["plan"], ["plan", "--fit=6KiB", "--grow=depth", "--num_partitions=1"]],
)
def test_sizes_are_those_of_data_that_are_there_or_kept(
    run: Run, tmp_path: Path, mode: list[str]
) -> None:
    def shown(*arguments: str) -> list[str]:
        found = run(f"--mode={mode[0]}", *mode[1:], *arguments, model="moded.Wide")
        assert found.code == 0, found.err
        return found.out

    units = {n: shown(f"--params_override=model.layers[0].units={n}") for n in (8, 5, 6)}
    assert len({*map("".join, units.values())}) == 3
    assert shown() == shown(f"--logdir={tmp_path}") == units[8]
    assert shown("--params_override=input.there=True") == units[5]
    (tmp_path / "width").write_text("6")
    assert shown(f"--logdir={tmp_path}") == units[6]


def test_data_dir_reaches_the_input(run: Run) -> None:
    found = run("--mode=show", "--data_dir=/my/images", model="moded.Foldered")
    # The model's module has registered the mode.
    assert "data_dir=/my/images" in found.out


def test_a_mode_of_a_task_finds_the_devices_of_its_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(
        process, "prepare_devices", lambda model: prepared.append(model.num_partitions)
    )
    run("--mode=show", "--num_partitions=3", model="moded.Moded")
    assert prepared == [3]
    run("--mode=describe", "--num_partitions=2", model="moded.Moded")
    assert prepared == [3]


def test_help_lists_every_flag(run: Run) -> None:
    found = run("--help", model=None)
    assert found.code == 0
    assert found.out[0].startswith("Trains, evaluates, describes")
    flags = {line.split()[0] for line in found.out if line.startswith("  --")}
    named = "model logdir mode list_models params_override params_package data_dir data max_steps "
    named += "save_interval_steps checkpoint follow seed dry_run num_partitions cells_per_device "
    named += "num_micro_batches num_replicas schedule recompute fit grow profile "
    named += "profile_steps fields text params hosts workers cluster job task token_file "
    named += "start_timeout_s max_restarts"
    assert flags == {f"--{name}" for name in named.split()}


def test_a_file_that_cannot_be_imported_is_left_out_of_the_list(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code" / PACKAGE / "torn.py").write_text("1 / 0")
    found = run("--list_models", "lab.T*", model=None)
    assert (found.code, found.out) == (0, ["lab.Tiny"])
    (line,) = found.err
    assert line.startswith(f"{PACKAGE}.torn is left out: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_only_what_every_machine_without_a_gpu_says_is_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_gpu: bool
) -> None:
    lines = ["I0000 00:00 cudart_stub.cc", "E0000 cuInit: UNKNOWN", "E0000 the disk is full"]
    told = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda: os.write(2, told))
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidiactl" and has_gpu)
    tensorflow_import.quietly()
    assert capfd.readouterr().err.splitlines() == lines[1 if has_gpu else 2 :]


def test_describe_and_plan_need_no_logdir(run: Run) -> None:
    told = run("--mode=describe")
    assert told.code == 0
    # 4·8 + 8, gamma and beta, 8·3 + 3.
    assert "parameters: 83" in told.out
    planned = run("--mode=plan")
    assert planned.code == 0
    assert any(line.startswith("cell 0: F0 F1") for line in planned.out)
    assert "estimate by formula" in "\n".join(planned.out)
    profiled = run("--mode=plan", "--profile")
    assert profiled.code == 0, profiled.err
    assert "estimate by formula" not in "\n".join(profiled.out)


def test_plan_fits_a_field_or_a_size_of_the_recipe(run: Run) -> None:
    by_field = run(
        "--mode=plan", "--fit=64KiB", "--grow=model.layers[0].units", "--num_partitions=2"
    )
    assert by_field.code == 0, by_field.err
    assert "model.layers[0].units" in by_field.out[0]
    by_size = run(
        "--mode=plan", "--fit=8KiB", "--grow=depth", "--num_partitions=2", model="lab.Deeper"
    )
    assert by_size.code == 0, by_size.err
    assert "depth" in by_size.out[0]


def test_training_evaluation_and_resumption_print_their_lines(run: Run, tmp_path: Path) -> None:
    logdir = f"--logdir={tmp_path / 'run'}"
    first = run(logdir, "--mode=train_eval", "--max_steps=4", "--save_interval_steps=2")
    assert first.code == 0
    assert first.err == []
    pattern = r"eval step=(\d+) accuracy=([01]\.\d{4}) loss=\d+\.\d{4}"
    evaluated = [re.fullmatch(pattern, line) for line in first.out]
    steps = [match[1] for match in evaluated if match]
    assert steps == ["2", "4"]
    assert first.out[-2] == f"test accuracy {evaluated[-3][2] if evaluated[-3] else ''}"
    assert first.out[-1].startswith("to see the curves: ")
    assert first.out[-1].endswith(f" --logdir {tmp_path / 'run'}")

    again = run(logdir, "--mode=train", "--max_steps=5")
    assert again.code == 0
    assert "restored step=4" in again.out
    assert "    train.max_steps: 4 -> 5" in again.out

    (line,) = run(logdir, "--mode=eval").out
    assert re.fullmatch(pattern, line)
    assert line.startswith("eval step=5 ")
    older = tmp_path / "run" / "checkpoints" / "ckpt-4"
    assert run("--mode=eval", f"--checkpoint={older}").out[0] == first.out[-3]
    followed = run(logdir, "--mode=eval", "--follow", "--max_steps=5")
    assert followed.out == [line]

    other = run(logdir, model="lab.Deeper")
    assert other.code == 1
    assert other.err == [
        f"TrainingError: {tmp_path / 'run'} holds a run of 'lab.Tiny', not of 'lab.Deeper'. Give "
        f"another --logdir; there, --checkpoint={tmp_path / 'run'}/checkpoints/ckpt-5 starts from "
        "these weights"
    ]


def test_the_parameters_of_trained_models_are_known_before(run: Run) -> None:
    found = run("--mode=describe", model="image.digits.ConvNet")
    assert "parameters: 82282" in found.out
    assert "statistics: 384" in found.out


# In separate processes.


def command(tmp_path: Path, *arguments: str, model: str = "lab.Tiny") -> Any:
    """Return the arguments of `subprocess` for the trainer with a user's package."""
    folder = tmp_path / "code" / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text("")
    (folder / "lab.py").write_text(MODELS)
    path = os.pathsep.join([str(folder.parent), *(entry for entry in sys.path if entry)])
    return {
        "args": [
            sys.executable,
            "-m",
            "lingvo_gpipe.trainer",
            f"--params_package={PACKAGE}",
            f"--model={model}",
            *arguments,
        ],
        "env": {**os.environ, "PYTHONPATH": path},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def test_the_program_makes_its_devices_and_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    arguments = [f"--logdir={tmp_path / 'run'}", "--num_partitions=4"]
    arguments += ["--max_steps=1000000", "--save_interval_steps=900000"]
    program = command(tmp_path, *arguments, model="lab.BeginsTensorFlow")
    with subprocess.Popen(**program) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        first = process.stderr.readline()
        # Nothing of TensorFlow's own comes before it.
        assert first.startswith("step 1/1000000  loss "), first
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    told = re.fullmatch(r"saved step=(\d+) in (\S+); the same command goes on from it", out.strip())
    assert told, out
    assert int(tf.train.load_variable(told[2], "step/.ATTRIBUTES/VARIABLE_VALUE")) == int(told[1])


@pytest.mark.parametrize(
    ("start", "code"),
    [
        ("import runpy; runpy.run_module('lingvo_gpipe.trainer', run_name='__main__')", "quiet"),
        ("sys.argv[0] = '/bin/lingvo-gpipe'; import lingvo_gpipe.trainer", "quiet"),
        ("import lingvo_gpipe.trainer", "KeyboardInterrupt"),  # another program imports it
    ],
)
def test_an_interrupt_while_the_program_is_imported_shows_no_traceback(
    start: str, code: str
) -> None:
    interrupting = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lingvo_gpipe.errors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    command = [sys.executable, "-c", interrupting + start]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT  # 130 in a shell
    assert (ended.stderr.splitlines() or ["quiet"])[-1] == code
