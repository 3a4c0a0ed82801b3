"""Evaluation of a run: every example once, by averages, and each checkpoint as it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_gpipe import errors, optim
from lingvo_gpipe.run import eval_mode, evaluation, learner, loop
from tests.tiny_task import one_layer_task, tiny_task


def test_evaluation_counts_every_example_once_whatever_the_batches() -> None:
    params = tiny_task()
    source = params.input.instantiate()
    pipe = learner.Learner(params, source.element_spec(True)).pipe
    found = [
        evaluation.evaluate(pipe, source.evaluation("test", size), step=7) for size in (13, 5, 1)
    ]
    assert all(each is not None and each.num_rows == 13 for each in found)
    values = [each.values for each in found if each is not None]
    for other in values[1:]:
        assert other == pytest.approx(values[0], rel=1e-6)
    assert found[0] is not None
    accuracy, loss = values[0]["accuracy"], values[0]["loss"]
    assert found[0].line() == f"eval step=7 accuracy={accuracy:.4f} loss={loss:.4f}"


def test_evaluation_without_an_example_is_reported() -> None:
    params = tiny_task()
    pipe = learner.Learner(params, params.input.instantiate().element_spec(True)).pipe
    with pytest.raises(errors.InputError, match=r"no example to evaluate\. Check eval\.split"):
        evaluation.evaluate(pipe, [], step=0)


def test_evaluation_uses_averages_where_training_keeps_them(tmp_path: Path) -> None:
    params = tiny_task(max_steps=6, average=optim.Average.Params(decay=0.99, warmup=False))
    result = loop.run(params, tmp_path, evaluate=True)
    lines: list[str] = []
    eval_mode.run(params, tmp_path, report=lines.append)
    assert lines == [
        f"eval step=6 accuracy={result.metrics['accuracy']:.4f} loss={result.metrics['loss']:.4f}"
    ]
    params.train.average = None
    plain: list[str] = []
    eval_mode.run(params, tmp_path, report=plain.append)
    assert plain != lines


def test_a_run_without_checkpoints_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match=r"has no checkpoint\. Train first, or name"):
        eval_mode.run(tiny_task(), tmp_path)


def test_following_ends_with_a_run_that_ended_early(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=100)
    params.train.optimizer.learning_rate = 0.0
    params.eval.set(best="accuracy", patience=1, interval_steps=2)
    ended = loop.run(params, tmp_path, evaluate=True)
    assert ended.ended == "patience"
    found = eval_mode.follow(params, tmp_path)
    assert [each.step for each in found] == [ended.step]
