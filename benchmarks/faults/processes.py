"""Which process of a run is which, as seen in /proc, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.faults import notes as run_notes

PARENT, CHIEF_SUPERVISOR, CHIEF = "parent", "chief's supervisor", "chief"
WORKER_SUPERVISOR, WORKER = "worker's supervisor", "worker"
REMOVER = "remover of temporary files"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SERVER = "lingvo_gpipe.run.worker"
TRAINER = "lingvo_gpipe.trainer"
_JOB = "--job=worker"
_CHANNEL = "LINGVO_GPIPE_SUPERVISOR="
# Files that are there while something is written, and never after a run.
_PARTIAL = re.compile(r".*(\.writing|_temp|\.tmp|\.part)|shared-.*")


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A process of a run.

    Attributes:
        pid: its number.
        parent: number of the process that started it.
        role: what it is in the run.
        state: letter of its state; see proc_pid_stat(5).
        rss_bytes: memory that it occupies.
        start: when it was started, in the system's ticks; with `pid`, its identity.
    """

    pid: int
    parent: int
    role: str
    state: str
    rss_bytes: int
    start: int


def of_run(notes: Path) -> list[Process]:
    """Return all processes of the run that writes to `notes`, in order of their start."""
    found = [process for pid in _pids() if (process := _read(pid, notes)) is not None]
    supervisors = {process.parent for process in found if process.role == CHIEF}
    servers = {process.parent for process in found if process.role == WORKER}
    named = []
    for process in found:
        if process.role == PARENT and process.pid in supervisors:
            process = dataclasses.replace(process, role=CHIEF_SUPERVISOR)
        elif process.role == PARENT and process.pid in servers:
            process = dataclasses.replace(process, role=WORKER_SUPERVISOR)
        named.append(process)
    return sorted(named, key=lambda process: process.start)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(pid: int, notes: Path) -> Process | None:
    folder = Path(f"/proc/{pid}")
    try:
        environment = (folder / "environ").read_bytes().split(b"\0")
        if f"{run_notes.FILE}={notes}".encode() not in environment:
            return None
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    if _SERVER in words:
        role = WORKER
    elif TRAINER not in words:
        role = REMOVER
    elif any(entry.startswith(_CHANNEL.encode()) for entry in environment):
        role = CHIEF
    else:
        role = WORKER_SUPERVISOR if _JOB in words else PARENT
    return Process(
        pid=pid,
        parent=int(fields[1]),
        role=role,
        state=fields[0],
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        start=int(fields[19]),
    )


def is_stopped(process: Process, notes: Path) -> bool:
    """Return whether this very process is still there, and stopped."""
    now = _read(process.pid, notes)
    return now is not None and now.start == process.start and now.state in "Tt"


@contextlib.contextmanager
def networks(processes: Iterable[Process]) -> Iterator[set[str]]:
    """Yield the names of the network namespaces of processes, this one's left out.

    They stay open meanwhile: otherwise the system would use the name of one that has ended for the
    next, which may be another run's.
    """
    found = set()
    with contextlib.ExitStack() as stack:
        for process in processes:
            with contextlib.suppress(OSError):
                file = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
                stack.callback(os.close, file)
                found.add(os.readlink(f"/proc/self/fd/{file}"))
        yield found - {os.readlink("/proc/self/ns/net")}


def other_networks() -> set[str]:
    """Return the names of the network namespaces of all processes that are of no such run."""
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if f"{run_notes.FILE}=".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


def partial_files(folder: Path) -> list[str]:
    """Return the files below a run's folder that should not outlive the run."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if _PARTIAL.fullmatch(path.name)
    )
