"""The folder of a run is restored: its checkpoint, its params text, its result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from lingvo_gpipe import hyperparams, trainer
from lingvo_gpipe.run import checkpoints

RUN = Path(__file__).with_name("golden") / "run"


def test_the_params_text_is_that_of_its_params() -> None:
    text = (RUN / "checkpoints" / "ckpt-2.params.txt").read_text().partition("\n")[2]
    assert hyperparams.from_text(text).to_text() == text


def test_the_run_is_evaluated_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir = f"--logdir={shutil.copytree(RUN, tmp_path / 'run')}"
    loss = json.loads((RUN / "result.json").read_text())["metrics"]["loss"]
    assert trainer.run([logdir, "--mode=eval"]) == 0
    start, _, shown = capsys.readouterr().out.partition(" loss=")
    assert start.startswith("eval step=2 accuracy=")
    assert float(shown) == pytest.approx(loss, abs=1e-3)
    assert trainer.run([logdir, "--max_steps=3"]) == 0
    assert "restored step=2\n" in capsys.readouterr().out


def test_values_are_those_that_tensorflow_reads() -> None:
    reader = tf.train.load_checkpoint(str(RUN / "checkpoints" / "ckpt-2"))
    values = checkpoints.trained_values(str(RUN / "checkpoints"))
    assert len(values) == 6
    for path, value in values.items():
        assert (reader.get_tensor(f"average/{path}") == value).all()
