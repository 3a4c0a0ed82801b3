"""A folder that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lingvo_gpipe import errors


def is_prepared(target: Path, manifest: str) -> bool:
    """Return whether `target` holds the file `manifest`; if not, `target` is free to be built.

    Raises:
        InputError: it holds something else, or cannot be read.
    """
    try:
        if (target / manifest).exists():
            return True
        used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise errors.InputError(
            f"{target} cannot be read: {error.strerror}. Use another folder"
        ) from error
    if used:
        raise errors.InputError(f"{target} is in use, but holds no records. Use a new folder")
    return False


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield an empty, locked folder; rename it to `target` if the block succeeds, else remove it.

    Raises:
        InputError: another process builds the same folder, or the disk refuses to write.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in partial.iterdir():  # left by a killed run
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            try:
                yield partial
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            if target.exists():
                target.rmdir()
            partial.rename(target)
            _sync(target.parent)
        finally:
            os.close(lock)
    except BlockingIOError as error:
        raise errors.InputError(f"another process prepares {target}. Wait until it ends") from error
    except OSError as error:
        raise errors.InputError(
            f"{target} cannot be prepared: {error.strerror} ({error.filename or partial}). Free "
            "disk space, or use another folder"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
