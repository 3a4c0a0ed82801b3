"""What evaluation, export and decoding take from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import checkpoint, errors, optimizer, restoring, task, update
from lingvo_gpipe.layers import base


def spec(**fields: Any) -> base.VariableSpec:
    return base.VariableSpec("w", (2,), tf.float32, base.initializer("Zeros"), **fields)


SPECS = {"weight": spec(), "frozen": spec(trainable=False), "mean": spec(is_state=True)}


def train(**fields: Any) -> task.Train:
    rule = optimizer.Optimizer.Params(name="SGD", learning_rate=0.1)
    return task.Train(optimizer=rule, max_steps=1, **fields)


def test_averages_stand_for_what_has_them() -> None:
    assert restoring.saved_keys(SPECS, train()) == {p: f"variables/{p}" for p in SPECS}
    averaged = restoring.saved_keys(SPECS, train(average=update.Average.Params(decay=0.9)))
    assert averaged == {
        "weight": "average/weight",
        "frozen": "variables/frozen",
        "mean": "average/mean",
    }


def test_some_variables_are_restored_from_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    saved = {f"variables/{path}": tf.Variable([float(n), 1.0]) for n, path in enumerate(SPECS)}
    prefix = checkpoint.Checkpoints(str(tmp_path / "checkpoints"), saved).save(4)
    places: tuple[dict[str, Any], ...] = (
        {"logdir": tmp_path, "which": None},
        {"logdir": tmp_path, "which": prefix},
        {"logdir": None, "which": str(tmp_path / "checkpoints")},
    )
    for place in places:
        found = {"mean": tf.Variable([7.0, 7.0])}
        assert restoring.restore(found, SPECS, train(), **place).step == 4
        assert found["mean"].numpy().tolist() == [2.0, 1.0]


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError) as caught:
        restoring.restore({}, SPECS, train(), logdir=tmp_path, which=None)
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoints'} has no checkpoint. Train first, or name one by --checkpoint"
    )
