"""Values of a checkpoint by path, without a network."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, regular_files
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import values


def test_trained_values_are_averages_where_the_run_keeps_them(tmp_path: Path) -> None:
    saved: dict[str, np.ndarray[Any, Any]] = {
        "variables/dense/kernel": np.ones([2, 3], np.float32),
        "average/dense/kernel": np.full([2, 3], 0.5, np.float32),
        "variables/norm/moving_mean": np.zeros(3, np.float32),
        "slots/dense/kernel/velocity": np.ones([2, 3], np.float32),
        "step": np.array(4, np.int64),
    }
    prefix = checkpoints.write_values(str(tmp_path), 4, saved, "class: x\n")
    for place in (prefix, str(tmp_path)):
        found = checkpoints.trained_values(place)
        assert sorted(found) == ["dense/kernel", "norm/moving_mean"]
        np.testing.assert_array_equal(found["dense/kernel"], np.full([2, 3], 0.5))


def test_trained_values_of_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    saved = {"variables/dense/kernel": np.ones([2, 3], np.float32)}
    prefix = checkpoints.write_values(str(tmp_path), 4, saved, "class: x\n")
    Path(f"{prefix}.index").write_bytes(b"nothing")
    with pytest.raises(errors.CheckpointError, match="is torn and cannot be read"):
        checkpoints.trained_values(prefix)
    with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
        checkpoints.trained_values(str(tmp_path / "ckpt-7"))


UNANSWERED: tuple[Exception, ...] = (
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"),
    tf.errors.PermissionDeniedError(None, None, "Permission denied"),
    tf.errors.UnknownError(None, None, "Input/output error"),
    tf.errors.OpError(None, None, "ckpt-5.index; Input/output error", tf.errors.UNKNOWN),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EACCES, "Permission denied"),
)


@pytest.mark.parametrize("error", UNANSWERED, ids=repr)
@pytest.mark.parametrize("step", ["assign", "check_whole"])
def test_what_cannot_be_read_now_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    saved = {"variables/kernel": tf.Variable([1.0, 2.0])}
    saver = checkpoints.Checkpoints(str(tmp_path), saved, "class: x\n")
    for number in (3, 5):
        saver.save(number)
    names = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(values.SavedValues, step, mock.Mock(side_effect=error))
    for action in (
        saver.restore,
        lambda: saver.restore(5, subset=True),
        lambda: checkpoints.restore_matching(saved, str(tmp_path / "ckpt-5")),
    ):
        with pytest.raises(errors.CheckpointError) as caught:
            action()
        text = f"{tmp_path}/ckpt-5 cannot be read now: {checkpoints.reason(error)}. Nothing is set"
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    monkeypatch.undo()
    assert saver.restore() == checkpoints.Restored(str(tmp_path / "ckpt-5"), 5)


def test_one_value_that_cannot_be_read_now_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"step": np.array(5, np.int64)}
    prefix = checkpoints.write_values(str(tmp_path), 5, saved, "class: x\n")

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(regular_files, "open_binary", refuse)
    for action in (
        lambda: checkpoints.read_value(prefix, "step"),
        lambda: checkpoints.trained_values(prefix),
    ):
        with pytest.raises(errors.CheckpointError, match="ckpt-5 cannot be read now: Permission"):
            action()
