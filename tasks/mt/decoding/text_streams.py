"""Reading lines and writing translations: files, pipes, the standard streams."""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import tqdm

from lingvo_gpipe import errors
from lingvo_gpipe.console import progress

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_POLL_INTERVAL_S = 1.0


class _PolledInput(io.RawIOBase):
    """Reads a pipe or a terminal and calls `poll` while it waits for bytes."""

    def __init__(self, descriptor: int, poll: Callable[[], None]) -> None:
        """Read from an open descriptor; the caller closes it."""
        self._descriptor = descriptor
        self._poll = poll

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Wait for bytes and read them; an exception of `poll` ends the wait."""
        ready: list[int] = []
        while not ready:
            self._poll()
            ready, _, _ = select.select([self._descriptor], [], [], _POLL_INTERVAL_S)
        return os.readv(self._descriptor, [buffer])


@contextlib.contextmanager
def reading(path: str | None, poll: Callable[[], None]) -> Iterator[BinaryIO]:
    """Open a file of lines, or the standard input.

    Args:
        path: path of the file; None: the standard input.
        poll: called about once a second while a pipe has no bytes; its exception ends the wait.

    Raises:
        InputError: it cannot be read.
    """
    if path is None:
        if sys.stdin is None:
            raise errors.InputError("the standard input is closed. Name a file by decode.input")
        yield _polled(sys.stdin.buffer, poll)
        return
    try:
        file = open(  # noqa: SIM115 (closed below)
            os.path.expanduser(path), "rb", opener=_without_waiting
        )
    except OSError as error:
        raise errors.InputError(
            f"decode.input={path} cannot be read: {error.strerror}. Name another file"
        ) from error
    with file:
        os.set_blocking(file.fileno(), True)
        yield _polled(file, poll)


def _without_waiting(path: str, mode: int) -> int:
    """Open a pipe even if it has no writer yet: reading waits for one."""
    return os.open(path, mode | os.O_NONBLOCK)


def _polled(file: BinaryIO, poll: Callable[[], None]) -> BinaryIO:
    """Return a reader of `file` that polls, or `file` itself if it never waits."""
    try:
        waits = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # a file in memory
        waits = False
    return io.BufferedReader(_PolledInput(file.fileno(), poll)) if waits else file


@contextlib.contextmanager
def writing(path: str | None) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes to a file, or to the standard output.

    A new or regular file gets its name when the block ends, and only if nothing was raised. Devices
    and pipes are written to directly.

    Raises:
        InputError: it cannot be written.
    """
    if path is None:
        yield _write_to_standard_output
        return
    name = os.path.realpath(os.path.expanduser(path))
    if os.path.isdir(name):
        raise errors.InputError(f"decode.output={path} is a folder. Name a file in it")
    is_file = not os.path.exists(name) or os.path.isfile(name)
    partial = f"{name}.writing" if is_file else name
    with _writing_errors(path):
        file = open(partial, "wb")  # noqa: SIM115 (closed below)

    def write(lines: bytes) -> None:
        with _writing_errors(path):
            file.write(lines)
            file.flush()

    try:
        try:
            yield write
        finally:
            # Closing writes again what could not be written.
            with _writing_errors(path):
                file.close()
        if is_file:
            with _writing_errors(path):
                os.replace(partial, name)
    finally:
        if is_file:
            with contextlib.suppress(OSError):
                os.remove(partial)


@contextlib.contextmanager
def _writing_errors(path: str) -> Iterator[None]:
    """Raise an InputError if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise errors.InputError(
            f"decode.output={path} cannot be written: {error.strerror}. Name another file, or "
            "free disk space"
        ) from error


def _write_to_standard_output(lines: bytes) -> None:
    try:
        with tqdm.tqdm.external_write_mode(file=sys.stdout):  # above a progress bar
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise  # the reader has ended; no error
    except OSError as error:
        raise errors.InputError(
            f"the standard output cannot be written: {error.strerror}. Free disk space"
        ) from error


def line_counter(path: str | None) -> progress.Count:
    """Return a counter of translated lines; it knows the total if `path` is a regular file."""
    total = None
    if path is not None and os.path.isfile(os.path.expanduser(path)):  # a pipe is read only once
        with open(os.path.expanduser(path), "rb") as file:
            total = sum(1 for _ in file)
    return progress.Count("translating", "line", total)
