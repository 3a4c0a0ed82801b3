"""Texts of evaluations: made when they are asked for, and never at the cost of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, task
from lingvo_gpipe.run import evaluation, loop
from tests.support import tensorboard_files
from tests.tiny_task import one_layer_task

hyperparams.register_package(__name__)
NOTHING: Any = None


class Summing(task.Task):
    """A task whose evaluations show the sum of the squares of its weights."""

    class Params(task.Task.Params):
        """Params of Summing."""

        fault: bool = hyperparams.field(False, "They cannot be made.")

    params: Params
    made: int = 0

    def texts(self, pipe: Any, source: Any) -> task.Texts:
        del source
        type(self).made += 1
        if self.params.fault:
            raise errors.LayerError("this network writes nothing")

        def texts() -> Mapping[str, str]:
            total = sum(float(tf.reduce_sum(w**2)) for w in pipe.weights.values())
            return {"sums": f"{total:.6f}"}

        return texts


def summing(**fields: Any) -> Any:
    plain = one_layer_task(max_steps=2)
    return Summing.Params(model=plain.model, input=plain.input, train=plain.train, **fields)


def test_each_evaluation_shows_the_texts_of_its_weights(tmp_path: Path) -> None:
    params = summing()
    params.eval.interval_steps = 1
    Summing.made = 0
    loop.run(params, tmp_path, evaluate=True)
    assert Summing.made == 1
    first, second = tensorboard_files.values(tmp_path / "eval", "sums")
    assert first != second
    evaluation.run(params, tmp_path)
    assert tensorboard_files.values(tmp_path / "eval", "sums") == [first, second, second]


def test_texts_that_cannot_be_made_are_reported() -> None:
    lines: list[str] = []
    assert evaluation.texts_of(summing(fault=True), NOTHING, NOTHING, lines.append)() == {}
    assert lines == ["evaluations show no texts: this network writes nothing"]


def test_a_task_without_texts_shows_none() -> None:
    assert evaluation.texts_of(one_layer_task(), NOTHING, NOTHING, pytest.fail)() == {}
