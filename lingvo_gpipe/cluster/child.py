"""A process that a supervisor starts: it ends with it, and its state can be asked at any time.

It is started from the main thread: the system's signal at the parent's end (PR_SET_PDEATHSIG)
follows the thread that started the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_EXIT_WITHOUT_PARENT = 125
_CLOSED = -1
RUNNING = "running"
STOPPED = "stopped"
_STOPPED_STATES = ("T", "t")  # by a signal, by a debugger; see proc_pid_stat(5)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a child is started.

    Attributes:
        environment: its environment variables.
        cores: the cores that it may use; None: those of its supervisor.
        prepare: called in the child before its program begins; None: nothing.
        channel: whether the child knows its ends of the pipes.
    """

    environment: Mapping[str, str]
    cores: Collection[int] | None = None
    prepare: Callable[[], None] | None = None
    channel: bool = False


class Child:
    """A process with two pipes of lines: its supervisor writes to one and reads from the other.

    A child that talks finds the numbers of its ends in `CHANNEL`, as "read,write"; see `channel`.
    Its other files are those of the supervisor. A signal from the terminal does not reach it: its
    supervisor passes it on. SIGINT waits until the child calls `receive_interrupts`, since Python
    would print a traceback while it imports.

    Attributes:
        pid: its number.
        lines: file descriptor from which the supervisor reads; does not block.
    """

    CHANNEL = "LINGVO_GPIPE_SUPERVISOR"

    def __init__(self, command: Sequence[str], settings: Settings) -> None:
        """Start it.

        Args:
            command: program and arguments.
            settings: see `Settings`.
        """
        child_reads, self._to_child = os.pipe()
        self.lines, child_writes = os.pipe()
        os.set_blocking(self.lines, False)
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if settings.cores is not None:
                os.sched_setaffinity(0, settings.cores)
            if settings.prepare is not None:
                settings.prepare()
            # Last, since a change of the process's rights undoes it.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(_EXIT_WITHOUT_PARENT)

        ends = (child_reads, child_writes) if settings.channel else ()
        environment = dict(settings.environment)
        if ends:
            environment[self.CHANNEL] = ",".join(map(str, ends))
        try:
            self._process = subprocess.Popen(
                list(command),
                env=environment,
                pass_fds=ends,
                preexec_fn=begin,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._to_child)
            os.close(self.lines)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.pid = self._process.pid
        self._rest = b""

    def state(self) -> str:
        """Return `RUNNING`, `STOPPED`, or how it ended, such as "killed by SIGKILL"."""
        code = self._process.poll()
        if code is not None:
            return ending(code)
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
            # The name of the program, in parentheses, may hold anything.
            if status.rpartition(")")[2].split()[0] in _STOPPED_STATES:
                return STOPPED
        return RUNNING

    @property
    def exit_code(self) -> int | None:
        """Its exit code; −N after signal N; None while it runs."""
        return self._process.poll()

    def write(self, line: str) -> None:
        """Write a line to the child; lost if it has ended."""
        with contextlib.suppress(OSError):
            os.write(self._to_child, f"{line}\n".encode())

    def read(self) -> list[str]:
        """Return the whole lines that the child has written since the last call."""
        with contextlib.suppress(OSError):  # there is no more for now, or the pipe is closed
            while part := os.read(self.lines, 65536):
                self._rest += part
        *whole, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it still runs, and wait until it is gone; close the pipes."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for descriptor in {self._to_child, self.lines} - {_CLOSED}:
            os.close(descriptor)
        self._to_child = self.lines = _CLOSED


def receive_interrupts() -> None:
    """Let SIGINT reach this process, which a supervisor may have started: `KeyboardInterrupt`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class StoppedFor:
    """For how long something has been stopped.

    >>> timer = StoppedFor(clock=iter([1.0, 3.0]).__next__)
    >>> timer.note(True), timer.note(True)
    (0.0, 2.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def note(self, stopped: bool) -> float:
        """Note whether it is stopped now; return for how many seconds it has been."""
        if not stopped:
            self._since = None
            return 0.0
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since


def ending(code: int) -> str:
    """Return how a process ended.

    Args:
        code: its exit code; −N after signal N.

    >>> ending(-9), ending(75)
    ('killed by SIGKILL', 'ended with exit code 75')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Channel:
    """A child's side of the pipes to its supervisor.

    Attributes:
        from_supervisor: file of lines that the supervisor writes.
    """

    def __init__(self, reads: int, writes: int) -> None:
        for descriptor in (reads, writes):
            os.set_inheritable(descriptor, False)
        os.set_blocking(writes, False)  # a supervisor that is stopped must not stop the child
        self.from_supervisor = os.fdopen(reads, encoding="utf-8")
        self._writes = writes

    def write(self, line: str) -> None:
        """Write a line to the supervisor; lost if it has ended, or does not read."""
        with contextlib.suppress(OSError):
            os.write(self._writes, f"{line}\n".encode())

    def read(self) -> str:
        """Wait for a line from the supervisor; empty if it has ended."""
        return self.from_supervisor.readline().rstrip("\n")


def channel() -> Channel | None:
    """Return the channel to the supervisor that started this process; None if none did."""
    numbers = os.environ.pop(Child.CHANNEL, None)
    if numbers is None:
        return None
    reads, writes = map(int, numbers.split(","))
    return Channel(reads, writes)
