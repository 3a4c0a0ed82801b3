"""Temporary folders that end with their owner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import temporary

ROOT = str(Path(__file__).parents[3])


def test_a_folder_is_removed_with_its_files_or_by_the_next_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
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
        kept = Path(owner.stdout.readline().strip())
        (kept / "file").write_text("")
        mine = temporary.Folder()
        (mine.path / "folder").mkdir()
        assert sorted(tmp_path.iterdir()) == sorted([kept, mine.path])
        mine.remove()
        mine.remove()
        assert list(tmp_path.iterdir()) == [kept]
        owner.kill()
    temporary.Folder().remove()
    assert list(tmp_path.iterdir()) == []
