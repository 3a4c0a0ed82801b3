"""A temporary folder for a process that may be killed, removed also if its owner is killed, too.

TensorFlow writes some files to the temporary folder and removes them at exit, which a process that
is killed never reaches. So another process waits for the end of the folder's owner, and removes it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_NAME = "lingvo_gpipe-chief-"
# Its input ends with the owner; a process that ends with it may still write for a moment.
_REMOVE = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(20):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
_REMOVED_WITHIN_S = 10.0


class Folder:
    """A temporary folder, until `remove` is called or this process ends in any way.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: there is no temporary folder that can be written.
        """
        self.path = Path(tempfile.mkdtemp(prefix=_NAME))
        self._remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove it with all that is in it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._remover.communicate(timeout=_REMOVED_WITHIN_S)
        shutil.rmtree(self.path, ignore_errors=True)  # the other process may have been killed
