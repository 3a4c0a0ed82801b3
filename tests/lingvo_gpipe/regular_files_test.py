"""Only regular files are read, up to a limit; errors state what else a path names."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lingvo_gpipe import regular_files

READERS: list[Callable[[Path], object]] = [
    regular_files.size_of,
    regular_files.open_binary,
    regular_files.read,
    regular_files.read_text,
    regular_files.read_json,
]


def reason(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 (its text is compared)
        action()
    return str(caught.value.strerror)


@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.__name__)
def test_what_is_not_a_regular_file_is_not_opened(
    reader: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    for name, text in {
        "pipe": "it is a pipe, not a regular file",
        "link": "it is a device, not a regular file",
        "socket": "it is a socket, not a regular file",
        "lost": "No such file or directory",
        ".": "Is a directory",
        "a\0b": "no file can have this name",
        "\ud800": "no file can have this name",
    }.items():
        assert reason(lambda name=name: reader(Path(name))) == text  # type: ignore[misc]


def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    regular = SimpleNamespace(st_mode=stat.S_IFREG, st_size=3)
    monkeypatch.setattr(os, "stat", lambda _: regular)
    assert reason(lambda: regular_files.read(tmp_path / "pipe")) == (
        "it is a pipe, not a regular file"
    )


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é\r\n".encode())
    assert regular_files.size_of(path) == 4
    assert regular_files.read(path, 4) == b"\xc3\xa9\r\n"
    assert regular_files.read_text(path, 4) == "é\r\n"
    assert reason(lambda: regular_files.read(path, 3)) == "it has more than 3 bytes"
    with path.open("wb") as file:  # a hole of 8 GiB
        file.truncate(2**33)
    assert reason(lambda: regular_files.read(path)) == "it has more than 8,388,608 bytes"


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc of Linux: its files have no size"
)
def test_a_file_whose_size_is_not_known_has_the_same_limit() -> None:
    assert regular_files.size_of("/proc/self/status") == 0
    assert regular_files.read("/proc/self/status")
    assert reason(lambda: regular_files.read("/proc/self/status", 9)) == (
        "it has more than 9 bytes"
    )


def test_a_text_is_utf8_and_json_is_json(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc\xff")
    assert reason(lambda: regular_files.read_text(path)) == "it is not a text in UTF-8 (byte 3)"
    for content, text in (
        (b"", "it is not JSON: it is empty"),
        (b"{1", "it is not JSON: Expecting property name"),
        (b"[" * 100_000, "it is not JSON: maximum recursion depth"),
        (b"9" * 5_000, "it is not JSON: Exceeds the limit"),
    ):
        path.write_bytes(content)
        assert reason(lambda: regular_files.read_json(path)).startswith(text)
    path.write_bytes(b'["\xff"]')
    assert regular_files.read_json(path) == ["\udcff"]
