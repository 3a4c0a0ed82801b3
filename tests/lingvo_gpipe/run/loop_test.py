"""A run has the same result after any interruptions, and refuses params it cannot continue with."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors, hyperparams, optim, task
from lingvo_gpipe.run import (
    checkpoints,
    evaluation,
    learner,
    log_directory,
    loop,
)
from lingvo_gpipe.run.checkpoints import files
from tests.support import saved, tensorboard_files
from tests.tiny_task import Points, one_layer_task, stop_after, tiny_task


@pytest.fixture
def lines() -> list[str]:
    """Return a list whose `append` receives the lines of a run."""
    return []


@pytest.mark.parametrize(
    ("accumulate", "stops"),
    [
        pytest.param(1, (1, 5, 3), marks=pytest.mark.reliability_full),
        (2, (6,)),
    ],
)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, lines: list[str], accumulate: int, stops: tuple[int, ...]
) -> None:
    params = tiny_task(accumulate=accumulate, average=optim.Average.Params(decay=0.9))
    whole = loop.run(params, tmp_path / "whole")
    assert whole.step == 12
    for updates in stops:
        result = loop.run(
            params, tmp_path / "parts", report=lines.append, should_stop=stop_after(updates)
        )
        assert result.ended == "signal"
        assert lines[-1].startswith(f"saved step={result.step} in {tmp_path}")
    parts = loop.run(params, tmp_path / "parts", report=lines.append)
    assert [line for line in lines if line.startswith("restored")] == [
        f"restored step={step}" for step in itertools.accumulate(stops)
    ]
    saved.check_same(whole.checkpoint, parts.checkpoint)


def test_an_evaluation_that_was_cut_off_is_made_up_for(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=4, save_interval_steps=2)
    # The first loss is the highest, so an omission is detected.
    params.eval.set(best="loss", best_is="highest")
    whole = loop.run(params, tmp_path / "whole", evaluate=True)
    # Asked before two updates and the first of two mini-batches of the evaluation.
    cut = loop.run(params, tmp_path / "parts", evaluate=True, should_stop=stop_after(3))
    assert (cut.step, cut.metrics) == (2, {})
    parts = loop.run(params, tmp_path / "parts", evaluate=True)
    saved.check_same(whole.checkpoint, parts.checkpoint)


def test_a_last_evaluation_that_was_cut_off_is_no_result(tmp_path: Path, lines: list[str]) -> None:
    params = one_layer_task(max_steps=2, save_interval_steps=2)
    # Asked before two updates and the first of two mini-batches of the evaluation.
    cut = loop.run(params, tmp_path, evaluate=True, report=lines.append, should_stop=stop_after(3))
    assert (cut.step, cut.metrics, cut.ended) == (2, {}, "signal")
    assert not (tmp_path / "result.json").exists()
    assert lines[-1].endswith("the same command goes on from it")
    whole = loop.run(params, tmp_path, evaluate=True)
    assert (whole.step, whole.ended) == (2, "max_steps")
    assert whole.metrics


def test_the_last_checkpoint_knows_the_best_of_the_last_evaluation(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=4, save_interval_steps=4)
    params.eval.set(best="accuracy", interval_steps=3)
    result = loop.run(params, tmp_path, evaluate=True)
    (best,) = checkpoints.find(str(tmp_path / log_directory.BEST))
    told = [checkpoints.read_value(prefix, "best/value") for prefix in (best, result.checkpoint)]
    assert told[0] == told[1] >= result.metrics["accuracy"]
    assert int(checkpoints.read_value(result.checkpoint, "eval/step")) == 4


def test_a_split_that_is_not_there_is_refused_before_the_first_update(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=4)
    params.eval.split = "validation"
    with pytest.raises(errors.InputError, match="has no split 'validation'"):
        loop.run(params, tmp_path, evaluate=True)
    assert not checkpoints.find(str(tmp_path / log_directory.CHECKPOINTS))
    assert loop.run(params, tmp_path).step == 4


@pytest.mark.parametrize(
    ("best", "best_is", "highest"),
    [
        ("accuracy", None, True),
        ("loss", None, False),
        ("loss/auxiliary", None, False),
        ("log_perplexity", None, False),
        ("loss", "highest", True),
        ("accuracy", "lowest", False),
    ],
)
def test_the_best_of_a_loss_is_the_lowest(best: str, best_is: Any, highest: bool) -> None:
    assert task.highest_is_best(task.Eval(best=best, best_is=best_is)) == highest


def test_another_split_has_separate_curves(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=1)
    params.eval.split = "test"
    loop.run(params, tmp_path, evaluate=True)
    assert evaluation.folder_of(tmp_path, params) == tmp_path / "eval"
    params.eval.split = "train"
    before = sorted(path.name for path in (tmp_path / "eval").iterdir())
    assert evaluation.run(params, tmp_path) is not None
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == before
    assert list((tmp_path / "eval_train").iterdir())
    params.eval.split = "train[:50%]"
    assert evaluation.folder_of(tmp_path, params) == tmp_path / "eval_train_50_"


def test_other_params_are_refused_with_the_fields_and_the_way_out(tmp_path: Path) -> None:
    params = tiny_task(max_steps=2)
    params.name = "lab.One"
    path = loop.run(params, tmp_path).checkpoint
    params.model.layers[0].units = 9
    with pytest.raises(errors.TrainingError) as caught:
        loop.run(params, tmp_path)
    first, detail = str(caught.value).splitlines()
    assert "holds a run with other params (model.layers[0].units: 8 -> 9). Give another" in first
    assert f"--checkpoint={path}" in first
    assert detail == "    model.layers[0].units: 8 -> 9"
    params.name = "lab.Other"
    with pytest.raises(errors.TrainingError, match=r"holds a run of 'lab.One', not of 'lab.Other'"):
        loop.run(params, tmp_path)


def test_a_run_that_began_before_a_field_was_there_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hyperparams.register_package("tests")
    params = tiny_task(max_steps=2)
    path = loop.run(params, tmp_path).checkpoint
    lines = params.to_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith("model.layers[0].trainable")]
    assert len(older) == len(lines) - 1
    monkeypatch.setattr(checkpoints, "newest_text", lambda _: (path, "".join(older)))
    params.train.max_steps = 3
    assert loop.run(params, tmp_path).step == 3


def test_two_runs_may_not_share_a_log_directory(tmp_path: Path) -> None:
    with (
        log_directory.locked(tmp_path),
        pytest.raises(errors.TrainingError, match="another process trains in"),
    ):
        loop.run(one_layer_task(), tmp_path)
    assert loop.run(one_layer_task(max_steps=1), tmp_path).step == 1


def test_a_log_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.TrainingError) as caught:
        loop.run(tiny_task(), tmp_path / "file" / "run")
    assert str(caught.value) == (
        f"--logdir={tmp_path}/file/run cannot be written: Not a directory. Name a folder of your "
        "own"
    )


# What stops a run.


def test_a_loss_that_is_not_finite_stops_with_step_and_layer(tmp_path: Path) -> None:
    params = tiny_task(max_steps=9, save_interval_steps=1)
    loop.run(params.copy().set_path("train.max_steps", 2), tmp_path)
    params.train.optimizer.learning_rate = 1e38
    with pytest.raises(errors.TrainingError) as caught:
        loop.run(params, tmp_path)
    text = str(caught.value)
    assert text.startswith("the update of step 3 is not finite: it began in layer ")
    assert f"the last good checkpoint is {tmp_path}/checkpoints/ckpt-3" in text
    assert len(text.splitlines()) == 1
    values = saved.values(f"{tmp_path}/checkpoints/ckpt-3")
    assert all(np.isfinite(value).all() for key, value in values.items() if "variables" in key)


def test_a_loss_scale_that_is_too_large_is_lowered_and_no_update_is_lost(tmp_path: Path) -> None:
    params = tiny_task(max_steps=3, loss_scale=optim.LossScale.Params(initial=2.0**40))
    params.model.dtype = "mixed_float16"
    found = saved.values(loop.run(params, tmp_path).checkpoint)
    assert found["step"] == 3
    skipped = int(found["loss_scale/skipped"])
    assert skipped > 10
    # Every mini-batch was drawn, those of skipped updates too.
    assert found["input/position"] == 3 + skipped


def test_patience_ends_a_run_and_its_result_says_so(tmp_path: Path, lines: list[str]) -> None:
    params = one_layer_task(max_steps=100)
    params.train.optimizer.learning_rate = 0.0
    params.eval.set(best="accuracy", patience=2, interval_steps=3)
    result = loop.run(params, tmp_path, evaluate=True, report=lines.append)
    assert (result.step, result.ended) == (9, "patience")
    assert "ended early: accuracy was not better 2 times" in lines
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["step"] == 9
    assert told["metrics"]["accuracy"] == result.metrics["accuracy"]
    again = loop.run(params, tmp_path, evaluate=True)
    assert (again.step, again.ended) == (9, "patience")


def test_the_best_checkpoint_is_kept_and_begins_again_with_another_metric(tmp_path: Path) -> None:
    params = tiny_task(max_steps=8)
    params.eval.set(best="accuracy", interval_steps=1)
    loop.run(params, tmp_path, evaluate=True)
    (best,) = checkpoints.find(str(tmp_path / log_directory.BEST))
    value = float(checkpoints.read_value(best, "best/value"))
    found = evaluation.run(params, None, which=best)
    assert found is not None
    assert found.values["accuracy"] == pytest.approx(value)
    # No loss of this run is higher than the best accuracy, so the old best would stay.
    params.train.max_steps = 9
    params.eval.set(best="loss", best_is="highest")
    result = loop.run(params, tmp_path, evaluate=True)
    assert 0 < result.metrics["loss"] < value
    kept = float(checkpoints.read_value(result.checkpoint, "best/value"))
    assert kept == pytest.approx(result.metrics["loss"])


def test_patience_without_evaluations_is_said_to_end_nothing(
    tmp_path: Path, lines: list[str]
) -> None:
    params = one_layer_task(max_steps=1)
    params.eval.set(best="accuracy", patience=2)
    loop.run(params, tmp_path, report=lines.append)
    assert sum("eval.patience ends nothing" in line for line in lines) == 1


def test_the_best_of_a_course_that_was_left_is_reported_with_its_own_value(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=6)
    params.train.save_interval_steps = 4
    params.eval.set(best="loss", interval_steps=1)
    best = loop.run(params, tmp_path, evaluate=True).best
    for path in (tmp_path / "checkpoints").glob("ckpt-6*"):  # as if it was killed before that
        path.unlink()
    params.train.optimizer.learning_rate = 0.0
    result = loop.run(params, tmp_path, evaluate=True)
    (kept,) = checkpoints.find(str(tmp_path / log_directory.BEST))
    assert checkpoints.step_of(kept) == 6
    assert result.best == best == float(checkpoints.read_value(kept, "best/value"))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("train.accumulate", 0, "train.accumulate=0 is too small. Use 1 or more"),
        ("eval.patience", 2, "eval.patience=2 needs a metric to watch. Set eval.best"),
        ("eval.best", "acuracy", "eval.best names 'acuracy', which the network does not compute; "),
        ("eval.metrics", ("top5",), "eval.metrics names 'top5', which the network does not comp"),
    ],
)
def test_fields_that_cannot_be_right_are_named(
    tmp_path: Path, path: str, value: Any, text: str
) -> None:
    with pytest.raises(errors.ParamsError) as caught:
        loop.run(one_layer_task().set_path(path, value), tmp_path, evaluate=True)
    assert str(caught.value).startswith(text)


# Checkpoints that are written while training goes on.


def test_checkpoints_written_in_the_background_have_the_same_bits(tmp_path: Path) -> None:
    params = tiny_task(max_steps=5, save_interval_steps=1, keep_checkpoints=5)
    folders = {}
    for name in ("at_once", "in_background"):
        params.train.async_checkpoints = name == "in_background"
        loop.run(params, tmp_path / name)
        folders[name] = checkpoints.find(str(tmp_path / name / log_directory.CHECKPOINTS))
    assert [checkpoints.step_of(path) for path in folders["at_once"]] == [1, 2, 3, 4, 5]
    for one, other in zip(*folders.values(), strict=True):
        assert checkpoints.step_of(one) == checkpoints.step_of(other)
        saved.check_same(one, other)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = files.begin
    steps: list[int] = []
    went_on = threading.Event()

    def note(step: int) -> None:
        steps.append(step)
        if step == 400:
            went_on.set()

    def full(prefix: str, text: str) -> None:
        if prefix.endswith("-400"):
            went_on.wait(10)  # the run does not wait for it
            raise OSError(28, "No space left on device")
        begin(prefix, text)

    monkeypatch.setattr(files, "begin", full)
    params = one_layer_task(max_steps=10_000, save_interval_steps=200)
    with pytest.raises(errors.CheckpointError, match=r"-400: .* \(No space .* one is .*-200\."):
        loop.run(params, tmp_path, note_step=note)
    assert 400 <= steps[-1] < 600


def test_a_best_checkpoint_that_cannot_be_written_names_where_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = files.begin

    def full(prefix: str, text: str) -> None:
        if prefix.startswith(str(tmp_path / log_directory.BEST)):
            raise OSError(28, "No space left on device")
        begin(prefix, text)

    monkeypatch.setattr(files, "begin", full)
    params = one_layer_task(max_steps=4, save_interval_steps=1)
    params.eval.set(best="accuracy", interval_steps=2)
    last = re.escape(f"the last whole one is {tmp_path / log_directory.CHECKPOINTS}/ckpt-1.")
    with pytest.raises(errors.CheckpointError, match=rf"/best/ckpt-2: .*; {last}"):
        loop.run(params, tmp_path, evaluate=True)


# What a run reports.


def test_tensorboard_gets_scalars_text_and_the_schedule(tmp_path: Path) -> None:
    params = tiny_task(max_steps=4, weight_decay=optim.WeightDecay.Params(kernel=1e-3))
    params.eval.interval_steps = 2
    result = loop.run(params, tmp_path, evaluate=True)
    train = tensorboard_files.curves(tmp_path / "train")
    wanted = {
        "loss",
        "accuracy",
        "learning_rate",
        "gradient_norm",
        "weight_decay_loss",
        "examples_per_second",
        "weight_per_second",
        "input_wait_share",
        "bubble_share_planned",
        "traces",
        "model",
        "params",
        "schedule",
    }
    assert wanted == set(train)
    assert [step for step, _ in train["loss"]] == [1, 2, 3, 4]
    first = {tag: points[0][1] for tag, points in train.items()}
    assert "    model.num_partitions: 2" in first["params"].splitlines()
    assert 0 < first["bubble_share_planned"] < 1
    assert first["schedule"][2].startswith(b"\x89PNG")
    held_out = tensorboard_files.curves(tmp_path / "eval")
    assert set(held_out) == {"loss", "accuracy"}
    assert held_out["accuracy"][-1] == (4, pytest.approx(result.metrics["accuracy"]))


class Lettered(Points):
    """Points with a file that belongs to their folder."""

    class Params(Points.Params):
        """Params of Lettered."""

        data_dir: str = hyperparams.field("abc", "Its letters.")

    def assets(self) -> dict[str, bytes]:
        return {"letters.txt": self.params.data_dir.encode()}


def test_a_run_keeps_the_assets_of_its_data_and_refuses_others(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=2)
    params.input = Lettered.Params(batch_size=8)
    (tmp_path / "letters.txt").write_text("of a run that saved nothing")
    loop.run(params, tmp_path)
    assert (tmp_path / "letters.txt").read_bytes() == b"abc"
    other = params.copy().set_path("input.data_dir", "xyz")
    with pytest.raises(errors.TrainingError) as caught:
        loop.run(other, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/letters.txt is not that of the data: the run began with other data. "
        "Use that data, or another --logdir"
    )
    assert (tmp_path / "letters.txt").read_bytes() == b"abc"


def test_data_that_has_changed_is_reported(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = one_layer_task(max_steps=1)
    loop.run(params, tmp_path, report=lines.append)
    whole = Points.arrays

    def fewer(self: Points) -> Any:
        return {name: {k: v[:13] for k, v in of.items()} for name, of in whole(self).items()}

    monkeypatch.setattr(Points, "arrays", fewer)
    params.train.max_steps = 2
    loop.run(params, tmp_path, report=lines.append)
    params.train.max_steps = 3
    loop.run(params, tmp_path, report=lines.append)
    (line,) = [line for line in lines if "the data changed" in line]
    assert "number of examples in split 'train' was 42, is 13" in line


def test_a_run_continues_without_curves_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train").write_text("a file where TensorBoard's folder should be")
    assert loop.run(one_layer_task(max_steps=2), tmp_path).step == 2
    told = [text for text in caplog.messages if "receives no more curves" in text]
    assert len(told) == 1


# One update.


def test_graphs_grow_with_no_number_of_mini_batches() -> None:
    params = tiny_task()
    source = params.input.instantiate()
    learned = learner.Learner(params, source.element_spec(True))
    batches = list(itertools.islice(source.batches(0), 5))
    learned.update(batches[:2])
    traces = learned.num_traces
    learned.update(batches)
    learned.update(batches[:3])
    assert learned.num_traces == traces
