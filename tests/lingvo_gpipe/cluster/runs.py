"""A run of supervisors on this machine, whose chief and workers are fakes; see `fakes`.

A case takes a second; the supervisors are real processes.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.lingvo_gpipe.cluster import fakes
from tests.support import programs

STEPS = 40
STEPS_OF_STOPS = 150  # they are noticed after 1.5 s
LIMIT_S = 15.0
DETECTED_S = 2.0


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    names = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return names


def wait_for(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come in {limit_s} s"
        time.sleep(0.01)


@contextlib.contextmanager
def in_use(address: str) -> Iterator[None]:
    """Keep a port, at which no connection is accepted."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        yield


@contextlib.contextmanager
def black_hole(address: str) -> Iterator[None]:
    """Let no connection to an address arrive, and refuse none: its queue is full."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_for(lambda: is_bound(server, host, int(port)), "the port")
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, int(port)))
        time.sleep(0.05)
        yield


def is_bound(server: socket.socket, host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        server.bind((host, port))
        return True
    return False


class Run:
    """Supervisors in processes of their own, which this object starts and ends."""

    def __init__(self, folder: Path, num_workers: int = 2) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.addresses = free_addresses(num_workers + 1)
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, *words: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        errors_file = open(self.folder / f"{name}.err", "a")  # noqa: SIM115 (the process has it)
        with errors_file:
            process = subprocess.Popen(
                [sys.executable, fakes.__file__, *words],
                stderr=errors_file,
                text=True,
                cwd=cwd,
                env=programs.environment(TMPDIR=str(self.temporary), **environment),
            )
        self._started[name] = process
        return process

    def start_worker(
        self,
        index: int,
        addresses: list[str] | None = None,
        cwd: Path | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        cluster = json.dumps(addresses or self.addresses)
        words = ("supervisor-of-worker", str(self.folder), cluster, str(index))
        return self.start(f"supervisor{index}", *words, cwd=cwd, **environment)

    def start_chief(
        self, steps: str = str(STEPS), cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        words = ("supervisor-of-chief", str(self.folder), json.dumps(self.addresses), steps)
        return self.start("supervisor", *words, cwd=cwd, **environment)

    def start_all(self, steps: int | str = STEPS, **of_chief: Any) -> None:
        for index in range(len(self.addresses) - 1):
            self.start_worker(index)
        self.start_chief(str(steps), **of_chief)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    @property
    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text()) if path.exists() else 0

    def lines(self, name: str = "supervisor") -> list[str]:
        return (self.folder / f"{name}.err").read_text().splitlines()

    def code(self, name: str) -> int:
        return self._started[name].wait(LIMIT_S)

    def codes(self) -> dict[str, int]:
        return {name: process.wait(LIMIT_S) for name, process in self._started.items()}

    def check_end(self, steps: int = STEPS) -> None:
        """Check that all supervisors end well, after all steps."""
        assert set(self.codes().values()) == {0}
        assert self.step == steps

    def end(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()
        pids = {path.stem: int(path.read_text()) for path in self.folder.glob("*.pid")}
        wait_for(lambda: all(map(is_gone, pids.values())), f"the end of {', '.join(pids)}")


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def named(pid: int) -> str:
    """Return a pattern of how a line names a process of this host."""
    return rf"\({re.escape(socket.gethostname())}, process {pid}\)"


def says(run: Run, what: str, name: str = "supervisor") -> bool:
    return any(what in line for line in run.lines(name))


def wait_for_restart(run: Run) -> str:
    """Wait for the first restart, which must come in time; return the line that says why."""
    began_s = time.monotonic()
    wait_for(lambda: says(run, "restart 1"), "the restart")
    assert time.monotonic() - began_s < DETECTED_S
    (line,) = (line for line in run.lines() if "restart 1" in line)
    return line


def has_gone_on(run: Run, step: int) -> bool:
    return run.step >= step + 3


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
