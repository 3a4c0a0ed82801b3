"""Who takes part in a run: the addresses of the chief and of the workers, and which one this is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lingvo_gpipe import errors, regular_files

CHIEF = "chief"
WORKER = "worker"
JOBS = (CHIEF, WORKER)
VARIABLE = "TF_CONFIG"
"""The environment variable of TensorFlow, Slurm scripts and Kubernetes operators for a cluster."""

_LABEL = "[A-Za-z0-9_-]{1,63}"  # of a host name; Python encodes only such ones to look them up
_ADDRESS = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*\.?):(\d{{1,5}})")
_MAX_PORT = 65535
_MAX_WORKERS = 4096
_LOCAL = re.compile(r"local:(\d+)")


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

    def address(self, member: Member) -> str:
        """Return the address of a member."""
        return self.chief if member.job == CHIEF else self.workers[member.index]

    def members(self) -> tuple[Member, ...]:
        """Return the chief, then the workers in order."""
        return (Member(CHIEF), *(Member(WORKER, i) for i in range(len(self.workers))))

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


def num_local_workers(text: str) -> int:
    """Return N of `local:N`.

    Raises:
        DeviceError: it is something else.
    """
    found = _LOCAL.fullmatch(text.strip())
    if found is None or not 1 <= int(found[1]) <= _MAX_WORKERS:
        raise errors.DeviceError(
            f"--workers={text}: expected local:N with N from 1 to {_MAX_WORKERS}, such as local:2. "
            "Workers on other hosts are named by TF_CONFIG or --cluster=FILE"
        )
    return int(found[1])


def from_environment(
    environment: Mapping[str, str], job: str | None = None, index: int | None = None
) -> tuple[Cluster, Member] | None:
    """Read TF_CONFIG; return None where it is not set, or names no worker.

    Args:
        environment: environment variables.
        job: what --job says that this process is; None: what TF_CONFIG says.
        index: what --task says; None: what TF_CONFIG says.

    Raises:
        DeviceError: it names no cluster that can run.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    values = _object(text, VARIABLE)
    if not values.get("cluster", {}):
        return None
    named = _member(values.get("task"), VARIABLE)
    member = Member(
        job or (named.job if named else CHIEF), index if index is not None else _index(named, job)
    )
    if named is not None and member != named:
        raise errors.DeviceError(
            f"{VARIABLE} says that this process is {named}, the flags say {member}. Leave out "
            "--job and --task, or correct one of them"
        )
    if isinstance(values["cluster"], Mapping) and not values["cluster"].get(WORKER):
        return None  # a chief alone is one process
    return _checked(values["cluster"], VARIABLE, member)


def from_file(
    path: str | os.PathLike[str], job: str | None = None, index: int | None = None
) -> tuple[Cluster, Member]:
    """Read a file like TF_CONFIG: JSON with `cluster` → {job → addresses}, or that inner object.

    Args:
        path: the file.
        job: as in `from_environment`; None: chief.
        index: as in `from_environment`; None: 0.

    Raises:
        DeviceError: it cannot be read, or names no cluster that can run.
    """
    where = f"--cluster={path}"
    try:
        text = regular_files.read_text(path)
    except OSError as error:
        raise errors.DeviceError(f"{where} cannot be read: {error.strerror}") from error
    values = _object(text, where)
    if job == WORKER and index is None:
        raise errors.DeviceError(
            f"{where} names several workers. Say which one this is: --task=0, 1, …"
        )
    return _checked(values.get("cluster", values), where, Member(job or CHIEF, index or 0))


def _index(named: Member | None, job: str | None) -> int:
    return named.index if named is not None and job in (None, named.job) else 0


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.DeviceError(
            f"{where} is not JSON: {error}. Write "
            '{"cluster": {"chief": ["HOST:PORT"], "worker": ["HOST:PORT", …]}}'
        ) from error
    if not isinstance(values, dict):
        raise errors.DeviceError(f"{where} holds a {type(values).__name__}, expected an object")
    return values


def _member(task: Any, where: str) -> Member | None:
    if task is None:
        return None
    kind = task.get("type") if isinstance(task, Mapping) else None
    index = task.get("index", 0) if isinstance(task, Mapping) else None
    if isinstance(index, str) and index.isdecimal():
        index = int(index)  # what scripts write
    if not isinstance(kind, str) or type(index) is not int:
        raise errors.DeviceError(
            f'{where}: "task" is {json.dumps(task)[:80]}, expected '
            '{"type": "chief" or "worker", "index": a number}'
        )
    return Member(kind, index)


def _checked(jobs: Any, where: str, member: Member) -> tuple[Cluster, Member]:
    """Return the cluster of an object job → addresses, and its member, both checked."""
    if not isinstance(jobs, Mapping):
        raise errors.DeviceError(f"{where}: the cluster is a {type(jobs).__name__}, not an object")
    for job in jobs:
        if job not in JOBS:
            near = errors.nearest(job, JOBS) or list(JOBS)
            raise errors.DeviceError(
                f"{where} names the job {job!r}, which a pipeline does not have; nearest "
                f"{near[0]!r}. Name one chief, and workers"
            )
    if member.job not in JOBS:
        near = errors.nearest(member.job, JOBS) or list(JOBS)
        raise errors.DeviceError(
            f"there is no job {member.job!r}; nearest {near[0]!r}. Use {' or '.join(JOBS)}"
        )
    chiefs, workers = _addresses(jobs, CHIEF, where), _addresses(jobs, WORKER, where)
    if len(chiefs) != 1:
        raise errors.DeviceError(
            f"{where} names {len(chiefs)} chiefs. Name one, by the address at which the workers "
            "reach it"
        )
    if not workers:
        raise errors.DeviceError(f"{where} names no worker. Name at least one, as HOST:PORT")
    cluster = Cluster(chiefs[0], workers)
    _refuse_twins(cluster, where)
    count = 1 if member.job == CHIEF else len(workers)
    if not 0 <= member.index < count:
        raise errors.DeviceError(
            f"this process is {member.job} {member.index}, but {where} names {count} "
            f"{member.job}{'s' if count > 1 else ''}. Use 0 to {count - 1}"
        )
    return cluster, member


def _addresses(jobs: Mapping[str, Any], job: str, where: str) -> tuple[str, ...]:
    addresses = jobs.get(job, [])
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, list) or len(addresses) > _MAX_WORKERS:
        raise errors.DeviceError(f"{where}: the addresses of {job} are not a list of HOST:PORT")
    for address in addresses:
        found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if found is None or not 1 <= int(found[2]) <= _MAX_PORT:
            raise errors.DeviceError(
                f"{where}: {json.dumps(address)[:80]} of {job} is not an address. Write HOST:PORT, "
                f"with a port from 1 to {_MAX_PORT}"
            )
    return tuple(addresses)


def _refuse_twins(cluster: Cluster, where: str) -> None:
    seen: dict[str, Member] = {}
    for member in cluster.members():
        address = cluster.address(member)
        if address in seen:
            raise errors.DeviceError(
                f"{where}: {seen[address]} and {member} have the same address {address}. Each "
                "process needs a port of its own"
            )
        seen[address] = member
