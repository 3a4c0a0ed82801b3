"""What evaluation, export and decoding take from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import network, optim, task
from lingvo_gpipe.layers import base
from lingvo_gpipe.run import checkpoints, log_directory, restoring
from tests import tiny_task


def spec(**fields: Any) -> base.VariableSpec:
    return base.VariableSpec("w", (2,), tf.float32, base.initializer("Zeros"), **fields)


SPECS = {"weight": spec(), "frozen": spec(trainable=False), "mean": spec(is_state=True)}


def trained() -> network.Analysis:
    """Return the analysis of a network, as if it had these variables."""
    params = tiny_task.tiny_task()
    fields = params.input.instantiate().element_spec(training=True)
    analyzed = network.analyze(network.uncut(params.model), fields)
    analyzed.variables.clear()
    analyzed.variables.update(SPECS)
    return analyzed


def train(**fields: Any) -> task.Train:
    rule = optim.Optimizer.Params(name="SGD", learning_rate=0.1)
    return task.Train(optimizer=rule, max_steps=1, **fields)


def test_averages_stand_for_what_has_them() -> None:
    assert restoring.saved_keys(SPECS, train()) == {p: f"variables/{p}" for p in SPECS}
    averaged = restoring.saved_keys(SPECS, train(average=optim.Average.Params(decay=0.9)))
    assert averaged == {
        "weight": "average/weight",
        "frozen": "variables/frozen",
        "mean": "average/mean",
    }


def test_some_variables_are_restored_from_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    saved = {f"variables/{path}": tf.Variable([float(n), 1.0]) for n, path in enumerate(SPECS)}
    prefix = checkpoints.Checkpoints(str(tmp_path / "checkpoints"), saved).save(4)
    places: tuple[dict[str, Any], ...] = (
        {"logdir": tmp_path, "which": None},
        {"logdir": tmp_path, "which": prefix},
        {"logdir": None, "which": str(tmp_path / "checkpoints")},
    )
    for place in places:
        found = {"mean": tf.Variable([7.0, 7.0])}
        assert restoring.restore(found, trained(), tiny_task.tiny_task(), **place).step == 4
        assert found["mean"].numpy().tolist() == [2.0, 1.0]


def test_an_older_checkpoint_is_used_where_the_newest_is_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpoints.Checkpoints(
        str(tmp_path / "checkpoints"),
        {f"variables/{path}": tf.Variable([1.0, 1.0]) for path in SPECS},
    )
    older, newest = saver.save(3), saver.save(4)
    Path(f"{newest}.index").write_bytes(b"garbage" * 99)
    found = {"mean": tf.Variable([7.0, 7.0])}
    params = tiny_task.tiny_task()
    assert restoring.restore(found, trained(), params, logdir=tmp_path, which=None).step == 3
    assert f"{newest} is torn, an older one is used: " in caplog.text
    assert restoring.restore(found, trained(), params, logdir=None, which=older).step == 3


def test_what_a_run_keeps_is_looked_for_in_the_run_of_the_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    own, other = str(run / "checkpoints"), tmp_path / "other"
    assert log_directory.folders(None, own) == [run]
    assert log_directory.folders(other, own) == [run, other]
    assert run in log_directory.folders(None, f"{own}/ckpt-3")
    assert tmp_path not in log_directory.folders(None, f"{own}/ckpt-3")
    assert log_directory.folders(other, None) == [other]
