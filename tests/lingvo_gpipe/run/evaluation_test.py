"""Evaluation: every example once; the best checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, optim
from lingvo_gpipe.input import Batch, Batches
from lingvo_gpipe.layers import base
from lingvo_gpipe.run import checkpoints, evaluation, learner, loop, tensorboard
from lingvo_gpipe.run.examples import Example
from tests.support import saved, tensorboard_files
from tests.tiny_task import Points, one_layer_task, tiny_task

HELD_OUT = 13


def ranked_task(make: Callable[..., Any] = one_layer_task, **train: Any) -> Any:
    params = make(**train)
    params.model.layers[-1].set(top_k=2)
    params.input = Points.Params(batch_size=8, eval_batch_size=5)
    params.eval.best = "accuracy"
    return params


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a task, and the folder of its run without evaluation."""
    params = ranked_task(tiny_task, max_steps=12, save_interval_steps=4)
    folder = tmp_path_factory.mktemp("ran")
    loop.run(params, folder)
    return params, folder


def test_every_example_is_counted_once_whatever_the_batches(ran: tuple[Any, Path]) -> None:
    fields = Points.Params(batch_size=1).instantiate().arrays()["test"]
    logits = saved.restored(*ran).evaluate(fields, outputs=True).outputs["x"]
    accuracy = np.mean(fields["label"] == np.argmax(logits, -1))
    values = []
    for size in (13, 5, 4, 1):
        params = ran[0].copy()
        params.input.eval_batch_size = size
        found = evaluation.run(params, ran[1])
        assert found is not None
        assert found.num_rows == HELD_OUT
        assert accuracy == pytest.approx(found.values["accuracy"])
        assert found.values["accuracy"] <= found.values["top2"] <= 1.0
        values.append(found.values)
        assert found.values == pytest.approx(values[0], rel=1e-6)


def test_an_evaluation_that_is_stopped_has_no_result(ran: tuple[Any, Path]) -> None:
    params, folder = ran
    lines: list[str] = []
    assert evaluation.run(params, folder, report=lines.append, should_stop=lambda: True) is None
    assert lines == []


def test_a_vector_with_labels_is_a_curve_for_each_that_was_seen() -> None:
    metric = base.MetricSpec("hits", tf.identity, labels=("a", "b", "c"))
    assert metric.curves(np.array([0.5, np.nan, 0.0])) == {"hits/a": 0.5, "hits/c": 0.0}
    assert base.MetricSpec("hits", tf.identity).curves(np.array([0.5])) == {}


def test_metrics_that_are_named_alone_are_reported(ran: tuple[Any, Path]) -> None:
    params = ran[0].copy()
    params.eval.metrics = ("top2",)
    params.eval.best = None
    found = evaluation.run(params, ran[1])
    assert found is not None
    assert (set(found.values), found.arrays) == ({"top2", "loss"}, {})


@pytest.mark.parametrize(("best", "metrics"), [("top3", ()), ("accuracy", ("top2",))])
def test_a_best_that_no_evaluation_reports_as_a_number_is_refused(
    ran: tuple[Any, Path], best: str, metrics: tuple[str, ...]
) -> None:
    params = ran[0].copy()
    params.eval.set(best=best, metrics=metrics)
    with pytest.raises(errors.ParamsError, match=f"eval.best names '{best}', which"):
        evaluation.run(params, ran[1])


def test_a_class_name_that_is_not_utf_8_is_drawn(tmp_path: Path) -> None:
    classes = ("red", b"gr\xfcn".decode(errors="surrogateescape"))  # from the name of a folder
    example = Example(1, 1, 0.5, np.zeros((2, 2, 1), np.uint8))
    found = evaluation.Evaluation(1, {"loss": 0.5}, {}, 3, examples=(example,))
    writer = tensorboard.Writer(tmp_path)
    tensorboard.write_evaluation(writer, found, classes)
    writer.close()
    (picture,) = tensorboard_files.values(tmp_path, "examples")
    assert picture[2][:8] == b"\x89PNG\r\n\x1a\n"


class Shorter(Batches):
    """Leaves out the first example of each mini-batch."""

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(super().__iter__(), 1):
            self.counts["left_out"] = number
            yield {name: value[1:] for name, value in batch.items()}


def test_examples_that_cannot_be_read_are_reported() -> None:
    params = tiny_task()
    own = params.input.instantiate()
    pipe = params.model.instantiate()
    pipe.build(own.element_spec())
    batches = Shorter(own.evaluation("test", 5).dataset)
    found = evaluation.evaluate(pipe, batches, step=3)
    assert found is not None
    assert (found.num_rows, found.unread) == (HELD_OUT - 3, {"left_out": 3})
    assert found.line().endswith(" left_out=3")


@pytest.mark.parametrize(("split", "mark"), [("test", 0.9), ("train", 0.5)])
def test_a_best_mark_ends_with_the_split_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, mark: float
) -> None:
    params = ranked_task(max_steps=2)
    values = iter((0.9, 0.5))
    monkeypatch.setattr(evaluation.Evaluation, "number", lambda *_: next(values))
    loop.run(params, tmp_path, evaluate=True)
    params.train.max_steps = 3
    params.eval.split = split
    result = loop.run(params, tmp_path, evaluate=True)
    assert checkpoints.read_value(result.checkpoint, "best/value") == mark
    (best,) = checkpoints.find(str(tmp_path / "best"))
    assert checkpoints.step_of(best) == (2 if mark == 0.9 else 3)


def test_data_are_opened_once_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    begin = Points.__init__

    def count(self: Points, params: Any) -> None:
        opened.append(params)
        begin(self, params)

    monkeypatch.setattr(Points, "__init__", count)
    params = ranked_task(max_steps=1)
    for start in (
        lambda: loop.run(params, tmp_path),
        lambda: evaluation.run(params, tmp_path),
    ):
        opened.clear()
        start()
        assert len(opened) == 1


class Spoiled(Points):
    """Points with a NaN in the split test."""

    def arrays(self) -> Any:
        splits = super().arrays()
        splits["test"]["point"][3, 1] = np.nan
        return splits


def test_an_evaluation_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    params = ranked_task(max_steps=2)
    params.input = Spoiled.Params(batch_size=8)
    params.eval.best = "loss"
    lines: list[str] = []
    loop.run(params, tmp_path, evaluate=True, report=lines.append)
    assert any("the evaluation of step 2 is not finite (loss)" in line for line in lines)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["loss"] is None


def test_evaluation_of_no_checkpoint_is_refused() -> None:
    with pytest.raises(errors.CheckpointError, match="neither a checkpoint nor a log directory"):
        evaluation.run(one_layer_task(), None)


def test_evaluation_without_an_example_is_reported() -> None:
    params = tiny_task()
    pipe = learner.Learner(params, params.input.instantiate().element_spec(True)).pipe
    with pytest.raises(errors.InputError, match=r"no example to evaluate\. Check eval\.split"):
        evaluation.evaluate(pipe, [], step=0)


def test_evaluation_uses_averages_where_training_keeps_them(tmp_path: Path) -> None:
    params = tiny_task(max_steps=6, average=optim.Average.Params(decay=0.99, warmup=False))
    result = loop.run(params, tmp_path, evaluate=True)
    lines: list[str] = []
    evaluation.run(params, tmp_path, report=lines.append)
    assert lines == [
        f"eval step=6 accuracy={result.metrics['accuracy']:.4f} loss={result.metrics['loss']:.4f}"
    ]
    params.train.average = None
    plain: list[str] = []
    evaluation.run(params, tmp_path, report=plain.append)
    assert plain != lines


def test_a_run_without_checkpoints_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match=r"has no checkpoint\. Train first, or name"):
        evaluation.run(tiny_task(), tmp_path)
