"""What a user sees: flags, modes, the lines that a run prints."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import recipes, trainer
from lingvo_gpipe.cluster import launch
from lingvo_gpipe.run import process
from tests.support import trainer_calls
from tests.support.trainer_calls import PACKAGE, Run
from tests.tiny_task import tiny_task


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return the trainer with a user's package of models; see `trainer_calls`."""
    with trainer_calls.trainer_with_package(tmp_path, monkeypatch, capsys) as call:
        yield call


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
