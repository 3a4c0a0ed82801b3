"""Files from outside: only regular files are read, and only up to a size.

Opening a pipe waits for its writer, and a device such as /dev/zero has no end. So the kind of a
file is checked before it is opened, and no more is read than a limit. Whatever is wrong is raised
as an `OSError` whose `strerror` states it, as for a file that is missing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import BinaryIO, TypeAlias

Path: TypeAlias = str | os.PathLike[str]

MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a file that is read whole, where its reader has no smaller one."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_WITHOUT_WAITING = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)


def size_of(path: Path) -> int:
    """Return the bytes of a regular file.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    try:
        status = os.stat(path)
    except ValueError:  # a null character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", path) from None
    return _size(status, path)


def open_binary(path: Path) -> BinaryIO:
    """Open a regular file of any size, to be read piece by piece.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    size_of(path)  # opening a device may already do something
    file = os.fdopen(os.open(path, _WITHOUT_WAITING), "rb")
    try:
        _size(os.fstat(file.fileno()), path)  # another may have taken its place
    except OSError:
        file.close()
        raise
    return file


def read(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `max_bytes`.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of /proc have no size, and any file may grow while it is read.
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", path)
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file in UTF-8, its line ends as they are.

    Raises:
        OSError: it cannot be read, is not a regular file, has more than `max_bytes`, or is not
            UTF-8.
    """
    content = read(path, max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        reason = f"it is not a text in UTF-8 (byte {error.start})"
        raise OSError(errno.EILSEQ, reason, path) from error


def read_json(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> object:
    """Return the value of a regular file of JSON; bytes that are not UTF-8 become surrogates.

    Raises:
        OSError: it cannot be read, is not a regular file, has more than `max_bytes`, or is not
            JSON.
    """
    text = read(path, max_bytes).decode(errors="surrogateescape")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if text.strip() else "it is empty"
        raise OSError(errno.EILSEQ, f"it is not JSON: {reason}", path) from error
    return value


def _size(status: os.stat_result, path: Path) -> int:
    """Return the size in a status; refuse any but that of a regular file."""
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", path)
