"""A process that a supervisor starts: it ends with its supervisor, and both exchange lines.

It is started from the main thread: the system's signal at the parent's end (PR_SET_PDEATHSIG)
follows the thread that started the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

STOPPED_AFTER_S = 1.25
"""For how long a process is seen stopped (by SIGSTOP or a debugger) until it counts as lost."""
START_AGAIN = os.EX_TEMPFAIL
"""Exit code of a chief that cannot go on, but whose next process can."""
_CHANNEL = "LINGVO_GPIPE_SUPERVISOR"
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 2**20


class Channel:
    """One end of a socket between a supervisor and its child; a message is a line of text."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def write(self, line: str) -> None:
        """Write a line; it is lost if the other end is gone, or does not read."""
        with contextlib.suppress(OSError):
            self._socket.send(line.encode(), socket.MSG_DONTWAIT)

    def lines(self) -> Iterator[str]:
        """Yield the lines that have come, without waiting."""
        with contextlib.suppress(OSError):
            while message := self._socket.recv(_MAX_LINE_BYTES, socket.MSG_DONTWAIT):
                yield message.decode()

    def wait(self) -> str:
        """Wait for a line; empty if the other end is gone."""
        return self._socket.recv(_MAX_LINE_BYTES).decode()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def channel() -> Channel | None:
    """Return the channel to the supervisor that started this process; None if none did."""
    descriptor = os.environ.pop(_CHANNEL, None)
    if descriptor is None:
        return None
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    return Channel(end)


class Child:
    """A process and the channel to it.

    Signals from the terminal do not reach it: its supervisor passes them on.

    Attributes:
        pid: its number.
        channel: the supervisor's end.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Collection[int] | None = None,
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            environment: its environment variables.
            cores: the cores that it may use; None: those of its supervisor.
        """
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def begin() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                list(command),
                env={**environment, _CHANNEL: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                preexec_fn=begin,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._stopped_since: float | None = None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; −N after signal N; None while it runs."""
        return self._process.poll()

    def fault(self) -> str | None:
        """Return how it has ended, or that it is stopped; None: it runs.

        To be called again and again: see `STOPPED_AFTER_S`.
        """
        if (code := self.exit_code) is not None:
            return ending(code)
        if not self._is_stopped():
            self._stopped_since = None
            return None
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        return "its process is stopped" if now - self._stopped_since >= STOPPED_AFTER_S else None

    def _is_stopped(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        # The state follows the name of the program, which may hold anything; T, t: stopped.
        return status.rpartition(")")[2].split()[0] in "Tt"

    def signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it still runs, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self.channel.close()


def ending(code: int) -> str:
    """Return how a process ended.

    Args:
        code: its exit code; −N after signal N.

    >>> ending(-9), ending(75)
    ('killed by SIGKILL', 'ended with exit code 75')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    return f"killed by {signal.Signals(-code).name}"
