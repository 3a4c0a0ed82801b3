"""Workers on this machine: `--workers=local:N` and `--workers=open:N`.

The command itself supervises its chief and its workers, without leases. Each worker has its share
of the cores and of the GPUs.

TensorFlow's port listens on every interface, without authentication. So with `local:N`, all of
these processes are in a network namespace of Linux, whose only interface is its own loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lingvo_gpipe.cluster import chief_supervisor, members, worker_supervisor

_Item = TypeVar("_Item")
PRIVATE = "LINGVO_GPIPE_PRIVATE_NETWORK"
"""Set in the processes of a private network."""
NO_NETWORK = (
    "with --workers=local:N a run has a network of its own, in which it reaches no other host. To "
    "prepare data, run the command once with --max_steps=1 and without --workers; or use "
    "--workers=open:N, which lets other hosts reach TensorFlow's ports"
)
_DRIVER = Path("/proc/driver/nvidia/gpus")
_FIRST_PORT = 2222
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def is_private() -> bool:
    """Return whether this process is in a network that no other host can reach."""
    return PRIVATE in os.environ


def cluster(num_workers: int, *, private: bool, report: Callable[[str], None]) -> members.Cluster:
    """Return a cluster on this machine.

    Args:
        num_workers: N.
        private: whether to move this process into a network of its own, for good.
        report: receives a line where the system allows no such network.
    """
    ports: Sequence[int] = range(_FIRST_PORT, _FIRST_PORT + num_workers + 1)
    if private:
        try:
            enter_private_network()
        except OSError as error:
            private = False
            report(
                f"this system allows no private network ({error.strerror}): the workers' ports are "
                "open to every host that reaches this machine"
            )
    if not private:
        ports = _free_ports(num_workers + 1)
    chief, *workers = (f"127.0.0.1:{port}" for port in ports)
    return members.Cluster(chief, tuple(workers))


def enter_private_network() -> None:
    """Move this process, which must have one thread, into a network namespace of its own.

    Raises:
        OSError: the system does not allow it.
    """
    trial = os.fork()  # it cannot be undone
    if trial == 0:
        number = errno.EPERM
        try:
            _unshare()
            number = 0
        finally:
            os._exit(number)
    if number := os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]):
        raise OSError(number, os.strerror(number))
    _unshare()
    os.environ[PRIVATE] = "1"


def _unshare() -> None:
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if user != 0:  # in a user namespace of its own, too, in which this user has the rights for it
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


async def start_worker(
    cluster: members.Cluster, index: int, command: Sequence[str] = worker_supervisor.SERVER
) -> worker_supervisor.WorkerProcess:
    """Start a worker process on its share of this machine's cores and GPUs.

    Args:
        cluster: processes of the run.
        index: number of the worker.
        command: its program.
    """
    count = len(cluster.workers)
    environment = dict(os.environ)
    if own_gpus := shares(gpus(os.environ), count)[index]:
        environment[chief_supervisor.GPUS] = ",".join(own_gpus)
    cores = shares(sorted(os.sched_getaffinity(0)), count)[index]
    return worker_supervisor.WorkerProcess(cluster, index, command, environment, cores)


def shares(items: Sequence[_Item], count: int) -> list[list[_Item]]:
    """Divide cores or GPUs among workers: neighbours together; with too few, several share one.

    >>> shares([0, 1, 2, 3, 4], 2), shares([0, 1], 3), shares([], 2)
    ([[0, 1], [2, 3, 4]], [[0], [0], [1]], [[], []])
    """
    n = len(items)
    if count > n:
        return [list(items[i * n // count :][:1]) for i in range(count)]
    return [list(items[i * n // count : (i + 1) * n // count]) for i in range(count)]


def gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names of this machine's GPUs that a process may use.

    >>> gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-5f,-1,3"})
    ['2', 'GPU-5f']
    """
    named = environment.get(chief_supervisor.GPUS)
    if named is None:
        return [str(n) for n in range(len(os.listdir(_DRIVER)))] if _DRIVER.exists() else []
    # CUDA ignores what follows a device that there is not.
    names = map(str.strip, named.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def _free_ports(count: int) -> list[int]:
    """Return free ports; another program may take one before it is used."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]
