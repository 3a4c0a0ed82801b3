"""Values of a checkpoint by key, without a network."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import files


def test_trained_values_are_averages_where_the_run_keeps_them(tmp_path: Path) -> None:
    saved = {
        "variables/dense/kernel": tf.ones([2, 3]),
        "average/dense/kernel": tf.fill([2, 3], 0.5),
        "variables/norm.1/moving_mean": tf.zeros(3),
        "slots/dense/kernel/velocity": tf.ones([2, 3]),
        "step": tf.constant(4, tf.int64),
    }
    variables = {key: tf.Variable(value) for key, value in saved.items()}
    prefix = checkpoints.Checkpoints(str(tmp_path), variables).save(4)
    for place in (prefix, str(tmp_path)):
        found = checkpoints.trained_values(place)
        assert sorted(found) == ["dense/kernel", "norm.1/moving_mean"]
        np.testing.assert_array_equal(found["dense/kernel"], np.full([2, 3], 0.5))
    Path(f"{prefix}.index").write_bytes(b"nothing")
    with pytest.raises(errors.CheckpointError, match="is torn and cannot be restored: "):
        checkpoints.trained_values(prefix)
    with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
        checkpoints.trained_values(str(tmp_path / "ckpt-7"))


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"),
        tf.errors.PermissionDeniedError(None, None, "Permission denied"),
        tf.errors.UnknownError(None, None, "Input/output error"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EACCES, "Permission denied"),
    ],
    ids=repr,
)
def test_what_cannot_be_read_now_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    variables = {"variables/kernel": tf.Variable([1.0, 2.0])}
    saver = checkpoints.Checkpoints(str(tmp_path), variables, "class: x\n")
    for number in (3, 5):
        saver.save(number)
    names = sorted(path.name for path in tmp_path.iterdir())
    if isinstance(error, OSError):
        opened = mock.Mock(side_effect=error)
        monkeypatch.setattr(files, "open", opened, raising=False)
    else:
        restored = mock.Mock(side_effect=error)
        monkeypatch.setattr(tf.raw_ops, "RestoreV2", restored)
    prefix = f"{tmp_path}/ckpt-5"
    part = checkpoints.Part("variables/kernel", (2,))
    for action in (
        saver.restore,
        lambda: checkpoints.restore(prefix, variables, {}),
        lambda: checkpoints.read_value(prefix, "variables/kernel"),
        lambda: checkpoints.restore_matching(variables, prefix, {"variables/kernel": [part]}),
    ):
        with pytest.raises(checkpoints.UnreadableError) as caught:
            action()
        assert f" cannot be read now: {checkpoints.reason(error)}. Nothing" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    monkeypatch.undo()
    if isinstance(error, OSError):
        monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=error))
        with pytest.raises(
            checkpoints.UnreadableError, match=f"cannot be read now: {error.strerror}"
        ):
            files.newest_text(str(tmp_path))
        monkeypatch.undo()
    assert saver.restore() == checkpoints.Restored(prefix, 5)
