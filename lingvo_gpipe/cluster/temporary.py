"""A temporary folder for a process that may be killed, removed also if its owner is killed, too.

TensorFlow writes some files to the temporary folder and removes them at exit, which a process that
is killed never reaches. The owner of a folder holds a lock on it; making the next one removes
those that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_NAME = "lingvo_gpipe-chief-"
_NEW = "lingvo_gpipe-new-"


class Folder:
    """A temporary folder, until `remove` is called or this process ends.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        """Make it, and remove those of owners that have ended.

        Raises:
            OSError: there is no temporary folder that can be written.
        """
        _sweep()
        made = Path(tempfile.mkdtemp(prefix=_NEW))
        self._lock = _locked(made)
        # From here on others look at it, and find it locked.
        self.path = made.rename(made.with_name(made.name.replace(_NEW, _NAME)))

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.geteuid() and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Lock a folder; return its file descriptor, or None if another process has the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
