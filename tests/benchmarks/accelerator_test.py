"""The questions to an accelerator are answered at toy size on CPUs, and their frame keeps time."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator import __main__ as frame
from benchmarks.accelerator import gpt2, sameness, timeline
from benchmarks.accelerator.question import Setting, attempt
from lingvo_gpipe import schedule, trainer
from tests.networks import sameness_nets

FOLDER = Path(frame.__file__).parent
# Question → number of processes that share its cases; only the first one's are tried here.
SHARED = {"sameness": 2, "memory": 9, "speed": 3}


def failures(value: Any) -> list[str]:
    """Return the tracebacks in answers."""
    if not isinstance(value, dict):
        return []
    own = [value["error"]] if "error" in value else []
    return own + [text for inner in value.values() for text in failures(inner)]


def without_workers(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run the trainer as `cluster/workers_test.py` does over workers, in this process."""
    *arguments, workers = command[command.index("lingvo_gpipe.trainer") + 1 :]
    assert workers == "--workers=local:2"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = trainer.run(arguments)
    return subprocess.CompletedProcess(command, code, printed.getvalue(), "")


# They take 10 to 30 s each, and ask what tests of the library ask, too.
LONG = ("fit", "out_of_memory", "repetition", "workers", "memory", "speed", "largest")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(question.name, marks=pytest.mark.reliability_full)
        if question.name in LONG
        else question.name
        for question in frame.QUESTIONS
    ],
)
def test_a_question_is_answered_on_cpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "workers":
        monkeypatch.setattr(subprocess, "run", without_workers)
    module = importlib.import_module(f"benchmarks.accelerator.{name}")
    setting = Setting(cpu=True, folder=tmp_path, parts=SHARED.get(name, 1))
    answers = dict(module.answers(setting))
    assert failures(answers) == []
    assert answers
    json.dumps(answers)
    if name in EXPECTED:
        assert EXPECTED[name].items() <= answers.items()


EXPECTED: dict[str, dict[str, Any]] = {
    "checkpoint": {
        "other bits on the CPU": [],
        "other bits on the card again": [],
        "other bits after one more update of both": [],
    },
    "nonfinite": {
        "nowhere": "nowhere",
        "layer spoiled, micro-batch 0": "layer spoiled, output x, micro-batch 0",
        "field target, micro-batch 2": "field target of the mini-batch, micro-batch 2",
    },
    "repetition": {"conv": {}},
    "strings": {"step with text": "ran", "largest difference": 0.0},
    "workers": {"largest difference": 0.0},
}


def test_every_module_with_answers_is_a_question() -> None:
    modules = [path.stem for path in FOLDER.glob("*.py") if "def answers(" in path.read_text()]
    assert sorted(modules) == sorted(question.name for question in frame.QUESTIONS)


def test_points_of_sameness_hold_every_schedule_and_policy() -> None:
    cases = sameness.cases()
    points = [case for dtype, case in cases if dtype == "float64"]
    assert {case.schedule for case in points} == set(schedule.SCHEDULES)
    policies = {"full", "early", "except_last", "never", "recompute_grad"}
    assert {case.recompute for case in points} == policies
    assert {case.num_replicas for case in points} == {1, 2, 3}
    assert {case.net for case in points} >= {"conv", "tied", "skip", "amoeba_d_small"}
    assert any(sameness_nets.N % case.num_micro_batches for case in points)
    assert {dtype: len([1 for d, _ in cases if d == dtype]) for dtype in sameness.POINTS} == {
        dtype: count for dtype, (count, _) in sameness.POINTS.items()
    }


def test_what_lies_inside_slots() -> None:
    kernels = [(0.0, 1.0), (1.5, 2.0), (3.0, 5.0)]
    assert timeline.inside_s(kernels, [(0.5, 1.75), (4.0, 6.0)]) == 0.5 + 0.25 + 1.0


def test_gpt2_has_its_parameters() -> None:
    """With the 47 ids that pad the vocabulary."""
    small, medium = gpt2.sizes(on_cpu=False).values()
    assert small.parameters - 47 * small.units == 124_439_808
    assert medium.parameters - 47 * medium.units == 354_823_168
    assert small.speed(0.5, 16)["tokens/s"] == 32_768


def test_questions_that_measure_are_asked_alone() -> None:
    names = [[question.name for question in batch] for batch in frame.batches(frame.QUESTIONS)]
    assert names[0] == ["card", "sameness"]
    assert names[1:4] == [["memory"], ["largest"], ["speed"]]
    assert names[-1][-1] == "workers"
    assert [name for batch in names for name in batch] == [q.name for q in frame.QUESTIONS]


def ask(folder: Path, question: frame.Question, seconds: float = 60.0) -> dict[str, Any]:
    record = frame.Record(folder)
    frame.ask_all([question], ["--cpu"], time.monotonic() + seconds, record)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found[question.name]


def test_a_question_that_fails_leaves_its_traceback(tmp_path: Path) -> None:
    found = ask(tmp_path, frame.Question("absent", 30))
    assert "No module named 'benchmarks.accelerator.absent'" in found["failure"]["error"]
    assert found["process 0 ended"].startswith("failed with 1 after ")
    assert "ZeroDivisionError" in attempt(lambda: 1 / 0)["error"]


def test_a_question_is_ended_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(tmp_path, frame.Question("card", 30), 10.0) == {"process 0 ended": "left out"}
    monkeypatch.setattr(frame, "_LEAST_S", 0)
    found = ask(tmp_path, frame.Question("card", 1))
    assert found == {"process 0 ended": "out of time after 1 s"}


@pytest.mark.reliability_full
def test_the_command_writes_answers_and_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.accelerator", "--cpu", "--only=strings"]
    done = subprocess.run(
        [*command, f"--output={tmp_path}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[1],
    )
    assert "strings: largest difference: 0.0\n" in done.stdout
    assert done.stdout.endswith(f"results: {tmp_path}/results.json\n")
    answers = json.loads((tmp_path / "results.json").read_text())["strings"]
    assert answers.pop("process 0 ended").startswith("answered after ")
    assert answers == EXPECTED["strings"]
    assert (tmp_path / "log.txt").read_text().startswith("strings: ")
