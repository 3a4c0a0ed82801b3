"""Temporary folders that end with their owner."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import temporary

ROOT = str(Path(__file__).parents[3])


def test_a_folder_is_removed_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = temporary.Folder(), temporary.Folder()
    (one.path / "folder").mkdir()
    (one.path / "folder" / "file").write_text("")
    assert sorted(tmp_path.iterdir()) == sorted([one.path, other.path])
    one.remove()
    one.remove()
    assert list(tmp_path.iterdir()) == [other.path]
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_removed_also_if_the_process_that_should_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = temporary.Folder()
    folder._remover.kill()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_removed_when_its_owner_is_killed(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from lingvo_gpipe.cluster import temporary\n"
        "print(temporary.Folder().path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)},
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "file").write_text("")
        assert list(tmp_path.iterdir()) == [folder]
        owner.kill()
    end_s = time.monotonic() + 60.0
    while folder.exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
