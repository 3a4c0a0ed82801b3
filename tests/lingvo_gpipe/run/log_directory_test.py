"""The folder of a run where its file system or its files fail."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.run import checkpoints, log_directory
from tests.tiny_task import tiny_task


def test_a_file_system_without_locks_is_reported_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with log_directory.locked(tmp_path):
        assert f"{tmp_path} is not locked: its file system reports Operation not" in caplog.text


@pytest.mark.parametrize(
    ("name", "action", "text"),
    [
        (
            "ids",
            lambda p: log_directory.check_assets(p, {"ids": b""}),
            "read: Is a directory. Make",
        ),
        (
            "ids",
            lambda p: log_directory.kept_assets(p, ["ids"]),
            "read: Is a directory. Make it re",
        ),
        (
            "result.json",
            lambda p: log_directory.write_result(p, {}),
            "written: Is a directory. The",
        ),
    ],
)
def test_a_folder_in_place_of_a_file_is_named(
    tmp_path: Path, name: str, action: Callable[[Path], object], text: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(errors.TrainingError) as caught:
        action(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} cannot be {text}")


def test_a_long_value_is_cut_in_a_refusal(tmp_path: Path) -> None:
    params = tiny_task()
    text = f"class: task.Task\nname: 'b'\nmodel.seed: '{'x' * 5000}'\n"
    for number, own in enumerate((text, text.replace("'b'", f"'{'a' * 5000}'"))):
        variables = {"step": tf.Variable(number)}
        checkpoints.Checkpoints(str(tmp_path / "checkpoints"), variables, own).save(number)
        with pytest.raises(errors.TrainingError) as caught:
            log_directory.check_params(tmp_path, params.set(name="b"), report=None)
        assert max(map(len, str(caught.value).splitlines())) < 1_000
