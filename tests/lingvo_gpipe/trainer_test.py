"""What a user sees: flags, modes, the lines that a run prints, and one for each mistake."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import recipes, registry, trainer
from lingvo_gpipe.cluster import launch
from lingvo_gpipe.run import process
from tests.support import trainer_calls
from tests.support.trainer_calls import PACKAGE, Run
from tests.tiny_task import tiny_task


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return the trainer with a user's package, which `model` is below."""
    monkeypatch.syspath_prepend(trainer_calls.write_package(tmp_path))
    monkeypatch.setattr(registry, "_MODES", {})

    def call(*arguments: str, model: str | None = "lab.Tiny") -> trainer_calls.Outcome:
        own = [f"--params_package={PACKAGE}"]
        own += [] if model is None else [f"--model={model}"]
        code = trainer.run([*own, *arguments])
        captured = capsys.readouterr()
        return trainer_calls.Outcome(code, captured.out, captured.err)

    yield call
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_models_of_the_project_and_of_the_user_are_listed(run: Run) -> None:
    found = run("--list_models", model=None)
    assert found.code == 0
    assert {"image.digits.ConvNet", "image.digits.MLP", "lab.Tiny", "moded.Moded"} <= set(found.out)
    assert run("--list_models", "lab.T*", model=None).out == ["lab.Tiny"]
    assert run("--list_models=image.digits.M*", model=None).out == ["image.digits.MLP"]


def test_params_as_text_are_those_of_the_model_with_its_flags(run: Run) -> None:
    found = run("--mode=params", "--text", "--num_micro_batches=3")
    task = tiny_task().set(name="lab.Tiny")
    task.model.num_micro_batches = 3
    assert "\n".join(found.out) == task.to_text().rstrip("\n")


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


def test_a_home_folder_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run("--mode=show", "--logdir=~/a", "--checkpoint=~/b/ckpt-1", model="moded.Moded")
    assert f"logdir={tmp_path}/a checkpoint={tmp_path}/b/ckpt-1" in found.out


@pytest.mark.parametrize(("mode", "code"), [("end", 0), ("leave", 128 + signal.SIGTERM)])
def test_a_signal_counts_if_the_mode_was_informed(run: Run, mode: str, code: int) -> None:
    assert run(f"--mode={mode}", model="moded.Moded").code == code


@pytest.mark.parametrize(
    "mode",
    [["describe"], ["plan"], ["plan", "--fit=6KiB", "--grow=depth", "--num_partitions=1"]],
)
def test_sizes_are_those_that_a_run_keeps(run: Run, tmp_path: Path, mode: list[str]) -> None:
    def shown(*arguments: str) -> list[str]:
        found = run(f"--mode={mode[0]}", *mode[1:], *arguments, model="moded.Wide")
        assert found.code == 0, found.err
        return found.out

    units = {n: shown(f"--params_override=model.layers[0].units={n}") for n in (8, 6)}
    assert units[8] != units[6]
    assert shown() == shown(f"--logdir={tmp_path}") == units[8]
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


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.run(["--help"]) == 0
    listed = re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)
    assert set(vars(trainer.flags().parse_args([]))) <= set(listed)


def test_a_file_that_cannot_be_imported_is_left_out_of_the_list(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code" / PACKAGE / "torn.py").write_text("1 / 0")
    found = run("--list_models", "lab.T*", model=None)
    assert (found.code, found.out) == (0, ["lab.Tiny"])
    (line,) = found.err
    assert line.startswith(f"{PACKAGE}.torn is left out: ZeroDivisionError: division by zero")


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


@pytest.mark.parametrize(("partitions", "cuts"), [("2", (2, 4)), ("1", None)])
def test_cuts_of_a_run_are_for_its_number_of_partitions(partitions: str, cuts: Any) -> None:
    params = tiny_task()
    params.model.cuts = (2, 4)
    flags = trainer.read_flags(["--model=lab.Tiny", f"--num_partitions={partitions}"])
    assert trainer.task_of(flags, recipes.FromText(params)).model.cuts == cuts


@pytest.mark.parametrize(("partitions", "lines"), [(2, 0), (1, 1)])
def test_devices_that_are_left_out_are_reported(run: Run, partitions: int, lines: int) -> None:
    found = run("--mode=describe", f"--num_partitions={partitions}", model="moded.Placed")
    assert found.code == 0
    assert [line for line in found.err if line.startswith("model.devices of")] == [
        "model.devices of moded.Placed is left out: it is for another number of partitions than 1"
    ] * lines


def test_plan_and_training_choose_by_the_hosts_of_the_workers(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = ["--mode=train", "--max_steps=0"]
    monkeypatch.setattr(launch, "hosts", lambda _: "2x1,between=1kB,flops=1M")
    for arguments in (["--mode=plan"], [*train, f"--logdir={tmp_path}/auto"]):
        found = run(*arguments, "--schedule=auto")
        assert found.code == 0, found.err
        assert "links take time at the speeds of --hosts" in "\n".join(found.out)
    # Without a choice, training does not ask for them; the memory of one device has none.
    assert run(*train, f"--logdir={tmp_path}/named").code == 0
    fit = ("--mode=plan", "--fit=64KiB", "--grow=model.layers[0].units", "--num_partitions=2")
    assert run(*fit).code == 0


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
    assert run("--mode=eval", f"--checkpoint={tmp_path / 'run'}").out == [line]

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


# --- Mistakes: one line names what, where, the nearest right thing and a way out ------------------

# Model → flags → how the line begins.
MISTAKES: dict[str | None, dict[str, str]] = {
    None: {
        "--list_models=x*": "ParamsError: no model matches 'x*'. --list_models shows all",
        "--model=lab.Tony": "ParamsError: no model 'lab.Tony'; nearest 'lab.Tiny'",
        "": "ParamsError: --model=NAME is missing. --list_models shows all names",
        "--modle=x": "ParamsError: unknown flag --modle; nearest '--mode', '--model'",
        "--mode=": "ParamsError: --mode= is empty. Give a value, or leave it out",
    },
    "lab.Tiny": {
        "": "ParamsError: --logdir=FOLDER is missing: the run's folder of",
        "--data=real": "ParamsError: argument --data: invalid choice: 'r",
        "--logdir=/x --profile": (
            "ParamsError: training uses --profile only to choose by --schedule=auto. Add it, or "
            "leave"
        ),
        "--logdir=/x --hosts=2x4": (
            "ParamsError: training uses --hosts only to choose by --schedule=auto. Add it, or"
        ),
        "--logdir=/x --hosts=2x4,beween=1GB --schedule=auto": (
            "ParamsError: --hosts=2x4,beween=1GB: 'beween=1GB' is not one of memory, "
        ),
        "--mode=describe --hosts=2x4": "ParamsError: --hosts goes with --mode=",
        "--mode=plan --num_replicas=3 --num_micro_batches=2": (
            "PartitionError: num_replicas=3, but a mini-batch has 2 micro-batches in all, so that "
        ),
        "--mode=plan --params_override=model.slices={'head':2}": (
            "LayerError: head (Softmax): it cannot be divided into slices. Embeddings, "
        ),
        "--mode=trian": "ParamsError: lab.Tiny has no mode 'trian'; near",
        "--mode=decode": "ParamsError: lab.Tiny has no mode 'decode'",
        "--mode=plan --fit=1GiB --grow=depth --hosts=2x1": (
            "ParamsError: --fit searches for the memory of one device, --hosts names those of all"
        ),
        "--fit=1GiB --mode=train": "ParamsError: --fit goes with --mode=plan",
        "--mode=plan --cells_per_device=2": (
            "ScheduleError: gpipe has one cell per device, but cells_per_device=2. Use 1"
        ),
        "--mode=plan --schedule=interleaved --cells_per_device=9": (
            "PartitionError: the schedule's table has 18 cells on num_partitions=2, but there are"
        ),
        "--mode=plan --num_partitions=99": (
            "PartitionError: num_partitions=99, but there are 4 layers. Use 1 to 4"
        ),
        "--params_override=model.num_microbatches=4": (
            "ParamsError: lab.Tiny has no field 'model.num_microbatches'; nearest "
            "'model.num_micro_batches'"
        ),
        "--params_override=train.max_steps=many": (
            "ParamsError: lab.Tiny: 'train.max_steps' must be int, got many"
        ),
        "--params_override=train.callbacks=[callbacks.CSVLoggger]": (
            "ParamsError: lab.Tiny: 'train.callbacks': lingvo_gpipe has no class "
            "'callbacks.CSVLoggger'; nearest 'callbacks.CSVLogger'"
        ),
        "--params_override=train.max_steps": (
            "ParamsError: 'train.max_steps' is not an override; write path=value"
        ),
        "--data_dir=/data": (
            "ParamsError: --data_dir=/data: lab.Tiny reads no folder (its input is "
        ),
        "--schedule=1f1 --mode=describe": "ScheduleError: unknown schedule '1f1'; nearest '1f1b'",
        "--mode=eval --checkpoint=/nowhere/ckpt-3": (
            "CheckpointError: there is no checkpoint /nowhere/ckpt-3"
        ),
        "--mode=export --logdir=/nowhere": (
            "InputError: a model on Points cannot be exported: that input defines no serving. Add "
        ),
        "--mode=params --fields=batch_size": (
            "ParamsError: no field of lab.Tiny matches 'batch_size', a pattern of whole paths; nea"
        ),
        "--mode=params --fields=input.* --text": (
            "ParamsError: --text prints all fields, --fields some. Leave one out"
        ),
    },
}


@pytest.mark.parametrize(
    ("model", "flags"), [(model, flags) for model, rows in MISTAKES.items() for flags in rows]
)
def test_a_mistake_is_one_line_and_exit_code_1(run: Run, model: str | None, flags: str) -> None:
    found = run(*flags.split(), model=model)
    assert found.code == 1
    assert found.err[0].startswith(MISTAKES[model][flags])
    assert len(found.err) == 1
    assert found.out == []


def test_a_recipe_without_a_task_is_named(run: Run) -> None:
    found = run("--mode=describe", model="moded.Wrong")
    assert found.err == [
        "ParamsError: moded.Wrong: task() returns dict. Let it return task.Task.Params"
    ]


def test_a_bug_keeps_its_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("--mode=fail", model="moded.Moded")
