"""Files are read up to a limit; errors state what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lingvo_gpipe import regular_files


def reason(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 (its text is compared)
        action()
    return str(caught.value.strerror)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é\r\n".encode())
    assert regular_files.read(path, 4) == b"\xc3\xa9\r\n"
    assert regular_files.read_text(path, 4) == "é\r\n"
    assert reason(lambda: regular_files.read(path, 3)) == "it has more than 3 bytes"
    assert reason(lambda: regular_files.read(tmp_path)) == "Is a directory"
    os.mkfifo(tmp_path / "pipe")
    assert reason(lambda: regular_files.read(tmp_path / "pipe")) == "it is not a regular file"


def test_a_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc\xff")
    assert reason(lambda: regular_files.read_text(path)) == "it is not a text in UTF-8 (byte 3)"
