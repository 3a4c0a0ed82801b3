"""Files of checkpoints: which are found, kept and named in messages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.run.checkpoints import files


def write(directory: Path, step: int, content: str = "values") -> str:
    """Write the files of a whole checkpoint; return its prefix."""
    directory.mkdir(exist_ok=True)
    prefix = f"{directory}/ckpt-{step}"
    files.begin(prefix, "params")
    Path(f"{prefix}.index").write_text(content)
    Path(f"{prefix}.data-00000-of-00001").write_text(content)
    files.finish(prefix)
    return prefix


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    write(tmp_path / "best", 3)
    with pytest.raises(errors.CheckpointError, match=r"has no whole checkpoint\. Name one"):
        files.at(str(tmp_path))


def test_one_that_is_still_written_is_not_whole(tmp_path: Path) -> None:
    prefix = write(tmp_path, 3)
    write(tmp_path, 2)
    files.discard([prefix])
    assert files.find(str(tmp_path)) == [f"{tmp_path}/ckpt-2"]
    with pytest.raises(errors.CheckpointError, match=r"no checkpoint .*ckpt-3; there are .*ckpt-2"):
        files.at(prefix)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not agree with its checksum"),
        (b"class: \xff\n", "codec can't decode byte 0xff in position 7"),
        (b"# crc32: 00000000\nclass: task.Task\n", "does not agree with its checksum"),
    ],
)
def test_a_damaged_text_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    prefix = write(tmp_path, 3)
    Path(f"{prefix}.params.txt").write_bytes(content)
    for action in (files.params_text, lambda _: files.newest_text(str(tmp_path))):
        with pytest.raises(files.DamagedError) as caught:
            action(prefix)
        assert caught.value.reason.startswith(f"{prefix}.params.txt")
        assert reason in caught.value.reason
        assert len(str(caught.value).splitlines()) == 1
    older = write(tmp_path, 2)
    assert files.newest_text(str(tmp_path)) == (older, "params")


def test_a_byte_that_changes_is_found_in_any_place(tmp_path: Path) -> None:
    prefix = write(tmp_path, 3)
    path = Path(f"{prefix}.params.txt")
    content = path.read_bytes()
    assert files.params_text(prefix) == "params"
    for place in range(len(content)):
        for damaged in (content[:place], content[:place] + b"~" + content[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(files.DamagedError):
                files.params_text(prefix)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_what_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    prefix = write(tmp_path, 3)

    def refuse(path: str, *_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number), path)

    def check(path: str) -> None:
        for action in (
            lambda: files.newest_text(str(tmp_path)),
            lambda: files.params_text(prefix) and files.at(str(tmp_path)),
        ):
            with pytest.raises(files.UnreadableError) as caught:
                action()
            text = f"{path} cannot be read now: {os.strerror(number)}. Nothing is set aside: "
            assert str(caught.value).startswith(text)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refuse)
        check(f"{prefix}.params.txt")
    monkeypatch.setattr(os, "listdir", refuse)
    check(str(tmp_path))
