"""When hooks are called, what they may ask for, and that they change no number of a run."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hooks, hyperparams
from lingvo_gpipe.cluster import local
from lingvo_gpipe.run import checkpoints, log_directory, loop
from tests.support import saved
from tests.tiny_task import one_layer_task, stop_after, tiny_task

CALLS: list[tuple[str, int]] = []


class Noted(hooks.Hook):
    """Notes its calls; asks and fails where its params say so."""

    class Params(hooks.Hook.Params):
        """Params of Noted."""

        fails_in: str = hyperparams.field("", "Method that fails.")
        fails_at: int = hyperparams.field(0, "First step at which it does.")
        stop_at: int = hyperparams.field(0, "Step after which it asks for a stop; 0: never.")
        save_at: int = hyperparams.field(0, "Step after which it asks for a checkpoint.")

    params: Params

    def begin(self, moment: hooks.Moment) -> None:
        self.note("begin", moment)

    def after_update(self, moment: hooks.Moment) -> None:
        self.note("after_update", moment)
        assert moment.metrics["loss"] > 0
        if moment.step == self.params.stop_at:
            moment.ask_to_stop("it has seen enough")
        if moment.step == self.params.save_at:
            moment.ask_to_save()

    def after_evaluation(self, moment: hooks.Moment) -> None:
        self.note("after_evaluation", moment)
        assert 0 <= moment.metrics["accuracy"] <= 1

    def after_checkpoint(self, moment: hooks.Moment) -> None:
        self.note("after_checkpoint", moment)
        assert checkpoints.step_of(moment.checkpoint) == moment.step
        assert Path(f"{moment.checkpoint}.index").exists()
        assert moment.metrics["checkpoint/mib"] > 0

    def end(self, moment: hooks.Moment) -> None:
        self.note(f"end by {moment.ended}", moment)

    def note(self, method: str, moment: hooks.Moment) -> None:
        CALLS.append((method, moment.step))
        moment.report(f"line of {method}")
        if self.params.fails_in == method.split()[0] and moment.step >= self.params.fails_at:
            raise ValueError("it is broken\nand says more")


class Meddling(hooks.Hook):
    """Does all that a hook can: draws, seeds, asks for a checkpoint after each update."""

    def after_update(self, moment: hooks.Moment) -> None:
        tf.random.set_seed(moment.step)
        keras.utils.set_random_seed(moment.step)
        np.random.rand()
        tf.random.normal([2])
        moment.metrics.clear()
        moment.ask_to_save()

    def after_checkpoint(self, moment: hooks.Moment) -> None:
        # Some updates after it was begun, since it is written in the background.
        assert checkpoints.step_of(moment.checkpoint) == moment.step


@pytest.fixture
def lines() -> list[str]:
    """Return a list whose `append` receives the lines of a run."""
    CALLS.clear()
    return []


def noted(**fields: Any) -> Any:
    """Return a task of 4 updates with a `Noted` hook."""
    params = one_layer_task(max_steps=4, save_interval_steps=2, async_checkpoints=False)
    params.train.hooks = (Noted.Params(**fields),)
    return params


def test_a_hook_is_called_at_each_moment_of_a_run_and_of_a_resumed_one(
    tmp_path: Path, lines: list[str]
) -> None:
    params = noted(save_at=1)
    params.eval.interval_steps = 4
    cut = loop.run(params, tmp_path, evaluate=True, report=lines.append, should_stop=stop_after(3))
    assert cut.ended == "signal"
    assert CALLS == [
        ("begin", 0),
        ("after_update", 1),
        ("after_checkpoint", 1),
        ("after_update", 2),
        ("after_checkpoint", 2),
        ("after_update", 3),
        ("after_checkpoint", 3),
        ("end by signal", 3),
    ]
    assert lines.count("line of after_update") == 3
    CALLS.clear()
    loop.run(params, tmp_path, evaluate=True)
    assert CALLS == [
        ("begin", 3),
        ("after_update", 4),
        ("after_evaluation", 4),
        ("after_checkpoint", 4),
        ("end by max_steps", 4),
    ]


def test_no_hook_changes_a_number(tmp_path: Path) -> None:
    params = tiny_task(max_steps=5, save_interval_steps=2, keep_checkpoints=9)
    plain = loop.run(params, tmp_path / "plain", evaluate=True)
    params.train.hooks = (Meddling.Params(), hooks.CSVLog.Params())
    hooked = loop.run(params, tmp_path / "hooked", evaluate=True)
    kept = checkpoints.find(str(tmp_path / "hooked" / log_directory.CHECKPOINTS))
    assert [checkpoints.step_of(path) for path in kept] == [1, 2, 3, 4, 5]
    assert hooked.metrics == plain.metrics
    one, other = saved.values(plain.checkpoint), saved.values(hooked.checkpoint)
    assert one.keys() == other.keys()
    assert all(one[key].tobytes() == other[key].tobytes() for key in one)


def test_hooks_of_a_run_may_change_when_it_is_resumed(tmp_path: Path, lines: list[str]) -> None:
    params = noted()
    loop.run(params, tmp_path)
    params.train.hooks = (hooks.CSVLog.Params(), Noted.Params(interval_steps=2))
    params.train.max_steps = 6
    CALLS.clear()
    loop.run(params, tmp_path, report=lines.append)
    assert "    train.hooks[0].class: tests.lingvo_gpipe.hooks" in "\n".join(lines)
    assert [call for call in CALLS if call[0] == "after_update"] == [("after_update", 6)]


def test_a_hook_may_end_a_run(tmp_path: Path, lines: list[str]) -> None:
    result = loop.run(noted(stop_at=3), tmp_path, evaluate=True, report=lines.append)
    assert (result.step, result.ended) == (3, "hook")
    assert result.metrics  # it is evaluated as at a last step
    assert json.loads((tmp_path / "result.json").read_text())["ended"] == "hook"
    (line,) = [line for line in lines if "ends the run" in line]
    assert line.startswith("hook tests.lingvo_gpipe.hooks.calls_test.Noted (train.hooks[0]) ends")
    assert line.endswith(" at step 3: it has seen enough")
    assert CALLS[-1] == ("end by hook", 3)


@pytest.mark.parametrize(
    ("method", "step", "restored"),
    [
        ("begin", 0, 0),
        ("after_update", 3, 3),
        ("after_evaluation", 2, 2),
        ("after_checkpoint", 2, 2),
        ("end", 4, 4),
    ],
)
def test_a_failing_hook_is_named_and_no_update_is_lost(
    tmp_path: Path, lines: list[str], method: str, step: int, restored: int
) -> None:
    params = noted(fails_in=method, fails_at=step)
    with pytest.raises(errors.HookError) as caught:
        loop.run(params, tmp_path, evaluate=True, report=lines.append)
    text = str(caught.value)
    assert text.startswith(
        f"hook {__name__}.Noted (train.hooks[0]) failed in {method} at step {step}: "
        f"ValueError: it is broken ({__file__}, line "
    )
    assert text.endswith(
        "). Correct it, or set train.hooks[0].on_error=log; the same command goes on from the "
        "last checkpoint"
    )
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "result.json").exists()
    assert [call for call in CALLS if call[0].startswith("end")] == (
        [("end by max_steps", 4)] if method == "end" else []
    )
    lines.clear()
    params.train.hooks[0].on_error = "log"
    result = loop.run(params, tmp_path, evaluate=True, report=lines.append)
    assert (f"restored step={restored}" in lines) == (restored > 0)
    assert result.step == 4
    (failure,) = [line for line in lines if "failed in" in line] if restored < 4 else [""]
    assert restored == 4 or failure.endswith("; the run goes on without it")


def test_a_run_that_fails_ends_its_hooks_with_its_own_error(
    tmp_path: Path, lines: list[str]
) -> None:
    params = noted(fails_in="end")
    params.train.optimizer.learning_rate = 1e38
    with pytest.raises(errors.TrainingError, match="the update of step 1 is not finite"):
        loop.run(params, tmp_path, report=lines.append)
    assert CALLS[-1] == ("end by error", 1)
    assert "failed in end at step 1: ValueError: it is broken" in lines[-1]


def test_the_reader_of_a_hooks_lines_may_leave(tmp_path: Path, lines: list[str]) -> None:
    del lines

    def gone(line: str) -> None:
        if line == "line of after_update":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        loop.run(noted(), tmp_path, report=gone)
    (whole,) = checkpoints.find(str(tmp_path / log_directory.CHECKPOINTS))
    assert checkpoints.step_of(whole) == 1


def test_a_dry_run_calls_hooks_that_write_in_its_folder_alone(
    tmp_path: Path, lines: list[str]
) -> None:
    params = noted()
    params.train.hooks = (*params.train.hooks, hooks.CSVLog.Params())
    loop.dry_run(params, tmp_path / "run", report=lines.append)
    assert lines[0] == (
        "dry run: not called, since they may write elsewhere: hook "
        f"{__name__}.Noted (train.hooks[0])"
    )
    assert CALLS == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.HookError, match=r"hooks\.CSVLog \(train\.hooks\[1\]\) cannot be ma"):
        loop.dry_run(
            params.set_path("train.hooks[1].eval_file", "../eval.csv"),
            tmp_path,
            report=lines.append,
        )


class Broken(hooks.Hook):
    """Cannot be made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (hooks.Hook.Params(interval_steps=0), "train.hooks[0].interval_steps=0 is too small. Use"),
        (
            Broken.Params(),
            f"hook {__name__}.Broken (train.hooks[0]) cannot be made: RuntimeError: ",
        ),
        (
            hooks.CSVLog.Params(train_file="eval_metrics.csv"),
            "hook hooks.CSVLog (train.hooks[0]) cannot be made: train_file and eval_file are both ",
        ),
    ],
)
def test_a_hook_that_cannot_be_is_refused_before_the_first_update(
    tmp_path: Path, hook: Any, text: str
) -> None:
    params = one_layer_task(max_steps=1)
    params.train.hooks = (hook,)
    with pytest.raises(errors.UserError) as caught:
        loop.run(params, tmp_path)
    assert str(caught.value).startswith(text)
    assert len(str(caught.value).splitlines()) == 1


def test_installed_packages_announce_hooks(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"value": f"{__name__}:Noted"}

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "lingvo_gpipe.hooks"
        return [importlib.metadata.EntryPoint("noted", found["value"], group)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    params = one_layer_task(max_steps=1)
    loop.run(params, tmp_path / "one")
    assert ("begin", 0) in CALLS
    CALLS.clear()
    params.train.hooks = (Noted.Params(fails_in="x"),)  # the package's is not another one
    loop.run(params, tmp_path / "two")
    assert CALLS.count(("begin", 0)) == 1
    params.train.set(hooks=(), installed_hooks=False)
    CALLS.clear()
    loop.run(params, tmp_path / "three")
    assert CALLS == []
    params.train.installed_hooks = True
    for value, reason in (
        ("nowhere.at_all:Hook", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"{__name__}:noted", f"{__name__}:noted is not a subclass of hooks.Hook"),
    ):
        found["value"] = value
        with pytest.raises(errors.HookError) as caught:
            loop.run(params, tmp_path / "four", report=lines.append)
        text = str(caught.value)
        assert text.startswith(
            f"entry point noted = {value} of an installed package makes no hook: {reason}"
        )
        assert text.endswith("Correct or remove the package, or set train.installed_hooks=False")


class Away(hooks.Hook):
    """Reaches other hosts."""

    class Params(hooks.Hook.Params):
        """Params of Away."""

    @property
    def needs_network(self) -> bool:
        return True


def test_a_hook_that_reaches_other_hosts_is_not_run_in_a_private_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = tiny_task(max_steps=1, hooks=(hooks.CSVLog.Params(), Away.Params()))
    monkeypatch.setenv(local.LOCAL, "private")
    with pytest.raises(errors.NoNetworkError, match=r"^hook .*Away .* reaches other hosts$"):
        loop.run(params, tmp_path)
    params.train.hooks = (hooks.CSVLog.Params(),)
    assert loop.run(params, tmp_path).step == 1
    params.train.set(hooks=(Away.Params(),), max_steps=2)
    monkeypatch.setenv(local.LOCAL, "open")
    assert loop.run(params, tmp_path).step == 2
