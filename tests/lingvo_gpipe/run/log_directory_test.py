"""The folder of a run where its file system or its files fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.run import log_directory
from tests.tiny_task import tiny_task


def test_a_file_system_without_locks_is_reported_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with log_directory.locked(tmp_path):
        assert f"{tmp_path} is not locked: its file system reports Operation not" in caplog.text


def test_a_trial_in_the_folder_of_a_run_leaves_its_lock(tmp_path: Path) -> None:
    with log_directory.locked(tmp_path):
        pass
    log_directory.try_out(tmp_path, tiny_task(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


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
        ("result.json", log_directory.remove_result, "removed: Is a directory. Remove it, or"),
    ],
)
def test_a_folder_in_place_of_a_file_is_named(
    tmp_path: Path, name: str, action: Callable[[Path], object], text: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(errors.TrainingError) as caught:
        action(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} cannot be {text}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON: it is empty"),
        (b"\xff{", "it is not JSON: Expecting value"),
        (b"[]", "it is not a result"),
        (None, "Is a directory"),
    ],
)
def test_a_damaged_record_of_the_end_is_named(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    assert not log_directory.is_over(tmp_path)
    log_directory.write_result(tmp_path, {"step": 3})
    assert log_directory.is_over(tmp_path)
    path = tmp_path / "result.json"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(errors.TrainingError) as caught:
        log_directory.is_over(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged: {reason}")
    assert str(caught.value).endswith(". Remove it; the run's own command writes it again")


def test_files_of_a_run_are_read_only_if_they_are_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ids")
    for action in (
        lambda: log_directory.check_assets(tmp_path, {"ids": b""}),
        lambda: log_directory.kept_assets(tmp_path, ["ids"]),
    ):
        with pytest.raises(errors.TrainingError, match="read: it is a pipe, not a regular file"):
            action()


def test_a_file_that_could_not_be_read_again_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_directory, "_MAX_ASSET_BYTES", 1_000)
    log_directory.keep_assets(tmp_path, {"ids": bytes(1_000)})
    actions: tuple[Callable[[], object], ...] = (
        lambda: log_directory.keep_assets(tmp_path, {"names": bytes(1_001)}),
        lambda: log_directory.try_out(tmp_path, tiny_task(), {"names": bytes(1_001)}),
    )
    for action in actions:
        with pytest.raises(errors.TrainingError) as caught:
            action()
        assert str(caught.value) == (
            f"{tmp_path}/names would have 1,001 bytes, and is read again only up to 1,000. Use "
            "data with a smaller names"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_a_long_value_is_cut_in_a_refusal(tmp_path: Path) -> None:
    params = tiny_task()
    text = f"class: task.Task\nname: 'b'\nmodel.seed: '{'x' * 5000}'\n"
    (tmp_path / "checkpoints").mkdir()
    for name in ("index", "data-00000-of-00001", "params.txt"):
        (tmp_path / "checkpoints" / f"ckpt-3.{name}").write_text(text)
    for own in (text, text.replace("'b'", f"'{'a' * 5000}'")):
        (tmp_path / "checkpoints" / "ckpt-3.params.txt").write_text(own)
        with pytest.raises(errors.TrainingError) as caught:
            log_directory.check_params(tmp_path, params.set(name="b"), report=None)
        assert max(map(len, str(caught.value).splitlines())) < 1_000
