"""Whether a worker's host sees the files of a run: the chief's supervisor asks, the worker's looks.

Of the folder of a run, the chief's supervisor makes a file, and the worker's writes one beside it.
A checkpoint to start from is only read: its index, which has a checksum of each value, must be the
same on all hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from lingvo_gpipe import regular_files

_MARK = re.compile(r"shared-[0-9a-f]{16}(\.[0-9a-f]{8})?")
# As `run.checkpoints.files` names the files of a checkpoint.
_INDEX = ".index"
_PARAMS = ".params.txt"
_MAX_INDEX_BYTES = 2**28
_NUMBERED = re.compile(rf".*-(\d+){re.escape(_PARAMS)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A file that a worker's host should see.

    Attributes:
        folder: its folder.
        name: its name there.
        digest: that of its content; None: any, and a file can be written beside it.
    """

    folder: str
    name: str
    digest: str | None = None

    def to_line(self) -> dict[str, object]:
        """Return the fields of a lease's line."""
        return dataclasses.asdict(self)

    @classmethod
    def of_line(cls, line: Mapping[str, object]) -> Question:
        """Return what a lease's line asks."""
        digest = line.get("digest")
        return cls(
            str(line.get("folder")), str(line.get("name")), None if digest is None else str(digest)
        )


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[Question]:
    """Make a folder, and a file in it for the `with` block, as the chief's supervisor.

    Raises:
        OSError: it cannot be written.
    """
    name = f"shared-{secrets.token_hex(8)}"
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if _MARK.fullmatch(old.name):  # of a supervisor that was killed
            old.unlink(missing_ok=True)
    path.write_text(socket.gethostname(), encoding="utf-8")
    try:
        yield Question(str(folder), name)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def of_checkpoint(path: Path) -> Question | None:
    """Return the index of a checkpoint, or of the newest one in a folder.

    Returns:
        None where this host sees no checkpoint there: the chief reports what is wrong.
    """
    try:
        if path.is_dir():
            found = [match for name in os.listdir(path) if (match := _NUMBERED.fullmatch(name))]
            newest = max(found, key=lambda match: int(match[1]), default=None)
            if newest is None:
                return None
            path = path / newest[0]
        index = Path(str(path).removesuffix(_INDEX).removesuffix(_PARAMS) + _INDEX)
        return Question(str(index.parent), index.name, _digest(index))
    except OSError:
        return None


class Look:
    """A look at a file by a thread: a network's file system may not answer for a long time.

    Attributes:
        question: what is looked for.
        done: whether it has ended.
        fault: what it has found; see `look`.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.done = threading.Event()
        self.fault: str | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.fault = look(self.question)
        except (OSError, ValueError) as error:
            self.fault = f"cannot use it: {error}"
        self.done.set()


def look(question: Question) -> str | None:
    """Answer whether this host sees a file; return what is wrong, or None."""
    name = question.name
    if os.path.basename(name) != name:
        return f"{name!r} is not the name of a file"
    path = Path(question.folder, name)
    if not path.is_file():
        return "does not see what the chief sees there"
    if question.digest is not None:
        return None if _digest(path) == question.digest else "has another one there"
    answer = path.with_name(f"{name}.{secrets.token_hex(4)}")
    try:
        answer.write_text("written", encoding="utf-8")
        answer.unlink()
    except OSError as error:
        return f"cannot write there: {error.strerror}"
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(regular_files.read(path, _MAX_INDEX_BYTES)).hexdigest()
