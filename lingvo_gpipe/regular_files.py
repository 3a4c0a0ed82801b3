"""Files from outside, read whole up to a size; whatever is wrong is an `OSError` that says so."""

from __future__ import annotations

import errno
import os
from typing import BinaryIO, TypeAlias

Path: TypeAlias = str | os.PathLike[str]

MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a file, where its reader has no smaller one."""


def open_binary(path: Path) -> BinaryIO:
    """Open a file of any size, to be read piece by piece.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    try:
        return open(path, "rb")
    except ValueError as error:  # a null character in its name
        raise OSError(errno.EINVAL, str(error), path) from error


def read(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or has more than `max_bytes`.
    """
    with open_binary(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", path)
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file in UTF-8, its line ends as they are.

    Raises:
        OSError: it cannot be read, has more than `max_bytes`, or is not UTF-8.
    """
    content = read(path, max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        reason = f"it is not a text in UTF-8 (byte {error.start})"
        raise OSError(errno.EILSEQ, reason, path) from error
