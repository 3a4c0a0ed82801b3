"""The folder of a run where its file system or its files fail."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.run import log_directory


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
