"""A text file is read, or what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_gpipe import text_file


def test_a_text_file_is_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "text"
    path.write_bytes("é".encode())
    assert text_file.read("~/text") == text_file.read(str(path)) == "é"
    path.write_bytes(b"abc\xff")
    for wrong, reason in ((path, "can't decode byte 0xff"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=reason):
            text_file.read(str(wrong))
