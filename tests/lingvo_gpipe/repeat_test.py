"""Runs of several seeds and settings: which are run, which are not run again, what is shown."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_multiplexer
from tensorboard.plugins.hparams import api_pb2, metadata

from lingvo_gpipe import repeat, trainer
from lingvo_gpipe.console import signals

# A stub trainer, which records its runs. Its accuracy follows from rate and seed; seed 13 fails
# once, seed 14 writes no result, seed 15 is ended by a signal that this command receives.
TRAINER = """
import json, os, pathlib, signal, sys
flags = [argument.removeprefix("--").partition("=") for argument in sys.argv[1:]]
named = {name: value for name, _, value in flags}
fields = dict(value.split("=", 1) for name, _, value in flags if name == "params_override")
folder = pathlib.Path(named["logdir"])
with open(folder / "runs", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
seed, is_first = int(named["seed"]), len((folder / "runs").read_text().splitlines()) == 1
rate = float(fields.get("train.optimizer.learning_rate", 0))
if rate > 1 or seed == 13 and is_first:
    sys.exit(1)
if seed == 15 and is_first:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        signal.pause()
if seed == 16:  # ended by a signal that it does not handle
    os.kill(os.getpid(), signal.SIGTERM)
if seed == 17:  # a signal comes when it is as good as done
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
metrics = {"accuracy": 10 * rate + seed / 100, "loss": 1.0 / seed, f"only_{seed}": 1.0}
if seed != 14:
    (folder / "result.json").write_text(json.dumps({"step": 2, "metrics": metrics}))
"""
RATE = "--sweep=train.optimizer.learning_rate"


class Outcome:
    """Exit code and lines of a call."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out.splitlines(), err.splitlines()


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `repeat` with the stub trainer."""
    stub = tmp_path / "trainer.py"
    stub.write_text(TRAINER)

    def call(*own: str, flags: Any = ("--model=m",)) -> Outcome:
        logdir = f"--logdir={tmp_path / 'runs'}"
        code = repeat.run([*own, "--", *flags, logdir], [sys.executable, str(stub)])
        return Outcome(code, *capfd.readouterr())

    return call


def calls(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / "runs" / name / "runs").read_text().splitlines()]


def test_each_seed_has_a_run_and_all_have_a_mean(run: Run, tmp_path: Path) -> None:
    found = run("--seeds=1,2,4")
    assert (found.code, found.err) == (0, [])
    folder = tmp_path / "runs"
    for seed in (1, 2, 4):
        assert calls(tmp_path, f"seed_{seed}") == [
            [
                *("--model=m", f"--logdir={folder}", "--mode=train_eval"),
                *(f"--seed={seed}", f"--logdir={folder}/seed_{seed}"),
            ]
        ]
    assert "\n".join(found.out[-5:]) == textwrap.dedent("""\
        seed         accuracy             loss
        1              0.0100           1.0000
        2              0.0200           0.5000
        4              0.0400           0.2500
        mean  0.0233 ± 0.0153  0.5833 ± 0.3819""")


def test_every_combination_is_run_once(run: Run, tmp_path: Path) -> None:
    grid = (f"{RATE}=1e-2,3e-2", "--sweep=model.schedule=gpipe,'1f1b'", "--seeds=1,3")
    first = run(*grid)
    assert len(list((tmp_path / "runs").rglob("result.json"))) == 8
    (call,) = calls(tmp_path, "learning_rate=3e-2/schedule=_1f1b_/seed_3")
    assert "--params_override=train.optimizer.learning_rate=3e-2" in call
    assert "--params_override=model.schedule='1f1b'" in call
    assert first.out[-1] == "3e-2           '1f1b'    mean  0.3200 ± 0.0141  0.6667 ± 0.4714"
    assert run(*grid).out[-13:] == first.out[-13:]
    assert len(calls(tmp_path, "learning_rate=3e-2/schedule=_1f1b_/seed_3")) == 1


def test_other_flags_or_a_damaged_result_run_it_again(run: Run, tmp_path: Path) -> None:
    run()
    result = tmp_path / "runs" / "seed_1" / "result.json"
    for content in ("", '{"metrics": {"a": 1'):
        result.write_text(content)
        assert run().code == 0
    result.unlink()
    run()
    run(flags=("--model=m", "--max_steps=9"))
    run(flags=("--model=m", "--max_steps=9"))
    assert len(calls(tmp_path, "seed_1")) == 5


def test_a_finished_run_of_other_flags_is_not_taken_for_this_one(run: Run, tmp_path: Path) -> None:
    assert run(flags=("--model=m", "--params_override=train.clip_norm=1.0")).code == 0
    found = run("--seeds=2,1", flags=("--model=m", "--params_override=train.clip_norm=2.0"))
    assert found.code == 1
    (message,) = found.err
    assert "seed_1 holds a run with other flags: --model=m --params_override" in message
    assert not (tmp_path / "runs" / "seed_2").exists()
    longer = ("--max_steps=9", "--model=m", "--params_override=train.clip_norm=1.0")
    assert run(flags=longer).code == 0


def test_a_failed_run_is_named_and_taken_up_again(run: Run, tmp_path: Path) -> None:
    found = run("--seeds=1,13,2")
    assert found.code == 1
    assert found.err == ["seed_13 failed with exit code 1, or evaluated nothing"]
    assert found.out[-1].startswith("mean  0.0150 ± 0.0071")
    assert run("--seeds=1,13,2").code == 0
    assert [len(calls(tmp_path, f"seed_{seed}")) for seed in (1, 13, 2)] == [1, 2, 1]
    assert run("--seeds=14").err == ["seed_14 failed with exit code 0, or evaluated nothing"]


def test_a_signal_reaches_the_run_and_ends_all(run: Run, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for seed in (15, 16, 17):
        found = run(f"--seeds={seed},2")
        assert (found.code, found.err) == (128 + signal.SIGTERM, [])
        assert not (tmp_path / "runs" / "seed_2").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    assert run("--seeds=17,2").code == 0
    assert len(calls(tmp_path, "seed_17")) == 1


def test_a_reader_that_leaves_is_not_a_fault(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        assert run().code == 128 + signal.SIGPIPE
    assert not (tmp_path / "runs").exists()


def test_the_hparams_page_has_settings_and_states(run: Run, tmp_path: Path) -> None:
    assert run(f"{RATE}=1e-2,3", "--sweep=a.b=x", "--seeds=1,2").code == 1
    multiplexer = plugin_event_multiplexer.EventMultiplexer(
        tensor_size_guidance=dict(event_accumulator.STORE_EVERYTHING_SIZE_GUIDANCE)
    )
    multiplexer.AddRunsFromDirectory(str(tmp_path / "runs")).Reload()
    content = multiplexer.PluginRunToTagToContent(metadata.PLUGIN_NAME)
    assert len(content) == 4
    for name, status in (
        ("learning_rate=1e-2/b=x/seed_2", api_pb2.STATUS_SUCCESS),
        ("learning_rate=3/b=x/seed_2", api_pb2.STATUS_FAILURE),
    ):
        tags = content[name]
        start = metadata.parse_session_start_info_plugin_data(tags[metadata.SESSION_START_INFO_TAG])
        assert start.hparams["learning_rate"].number_value in (1e-2, 3.0)
        assert start.hparams["b"].string_value == "x"
        assert start.hparams["seed"].string_value == "2"
        assert start.group_name == name
        end = metadata.parse_session_end_info_plugin_data(tags[metadata.SESSION_END_INFO_TAG])
        assert end.status == status
        assert end.end_time_secs >= start.start_time_secs


def test_a_folder_that_is_a_file_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert run().err == [
        f"TrainingError: {tmp_path}/runs/seed_1 cannot be written: Not a directory. Give another "
        "--logdir, or correct its permissions"
    ]


def test_help_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat.run(["--help"]) == 0
    assert "--seeds" in capsys.readouterr().out
    assert repeat.run(["--seeds=1", "--", "--help"]) == 0
    assert "--list_models" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seeds=1"], "the trainer's flags are missing after --. Write python -m"),
        (["--seeds=1", "--model=m"], "unknown flag --model"),
        (["--", "--modle=m", "--logdir=x"], "unknown flag --modle; nearest '--mode', '--model'"),
        (["--", "--model=m"], "--logdir=FOLDER is missing after --"),
        (["--", "--logdir=x", "--seed=3"], "each run has its own --seed and --mode"),
        (
            ["--", "--logdir=x", "--params_override=model.seed=3"],
            "model.seed would be that of all runs. Name the seeds: --seeds=1,2",
        ),
        (["--seeds=1,x", "--", "--logdir=x"], "--seeds=1,x are not different whole numbers"),
        (["--seeds=1,01", "--", "--logdir=x"], "--seeds=1,01 are not different whole numbers"),
        ([f"{RATE}=1]+[2", "--", "--logdir=x"], "is not a path, given once, and its values"),
        ([RATE, "--", "--logdir=x"], "is not a path, given once, and its values"),
        (["--sweep==1,2", "--", "--logdir=x"], "--sweep==1,2 is not a path, given once"),
        ([f"{RATE}=1", f"{RATE}=2", "--", "--logdir=x"], "is not a path, given once"),
        (["--sweep=model.seed=1", "--", "--logdir=x"], "seeds are --seeds"),
        ([f"{RATE}=1,1", "--", "--logdir=x"], "would share the folder learning_rate=1/seed_1"),
        (["--sweep=a='x y','x_y'", "--", "--logdir=x"], "would share the folder a=_x_y_/seed_1"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeat.run(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ParamsError: ")
    assert text in line


def test_names_are_as_short_as_they_can_be() -> None:
    axes = repeat._axes(["model.cuts=(1, 2)", "a.b.rate='x,y'", "a.c.rate={'k': [1, 2]}"])
    (run,) = repeat._runs(axes, ["1"], Path("runs"), [])
    assert run.setting == {"model.cuts": "(1, 2)", "b.rate": "'x,y'", "c.rate": "{'k': [1, 2]}"}
    assert run.name == "model.cuts=_1_2_/b.rate=_x_y_/c.rate=_k_1_2_/seed_1"


def test_the_trainer_itself_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: list[str]) -> tuple[int, None]:
        assert command[:3] == [sys.executable, "-m", "lingvo_gpipe.trainer"]
        return trainer.run(command[3:]), None

    monkeypatch.setattr(signals, "run_program", run_here)
    flags = ["--model=image.digits.MLP", f"--logdir={tmp_path}", "--max_steps=2"]
    assert repeat.run(["--seeds=3", "--", *flags]) == 0
    metrics = json.loads((tmp_path / "seed_3" / "result.json").read_text())["metrics"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:2] == ["3", f"{metrics['accuracy']:.4f}"]
