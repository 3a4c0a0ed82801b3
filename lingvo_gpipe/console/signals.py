"""What a command does at a signal that asks it to end: stop and save, or pass the signal on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a program to end. Slurm sends SIGUSR1 before a job's time is over."""


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` at each signal of `ENDING` inside the `with` block."""
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequest:
    """Turns the first signal of `ENDING` into a request to stop; the second ends the process.

    Signals are handled from the first call of `should_stop` on: work that never asks is ended by
    the first signal.

    Attributes:
        seen: the signal that `should_stop` has reported; None: the work was not interrupted.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._handlers = contextlib.ExitStack()
        self._is_handling = False
        self.seen: int | None = None

    def __enter__(self) -> StopRequest:
        return self

    def should_stop(self) -> bool:
        """Return whether the user asked the work to stop."""
        if not self._is_handling:
            self._handlers.enter_context(handled(self._receive))
            self._is_handling = True
        self.seen = self._received
        return self.seen is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number
        # Python's handler waits for the operation that runs; the system's default does not.
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        self._handlers.close()


def run_program(program: Sequence[str]) -> tuple[int, int | None]:
    """Run a program and wait; a signal that ends this process ends the program first.

    Ctrl-C reaches the program from the terminal; another signal is passed on.

    Returns:
        Its exit code, and the first signal that came meanwhile: the program may have reached its
        end all the same.
    """
    process = subprocess.Popen(program)
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if number != signal.SIGINT:
            process.send_signal(number)

    with handled(pass_on):
        return process.wait(), received[0] if received else None
