"""Text files from outside; whatever is wrong with one is an `OSError` that says so."""

from __future__ import annotations

import errno
import os


def read(path: str) -> str:
    """Return the text of a file in UTF-8; `~` at its beginning is the home folder.

    Raises:
        OSError: it cannot be read, or is not UTF-8.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read()
    except ValueError as error:  # not UTF-8, or a null character in the path
        raise OSError(errno.EINVAL, str(error), path) from error
