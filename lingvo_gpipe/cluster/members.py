"""Who takes part in a run: the addresses of the chief and of the workers, and which one this is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Mapping

from lingvo_gpipe import errors, text_file

CHIEF = "chief"
WORKER = "worker"
JOBS = (CHIEF, WORKER)
VARIABLE = "TF_CONFIG"
"""The environment variable of TensorFlow, Slurm scripts and Kubernetes operators for a cluster."""
LOCAL = "local"
"""Workers on this machine, which no other host can reach; `open`: which others can reach."""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")
_MAX_PORT = 65535
_LOCAL_WORKERS = re.compile(r"(local|open):([1-9]\d{0,3})")
PORT_TIMEOUT_S = 5.0
"""How long to wait for a port: a process that had it may need a moment to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One process of a cluster: its job and its number in it.

    Attributes:
        job: `CHIEF` or `WORKER`.
        index: number among those of its job.
    """

    job: str
    index: int = 0

    def __str__(self) -> str:
        return CHIEF if self.job == CHIEF else f"{self.job} {self.index}"


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The processes of a run.

    Attributes:
        chief: address of the chief, host:port, as the workers reach it.
        workers: address of each worker, as the chief and the other workers reach it.
    """

    chief: str
    workers: tuple[str, ...]

    def to_config(self, member: Member) -> str:
        """Return the value of TF_CONFIG with which a member is started."""
        cluster = {CHIEF: [self.chief], WORKER: list(self.workers)}
        return json.dumps({"cluster": cluster, "task": {"type": member.job, "index": member.index}})


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    >>> host_and_port("[fe80::1]:2222")
    ('fe80::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(name: str, address: str) -> socket.socket:
    """Return a socket that listens at the port of an address of this host.

    Args:
        name: whose address it is, for messages.
        address: host:port.

    Raises:
        DeviceError: the port cannot be used.
    """
    _, port = host_and_port(address)
    end_s = time.monotonic() + PORT_TIMEOUT_S
    while True:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", port))
        except OSError as error:
            if time.monotonic() >= end_s:
                raise errors.DeviceError(
                    f"{name} cannot listen at port {port}: {error.strerror}. End the program that "
                    "uses it, or name another port in the cluster"
                ) from error
        time.sleep(0.1)


def local_workers(text: str) -> tuple[str, int]:
    """Return the kind and the number of workers on this machine, as in `local:2` or `open:2`.

    Raises:
        DeviceError: it is something else.
    """
    match = _LOCAL_WORKERS.fullmatch(text.strip())
    if match is None:
        raise errors.DeviceError(
            f"--workers={text}: expected local:N or open:N, such as local:2. Workers on other "
            "hosts are named by TF_CONFIG or --cluster=FILE"
        )
    return match[1], int(match[2])


def read(
    path: str | None, job: str | None = None, index: int | None = None
) -> tuple[Cluster, Member] | None:
    """Return a cluster, and which process of it this is.

    Args:
        path: a file like TF_CONFIG: JSON with `cluster` → {job → addresses}, or that inner object;
            None: the environment variable TF_CONFIG.
        job: what --job says that this process is; None: what the file says, or the chief.
        index: what --task says; None: what the file says, or 0.

    Returns:
        None where TF_CONFIG is not set, or names no worker.

    Raises:
        DeviceError: it cannot be read, or names no cluster that can run.
    """
    if path is None:
        where, text = VARIABLE, os.environ.get(VARIABLE, "").strip()
    else:
        where = f"--cluster={path}"
        try:
            text = text_file.read(path)
        except OSError as error:
            raise errors.DeviceError(f"{where} cannot be read: {error.strerror}") from error
    try:
        values = json.loads(text) if text or path else {}
        task = values.get("task", {})
        named_job, named_index = task.get("type"), task.get("index")
        named_index = None if named_index is None else int(named_index)
        cluster = values.get("cluster", {} if path is None else values)
        addresses = {name: tuple(map(str, given)) for name, given in cluster.items()}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise errors.DeviceError(
            f"{where} is not the JSON of a cluster ({error}). Write "
            '{"cluster": {"chief": ["HOST:PORT"], "worker": ["HOST:PORT", …]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from error
    if path is None and set(addresses) <= {CHIEF}:
        return None  # a chief alone is one process
    if job == WORKER and index is None and named_index is None:
        raise errors.DeviceError(
            f"{where} names several workers. Say which one this is: --task=0, 1, …"
        )
    member = Member(job or named_job or CHIEF, named_index or 0 if index is None else index)
    if named_job not in (None, member.job) or named_index not in (None, member.index):
        raise errors.DeviceError(
            f"{where} says that this process is {Member(named_job, named_index or 0)}, the flags "
            f"say {member}. Leave out --job and --task, or correct one of them"
        )
    return _checked(addresses, where, member)


def _checked(
    addresses: Mapping[str, tuple[str, ...]], where: str, member: Member
) -> tuple[Cluster, Member]:
    """Return the cluster of job → addresses, and its member, both checked."""
    for job in (*addresses, member.job):
        if job not in JOBS:
            raise errors.DeviceError(
                f"{where}: there is no job {job!r}; {errors.suggestion(job, JOBS)}. Name one "
                "chief, and workers"
            )
    chiefs, workers = (addresses.get(job, ()) for job in JOBS)
    if len(chiefs) != 1:
        raise errors.DeviceError(
            f"{where} names {len(chiefs)} chiefs. Name one, by the address at which the workers "
            "reach it"
        )
    if not workers:
        raise errors.DeviceError(f"{where} names no worker. Name at least one, as HOST:PORT")
    all_addresses = (*chiefs, *workers)
    for address in all_addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 1 <= int(match[2]) <= _MAX_PORT:
            raise errors.DeviceError(
                f"{where}: {address[:80]!r} is not an address. Write HOST:PORT, with a port from 1 "
                f"to {_MAX_PORT}"
            )
        if all_addresses.count(address) > 1:
            raise errors.DeviceError(
                f"{where}: two processes have the same address {address}. Each process needs a "
                "port of its own"
            )
    count = 1 if member.job == CHIEF else len(workers)
    if not 0 <= member.index < count:
        raise errors.DeviceError(
            f"this process is {member.job} {member.index}, but {where} names {count} "
            f"{member.job}{'s' if count > 1 else ''}. Use 0 to {count - 1}"
        )
    return Cluster(chiefs[0], workers), member
