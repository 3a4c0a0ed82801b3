"""Files of checkpoints: their names, which checkpoints are whole, completing and removing them.

A checkpoint `ckpt-120` consists of TensorFlow's index, its data files and the text of the run's
params. The text is written first, as `ckpt-120.writing`. When everything else is on the disk, it is
renamed to `ckpt-120.params.txt`, which completes the checkpoint. One that still has a `.writing`
file when a run starts was interrupted, by a kill or a full disk, and is removed. One that was
damaged later is reported when it is restored, and set aside as `ckpt-120.torn.txt`. The text is a
part of it: its first line is a checksum of the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator

from lingvo_gpipe import errors

NAME = "ckpt"
_PARAMS = ".params.txt"
_WRITING = ".writing"
_TORN = ".torn.txt"
_OURS = re.compile(rf"({NAME}-\d+)({re.escape(_PARAMS)}|{re.escape(_WRITING)}|{re.escape(_TORN)})")
_DATA = re.compile(r"\.data-\d{5}-of-(\d{5})")


class DamagedError(errors.CheckpointError):
    """A checkpoint's files are damaged or missing.

    Attributes:
        reason: what is wrong with them.
    """

    def __init__(self, prefix: str, reason: str) -> None:
        super().__init__(f"{prefix} is torn and cannot be restored: {reason}. Use another one")
        self.reason = reason


class UnreadableError(errors.CheckpointError):
    """A checkpoint cannot be read now, and may be whole: permissions, a disk that fails."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path} cannot be read now: {reason}. Nothing is set aside: start the same command "
            "again once it can be read, or move it away to use an older checkpoint"
        )


@contextlib.contextmanager
def reading(path: str, prefix: str) -> Iterator[None]:
    """Tell files that are missing or damaged from those that cannot be read now."""
    try:
        yield
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DamagedError(prefix, f"{path}: {getattr(error, 'strerror', error)}") from error
    except OSError as error:
        raise UnreadableError(path, str(error.strerror)) from error


def refuse_patterns(path: str) -> None:
    """Refuse a path of checkpoints that TensorFlow would read as a pattern.

    Raises:
        CheckpointError: the path has a character of a pattern.
    """
    if match := re.search(r"[*?\[\\]", path):
        raise errors.CheckpointError(
            f"{path}: TensorFlow takes {match[0]} in a path of checkpoints for a pattern, and "
            "cannot restore them. Use a path without * ? [ and \\"
        )


def find(directory: str) -> list[str]:
    """Return the prefixes of all whole checkpoints of a directory, oldest first."""
    return [prefix for prefix in find_completed(directory) if _has_all_files(prefix)]


def find_completed(directory: str) -> list[str]:
    """Return the prefixes of the checkpoints that were completed, oldest first."""
    matches = [_OURS.fullmatch(name) for name in _names(directory)]
    bases = [m[1] for m in matches if m and m[2] == _PARAMS]
    return sorted((os.path.join(directory, base) for base in bases), key=step_of)


def newest(directory: str) -> str | None:
    """Return the prefix of the newest whole checkpoint of a directory, or None."""
    return next(reversed(find(directory)), None)


def at(path: str) -> str:
    """Return the prefix of the checkpoint that `path` names, or the newest in that directory.

    Raises:
        CheckpointError: there is no such checkpoint, or writing it was interrupted.
    """
    refuse_patterns(path)
    if os.path.isdir(path):
        if prefix := newest(path):
            return prefix
        raise errors.CheckpointError(
            f"{path} has no whole checkpoint. Name one, or the folder `checkpoints` or `best` of "
            "a run"
        )
    prefix = path.removesuffix(".index").removesuffix(_PARAMS)
    if not os.path.exists(prefix + ".index") or os.path.exists(prefix + _WRITING):
        whole = find(os.path.dirname(prefix) or ".")
        offer = f"there are {', '.join(whole)}" if whole else "its directory has no whole one"
        raise errors.CheckpointError(f"there is no checkpoint {prefix}; {offer}")
    return prefix


def step_of(prefix: str) -> int:
    """Return the number in a checkpoint's name; 0 if it has none."""
    digits = re.search(r"-(\d+)$", prefix)
    return int(digits[1]) if digits else 0


def params_text(prefix: str) -> str:
    """Return the params text of a checkpoint.

    Raises:
        DamagedError: the text is missing or damaged.
        UnreadableError: it cannot be read now.
    """
    path = prefix + _PARAMS
    with reading(path, prefix), open(path, encoding="utf-8", newline="") as file:
        first, _, text = file.read().partition("\n")
    if first != _checksum_line(text):
        raise DamagedError(prefix, f"{path} does not agree with its checksum")
    return text


def newest_text(directory: str) -> tuple[str, str] | None:
    """Return the prefix and the params text of the newest whole checkpoint with a whole text.

    Raises:
        DamagedError: every text of the directory is damaged; names the newest.
        UnreadableError: one cannot be read now.
    """
    first: DamagedError | None = None
    for prefix in reversed(find(directory)):
        try:
            return prefix, params_text(prefix)
        except DamagedError as error:
            first = first or error
    if first is not None:
        raise first
    return None


def _checksum_line(text: str) -> str:
    return f"# crc32: {zlib.crc32(text.encode()):08x}"


def check_readable(prefix: str) -> None:
    """Open the index and the data files of a checkpoint.

    TensorFlow takes an index that it may not open for a damaged one.

    Raises:
        DamagedError: one is missing.
        UnreadableError: one cannot be opened.
    """
    for path in (f"{prefix}.index", *_data_files(prefix)):
        with reading(path, prefix), open(path, "rb") as file:
            file.read(1)


def _names(directory: str) -> list[str]:
    """Return the names in a directory; none if there is no such directory."""
    try:
        return os.listdir(directory or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(directory or ".", str(error.strerror)) from error


def _data_files(prefix: str) -> list[str]:
    directory, base = os.path.split(prefix)
    names = [n for n in _names(directory) if n.startswith(base) and _DATA.fullmatch(n[len(base) :])]
    return [os.path.join(directory, name) for name in names]


def _has_all_files(prefix: str) -> bool:
    data = _data_files(prefix)
    return os.path.exists(f"{prefix}.index") and bool(data) and len(data) == int(data[0][-5:])


def begin(prefix: str, text: str) -> None:
    """Write the params text of a checkpoint, which is not whole until `finish`."""
    with open(prefix + _WRITING, "w", encoding="utf-8", newline="") as file:
        file.write(f"{_checksum_line(text)}\n{text}")
        file.flush()
        os.fsync(file.fileno())


def finish(prefix: str) -> None:
    """Sync a written checkpoint to the disk, then make it visible."""
    directory = os.path.dirname(prefix)
    for path in (f"{prefix}.index", *_data_files(prefix), directory):
        _sync(path)
    os.replace(prefix + _WRITING, prefix + _PARAMS)
    _sync(directory)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(prefixes: Iterable[str]) -> None:
    """Mark checkpoints, whole, torn or missing, as interrupted, so that `sweep` removes them."""
    for prefix in prefixes:
        for mark in (_PARAMS, _TORN):
            if os.path.exists(prefix + mark):
                os.replace(prefix + mark, prefix + _WRITING)


def set_aside(prefixes: Iterable[str]) -> None:
    """Rename the texts of torn checkpoints, so that they are kept but not restored."""
    for prefix in prefixes:
        os.replace(prefix + _PARAMS, prefix + _TORN)


def sweep(directory: str) -> None:
    """Remove the files of checkpoints that are marked as interrupted."""
    names = os.listdir(directory)
    for mark in names:
        if not ((match := _OURS.fullmatch(mark)) and match[2] == _WRITING):
            continue
        starts = (f"{match[1]}.", f"{match[1]}_temp")
        # The mark goes last, so that the next sweep continues an interrupted one.
        for name in sorted(names, key=lambda name: name == mark):
            path = os.path.join(directory, name)
            if name.startswith(starts):
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def free_space(directory: str) -> str:
    """Return the free space on the disk of a directory, for a message; it may be gone."""
    try:
        return f"{shutil.disk_usage(directory or '.').free / 2**20:.0f} MiB"
    except OSError:
        return "an unknown size"
