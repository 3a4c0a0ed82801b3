"""Files of checkpoints: which are found, kept and named in messages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lingvo_gpipe import errors, regular_files
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


def test_a_folder_above_the_checkpoints_names_those_below(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match=r"has no whole checkpoint$"):
        files.at(str(tmp_path))
    write(tmp_path / "best", 3)
    with pytest.raises(errors.CheckpointError, match="has no whole checkpoint; best below it has"):
        files.at(str(tmp_path))
    write(tmp_path / "checkpoints", 3)
    with pytest.raises(errors.CheckpointError, match=r"; best and checkpoints below it have$"):
        files.at(str(tmp_path))


def test_one_that_is_still_written_is_torn(tmp_path: Path) -> None:
    prefix = write(tmp_path, 3)
    assert files.discard(prefix)
    with pytest.raises(errors.CheckpointError, match=r"ckpt-3 is torn .* while being written; its"):
        files.at(prefix)


def test_a_state_file_without_a_checkpoint_is_removed(tmp_path: Path) -> None:
    files.discard(write(tmp_path, 3))
    state = tmp_path / "checkpoint"
    state.write_text('model_checkpoint_path: "ckpt-3"\nall_model_checkpoint_paths: "ckpt-3"\n')
    files.repair_state(str(tmp_path))
    assert not state.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\0" * 99, "it is not the text of Params"),
        (b"class: task.Task\nmodel.cla", "it is not the text of Params"),
        (b"class: \xff\n", "it is not a text in UTF-8 (byte 7)"),
        (b"# crc32: 00000000\nclass: task.Task\n", "it does not agree with its checksum"),
        (b"# crc32: 0000", "it is not the text of Params"),
        (b"class: task.Task\n" + b"#" * 4_000_100, "it has more than 4,000,100 bytes"),
    ],
)
def test_a_damaged_text_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    prefix = write(tmp_path / "run", 3)
    Path(f"{prefix}.params.txt").write_bytes(content)
    text = f"{prefix}.params.txt is damaged: {reason}"
    assert files.text_fault(prefix) == text
    for action in (files.params_text, lambda _: files.newest_text(str(tmp_path / "run"))):
        with pytest.raises(errors.CheckpointError) as caught:
            action(prefix)
        assert str(caught.value) == text
    with pytest.raises(errors.CheckpointError, match="is damaged"):
        files.keep_only(prefix, str(tmp_path / "best"))
    older = write(tmp_path / "run", 2)
    assert files.newest_text(str(tmp_path / "run")) == (older, "params")


def test_a_byte_that_changes_is_found_in_any_place(tmp_path: Path) -> None:
    path = Path(f"{write(tmp_path, 3)}.params.txt")
    content = path.read_bytes()
    assert files.params_text(str(tmp_path / "ckpt-3")) == "params"
    for place in range(len(content)):
        for damaged in (content[:place], content[:place] + b"~" + content[place + 1 :]):
            path.write_bytes(damaged)
            assert files.text_fault(str(tmp_path / "ckpt-3")) is not None


def test_a_text_without_a_checksum_is_that_of_an_earlier_commit(tmp_path: Path) -> None:
    prefix = write(tmp_path, 3)
    text = "class: task.Task\nname: 'a'\n"
    Path(f"{prefix}.params.txt").write_text(text)
    assert files.params_text(prefix) == text


def test_what_is_kept_already_is_not_written_again(tmp_path: Path) -> None:
    prefix = write(tmp_path / "checkpoints", 3)
    files.keep_only(prefix, str(tmp_path / "best"))
    Path(f"{prefix}.data-00000-of-00001").unlink()  # needed, were it written again
    files.keep_only(prefix, str(tmp_path / "best"))
    assert files.newest(str(tmp_path / "best")) == f"{tmp_path}/best/ckpt-3"


def test_a_file_system_without_links_has_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files.keep_only(write(tmp_path / "checkpoints", 3), str(tmp_path / "best"))
    copy = tmp_path / "best" / "ckpt-3.index"
    assert (copy.read_text(), copy.stat().st_nlink) == ("values", 1)


def test_free_space_that_no_system_reports_is_unknown(tmp_path: Path) -> None:
    assert files.free_space(str(tmp_path)).endswith(" MiB")
    assert files.free_space(str(tmp_path / "gone")) == "unknown"


UNANSWERED = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOMEM)


@pytest.mark.parametrize("number", UNANSWERED)
def test_a_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.listdir
    private = tmp_path / "lost+found"
    private.mkdir()
    write(tmp_path / "best", 3)

    def listdir(path: str) -> list[str]:
        if path == str(private):
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    for action in (files.newest, files.newest_text, files.at, lambda p: files.at(f"{p}/ckpt-3")):
        with pytest.raises(errors.CheckpointError) as caught:
            action(str(private))
        assert str(caught.value) == (
            f"{private} cannot be read: {os.strerror(number)}. Make it readable"
        )
    with pytest.raises(errors.CheckpointError, match="has no whole checkpoint; best below it has"):
        files.at(str(tmp_path))


@pytest.mark.parametrize("number", UNANSWERED)
def test_a_text_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 2)
    prefix = write(tmp_path, 3)

    def refuse(path: str, _: int) -> str:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(regular_files, "read_text", refuse)
    for action in (files.params_text, files.text_fault, lambda _: files.newest_text(str(tmp_path))):
        with pytest.raises(errors.CheckpointError) as caught:
            action(prefix)
        text = f"{prefix}.params.txt cannot be read now: {os.strerror(number)}. Nothing is set"
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
