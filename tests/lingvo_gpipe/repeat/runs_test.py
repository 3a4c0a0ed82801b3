"""Runs of several seeds: which are run, which are not run again, what is printed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import repeat

# A stub trainer: its accuracy follows from the seed, it records its runs; seed 13 fails once.
TRAINER = """
import json, os, pathlib, signal, sys
flags = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(flags["logdir"])
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "runs", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
seed = int(flags["seed"])
first = len((folder / "runs").read_text().splitlines()) == 1
if seed == 13 and first:
    sys.exit(1)
if seed == 15 and first:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        signal.pause()
if seed == 16:  # ended by a signal that it does not handle
    os.kill(os.getpid(), signal.SIGTERM)
if seed == 17:  # a signal comes when it is as good as done
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
metrics = {"accuracy": 0.9 + seed / 100, "loss": 1.0 / seed, f"only_{seed}": 1.0}
if seed == 18:
    metrics = {}
if seed != 14:
    (folder / "result.json").write_text(json.dumps({"step": 2, "metrics": metrics}))
"""


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

    def call(seeds: str, *arguments: str) -> Outcome:
        own = arguments or ("--model=m", f"--logdir={tmp_path / 'runs'}")
        code = repeat.run([f"--seeds={seeds}", "--", *own], [sys.executable, str(stub)])
        return Outcome(code, *capfd.readouterr())

    return call


def calls(folder: Path, seed: int) -> list[Any]:
    lines = (folder / "runs" / f"seed_{seed}" / "runs").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_seed_has_a_run_of_its_own_and_all_have_a_mean(run: Run, tmp_path: Path) -> None:
    found = run("1,2,4")
    assert (found.code, found.err) == (0, [])
    folder = tmp_path / "runs"
    for seed in (1, 2, 4):
        (given,) = calls(tmp_path, seed)
        assert given == [
            "--model=m",
            f"--logdir={folder}",
            "--mode=train_eval",
            f"--seed={seed}",
            f"--logdir={folder}/seed_{seed}",
        ]
    assert (
        found.out[-6:]
        == textwrap.dedent("""\
        seed         accuracy             loss
        1              0.9100           1.0000
        2              0.9200           0.5000
        4              0.9400           0.2500
        mean  0.9233 ± 0.0153  0.5833 ± 0.3819
        accuracy mean=0.9233 std=0.0153 n=3""").splitlines()
    )


def test_a_run_that_is_done_is_not_run_again(run: Run, tmp_path: Path) -> None:
    first = run("1,2")
    second = run("2,1,3")
    assert [len(calls(tmp_path, seed)) for seed in (1, 2, 3)] == [1, 1, 1]
    assert f"seed 2 is done: {tmp_path / 'runs' / 'seed_2'}" in second.out
    assert first.out[-1].endswith("n=2")
    assert second.out[-1].endswith("n=3")


def test_other_flags_run_it_again(run: Run, tmp_path: Path) -> None:
    own = ("--model=m", f"--logdir={tmp_path / 'runs'}")
    run("1", *own)
    run("1", *own, "--max_steps=9")
    assert len(calls(tmp_path, 1)) == 2


def test_a_run_whose_result_was_taken_back_is_run_again(run: Run, tmp_path: Path) -> None:
    run("1")
    (tmp_path / "runs" / "seed_1" / "result.json").unlink()
    assert run("1").code == 0
    assert len(calls(tmp_path, 1)) == 2


def test_a_failed_run_is_named_and_taken_up_again(run: Run, tmp_path: Path) -> None:
    found = run("1,13,2")
    assert found.code == 1
    assert found.err == [
        "TrainingError: seed 13 failed with exit code 1, for the reason above; 1 of 3 are done. "
        "The same command goes on with it"
    ]
    assert not (tmp_path / "runs" / "seed_2").exists()
    again = run("1,13,2")
    assert again.code == 0
    assert [len(calls(tmp_path, seed)) for seed in (1, 13, 2)] == [1, 2, 1]


def test_a_signal_reaches_the_run_that_it_ends(run: Run, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = run("15,2")
    assert (found.code, found.err) == (128 + signal.SIGTERM, [])
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "runs" / "seed_2").exists()
    found = run("16,2")
    assert (found.code, found.err) == (128 + signal.SIGTERM, [])


def test_a_signal_that_a_run_outlives_still_ends_all(run: Run, tmp_path: Path) -> None:
    assert run("17,2").code == 128 + signal.SIGTERM
    assert not (tmp_path / "runs" / "seed_2").exists()
    assert run("17,2").code == 0
    assert [len(calls(tmp_path, seed)) for seed in (17, 2)] == [1, 1]


def test_a_home_folder_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("1", "--model=m", "--logdir=~/runs").code == 0
    assert f"--logdir={tmp_path}/runs/seed_1" in calls(tmp_path, 1)[0]


def test_flags_that_cannot_be_written_are_reported(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "seed_1" / "repeat.json"
    path.mkdir(parents=True)
    found = run("1")
    assert found.code == 1
    assert found.err == [
        f"TrainingError: {path} cannot be written: Is a directory. The run is done; free disk "
        "space, then start the same command again"
    ]


def test_a_reader_that_leaves_is_not_a_fault(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        assert run("1").code == 128 + signal.SIGPIPE
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_result_is_reported(run: Run) -> None:
    found = run("14")
    assert found.code == 1
    assert re.match("TrainingError: seed 14 ended without a result in ", found.err[0])


@pytest.mark.parametrize(
    "content",
    ["", "[1]", '{"metrics": 3}', '{"metrics": {"a": "b"}}', "[" * 99_999, '{"metrics": {"a": 1'],
)
def test_a_damaged_result_is_made_again(run: Run, tmp_path: Path, content: str) -> None:
    first = run("1")
    (tmp_path / "runs" / "seed_1" / "result.json").write_text(content)
    second = run("1")
    assert (second.code, second.out[-2:]) == (0, first.out[-2:])
    assert len(calls(tmp_path, 1)) == 2


def test_a_result_that_is_no_file_is_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "seed_14").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "seed_14" / "result.json")
    found = run("14")
    assert found.code == 1
    assert found.err == [
        f"TrainingError: seed 14 ended without a result in {tmp_path}/runs/seed_14/result.json: it "
        "is a pipe, not a regular file. Start the same command again; if that does not help, "
        "remove the folder"
    ]


def test_a_run_that_evaluated_nothing_is_reported(run: Run, tmp_path: Path) -> None:
    found = run("18")
    result = tmp_path / "runs" / "seed_18" / "result.json"
    assert found.err == [f"TrainingError: seed 18 evaluated nothing: {result} is empty"]


def test_a_run_whose_flags_are_torn_is_run_again(run: Run, tmp_path: Path) -> None:
    run("1")
    (tmp_path / "runs" / "seed_1" / "repeat.json").write_text("[")
    assert run("1").code == 0
    assert len(calls(tmp_path, 1)) == 2


def test_a_folder_that_is_a_file_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found = run("1,2")
    assert (found.code, len(found.out)) == (1, 1)
    assert found.err == [
        f"ParamsError: {tmp_path}/runs/seed_1 cannot be made: Not a directory. Give another "
        "--logdir, or correct its permissions"
    ]


def test_help_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat.run(["--help"]) == 0
    assert "--seeds" in capsys.readouterr().out
    for own in ([], ["--seeds=1"]):
        assert repeat.run([*own, "--", "--help"]) == 0
        found = capsys.readouterr()
        assert "--list_models" in found.out
        assert found.err == ""


def test_one_run_has_no_deviation() -> None:
    summary = repeat.Summary({7: {"loss": 0.25}})
    assert math.isnan(summary.deviation("loss"))
    assert summary.table().splitlines()[-1] == "loss mean=0.2500 std=nan n=1"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seeds=1"], "ParamsError: the trainer's flags are missing after --. Write python"),
        (["--seeds=1", "--model=m"], "ParamsError: the trainer's flags come after --. Write pyth"),
        (
            ["--sedes=1", "--", "--model=m"],
            "ParamsError: unknown flag --sedes; nearest --seeds",
        ),
        (["--", "--model=m"], "ParamsError: give --seeds once. Write python -m"),
        (
            ["--seeds=1,x", "--"],
            "ParamsError: --seeds=1,x: 'x' is not a whole number. Write --",
        ),
        (["--seeds=3,3", "--"], "ParamsError: --seeds=3,3 has 3 twice. Give it once"),
        (["--seeds=1", "--", "--logdir=x"], "ParamsError: --model=NAME is missing after --"),
        (["--seeds=1", "--", "--model=m"], "ParamsError: --logdir=FOLDER is missing after --"),
        (
            ["--seeds=1", "--", "--model=m", "--logdir=x", "--seed=3"],
            "ParamsError: --seed is set for each run. Leave it out, and use --seeds",
        ),
        (
            ["--seeds=1", "--", "--model=m", "--logdir=x", "--params_override=model.seed=3"],
            "ParamsError: --seed is set for each run",
        ),
        (
            ["--seeds=1", "--", "--model=m", "--logdir=x", "--mode=train"],
            "ParamsError: --mode=train has no result to compare. Leave it out: it is train_eval",
        ),
        (
            ["--seeds=1", "--", "--modle=m", "--logdir=x"],
            "ParamsError: unknown flag --modle; nearest --mode, --model",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeat.run(arguments) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(text)
    assert len(found.err.splitlines()) == 1


@pytest.mark.slow
def test_the_trainer_itself_is_repeated(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lingvo_gpipe.repeat", "--seeds=3,5", "--"]
    flags = ["--model=image.digits.MLP", f"--logdir={tmp_path}", "--max_steps=2"]
    done = subprocess.run([*program, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [
        json.loads((tmp_path / f"seed_{seed}" / "result.json").read_text())["metrics"]["accuracy"]
        for seed in (3, 5)
    ]
    mean, spread = sum(results) / 2, abs(results[0] - results[1]) / math.sqrt(2)
    assert results[0] != results[1]
    last = done.stdout.splitlines()[-1]
    assert last == f"accuracy mean={mean:.4f} std={spread:.4f} n=2"
