"""A whole training in slices, by the trainer: killed and resumed, it has the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lingvo_gpipe import trainer
from tests.support import saved

PACKAGE = "models_of_sliced_training_test"
MODEL = """
from lingvo_gpipe import optim, registry
from tests import sliced_task

class InSlices(registry.Model):
    def task(self):
        rule = optim.Optimizer.Params(name="Adam", learning_rate=0.02)
        task = sliced_task.task_of(
            sliced_task.THREE,
            tie=True, dtype="float32", optimizer=rule, max_steps=8, clip_norm=0.5,
            average=optim.Average.Params(decay=0.9),
        )
        task.model.layers[2].dropout = 0.2
        task.model.set(num_partitions=2, num_replicas=2, schedule="1f1b")
        return task
"""
KILLED = """
import itertools, os, signal, sys
from lingvo_gpipe import trainer
from lingvo_gpipe.run import learner

true, updates = learner.Learner.update, itertools.count()

def update(self, batches):
    if next(updates) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return true(self, batches)

learner.Learner.update = update
trainer.run(sys.argv[1:])
"""


@pytest.mark.reliability_full
def test_a_run_in_slices_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied tables, feed-forward parts, dropout and averages in slices, on four devices."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "lab.py").write_text(MODEL)
    (tmp_path / PACKAGE / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    flags = [f"--params_package={PACKAGE}", "--model=lab.InSlices", "--mode=train"]
    program = [sys.executable, "-c", KILLED, *flags, f"--logdir={tmp_path / 'killed'}"]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(program, check=False, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    for name in ("killed", "whole"):
        assert trainer.run([*flags, f"--logdir={tmp_path / name}"]) == 0
    whole, resumed = (
        saved.values(str(tmp_path / name / "checkpoints" / "ckpt-8"))
        for name in ("whole", "killed")
    )
    assert resumed.keys() == whole.keys()
    for key, value in whole.items():
        np.testing.assert_array_equal(resumed[key], value, err_msg=key)
