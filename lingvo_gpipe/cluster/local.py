"""Workers on this machine: pinned to cores, in a network of their own.

    parent ── supervisor of the chief ──┬── chief
              (from here on in the      ├── supervisor of worker 0 ── worker 0
               private network)         └── supervisor of worker 1 ── worker 1

Each process ends with the one that started it, however that ended, and the one that started it
starts it again if it is killed or stopped. Where the system has no private network, or the run must
reach another (to fetch data), the parent is itself the chief's supervisor, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import chief_supervisor, child, isolation, lease, members, restarts
from lingvo_gpipe.console import signals

_Item = TypeVar("_Item")
NEEDS_NETWORK_EXIT_CODE = 76
"""Exit code of a chief in a private network that must reach other hosts."""
TOKEN = "LINGVO_GPIPE_TOKEN"
"""The environment variable of a run's secret."""
LOCAL = "LINGVO_GPIPE_LOCAL"
"""Set for processes of `--workers=local:N`: `_PRIVATE` or `_OPEN`."""
CORES = "LINGVO_GPIPE_CORES"
"""Numbers of the cores of a worker process, which its supervisor sets."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
_PRIVATE = "private"
_OPEN = "open"
_FIRST_PORT = 2222
_FIRST_NOTE_S = 5.0  # the supervisors that are waited for begin only now
_TICK_S = 0.05
_END_S = 1.0
_TRAINER = (sys.executable, "-m", "lingvo_gpipe.trainer")
# A supervisor that was lost later than this after its start has done something.
_SHORT_S = 60.0
_LOWEST_PORT = 10_000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MAX_FAILURES = 3


def is_private() -> bool:
    """Return whether this process is in a private network."""
    return os.environ.get(LOCAL) == _PRIVATE


def cores() -> tuple[int, ...] | None:
    """Return the cores of this supervisor's worker process; None: they are not set."""
    text = os.environ.get(CORES)
    return None if text is None else tuple(map(int, text.split(",")))


def is_local() -> bool:
    """Return whether this process was started for `--workers=local:N`."""
    return LOCAL in os.environ


def run(
    num_workers: int,
    arguments: Sequence[str],
    options: Callable[[members.Cluster, str], chief_supervisor.Options],
    report: Callable[[str], None],
    *,
    max_restarts: int = chief_supervisor.MAX_RESTARTS,
) -> int:
    """Run a chief with workers on this machine; return the run's exit code.

    Args:
        num_workers: N.
        arguments: the command line's, for the processes that do the same again.
        options: (cluster, token) → options of the chief's supervisor.
        report: receives lines for the user.
        max_restarts: how often the chief's supervisor may be started again.

    Raises:
        DeviceError: a worker cannot be started, or the run is given up.
    """
    if not is_local():
        supervisor = PrivateSupervisor(
            (*_TRAINER, *arguments), {**os.environ, LOCAL: _PRIVATE}, report, max_restarts
        )
        code = supervisor.run()
        if code is not None:
            return code
    os.environ.setdefault(LOCAL, _OPEN)
    ports = (
        range(_FIRST_PORT, _FIRST_PORT + num_workers + 1)
        if is_private()
        else _free_ports(num_workers + 1)
    )
    chief, *workers = (f"127.0.0.1:{port}" for port in ports)
    cluster, token = members.Cluster(chief, tuple(workers)), secrets.token_hex(16)
    os.environ[TOKEN] = token
    local = LocalWorkers(cluster)
    made = dataclasses.replace(
        options(cluster, token), keep_workers=local.keep, first_note_s=_FIRST_NOTE_S
    )
    try:
        return asyncio.run(chief_supervisor.run(made))
    finally:
        local.end()


class LocalWorkers:
    """The supervisors of this machine's workers."""

    def __init__(
        self,
        cluster: members.Cluster,
        command: Callable[[int], Sequence[str]] = lambda _: (*_TRAINER, "--job=worker"),
    ) -> None:
        """Start none yet.

        Args:
            cluster: processes of the run.
            command: number of a worker → program of its supervisor.
        """
        self._cluster = cluster
        self._command = command
        self._supervisors: dict[int, child.Child] = {}
        self._failures = 0

    def keep(self) -> None:
        """Start every supervisor that does not run; one that is stopped is ended first.

        Raises:
            DeviceError: supervisors end by themselves, again and again.
        """
        count = len(self._cluster.workers)
        each = shares(sorted(os.sched_getaffinity(0)), count)
        gpus_of_each = shares(gpus(os.environ), count)
        for index, (own_cores, own_gpus) in enumerate(zip(each, gpus_of_each, strict=True)):
            supervisor = self._supervisors.get(index)
            if supervisor is not None:
                state = supervisor.state()
                if state == child.RUNNING:
                    continue
                failed = (supervisor.exit_code or 0) > 0
                supervisor.end()
                self._failures += failed
                if failed and self._failures >= _MAX_FAILURES:
                    raise errors.DeviceError(
                        f"the supervisor of worker {index} {state}. Its own lines, above, say why"
                    )
            member = members.Member(members.WORKER, index)
            environment = {
                **os.environ,
                members.VARIABLE: self._cluster.to_config(member),
                CORES: ",".join(map(str, own_cores)),
            }
            if own_gpus:
                environment[chief_supervisor.GPUS] = ",".join(own_gpus)
            self._supervisors[index] = child.Child(
                self._command(index), child.Settings(environment)
            )

    def end(self) -> None:
        """End all supervisors; most end by themselves, once the run has ended."""
        limit_s = time.monotonic() + _END_S
        while time.monotonic() < limit_s and any(
            supervisor.exit_code is None for supervisor in self._supervisors.values()
        ):
            time.sleep(_TICK_S)
        for supervisor in self._supervisors.values():
            supervisor.end()


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
    if named is not None:
        # CUDA ignores what follows a device that there is not.
        return list(itertools.takewhile(_may_be_gpu, map(str.strip, named.split(","))))
    try:
        return [str(number) for number in range(len(os.listdir(_DRIVER)))]
    except OSError:
        return []


def _may_be_gpu(name: str) -> bool:
    return name != "" and not name.startswith("-")


class PrivateSupervisor:
    """The supervisor of a chief in a private network, which is watched from outside of it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        report: Callable[[str], None],
        max_restarts: int,
    ) -> None:
        """Start nothing yet.

        Args:
            command: program of the supervisor.
            environment: its environment variables.
            report: receives lines for the user.
            max_restarts: how often it may be started again.
        """
        self._command = command
        self._environment = environment
        self._report = report
        self._max_restarts = max_restarts
        self._received: list[int] = []
        self._passed_on = 0

    def run(self) -> int | None:
        """Run the supervisor, again if it is killed or stopped; return its exit code.

        Returns:
            None where the run cannot be in a private network.

        Raises:
            DeviceError: the supervisor was lost too often.
        """
        lost = short = 0
        with signals.handled(lambda number, _: self._received.append(number)):
            while True:
                began = time.monotonic()
                try:
                    supervisor = self._start()
                except (OSError, subprocess.SubprocessError) as error:
                    self._report(
                        f"this system allows no private network ({error}): the workers' ports are "
                        "open to every host that reaches this machine"
                    )
                    return None
                try:
                    fault = self._watch(supervisor)
                finally:
                    supervisor.end()
                if fault is None or self._received:
                    break
                lost += 1
                short = short + 1 if time.monotonic() - began < _SHORT_S else 0
                if lost > self._max_restarts or short >= restarts.SAME_STEP:
                    raise errors.DeviceError(
                        f"the chief's supervisor {fault}, after {lost - 1} restarts. The same "
                        "command continues the run"
                    )
                self._report(
                    f"the chief's supervisor {fault}: restart {lost} of {self._max_restarts}"
                )
        code = supervisor.exit_code or 0
        if code == NEEDS_NETWORK_EXIT_CODE:
            self._report(
                "the data must be fetched, or a hook reaches other hosts: the run begins again "
                "without a private network"
            )
            return None
        return code if code >= 0 else 128 - code

    def _start(self) -> child.Child:
        """Start the supervisor in a new network: the ports of the last one may still be in use."""
        network = isolation.PrivateNetwork()
        try:
            return child.Child(
                self._command, child.Settings(self._environment, prepare=network.enter)
            )
        finally:
            network.close()

    def _watch(self, supervisor: child.Child) -> str | None:
        """Wait for the supervisor's end; return what became of it; None: it has ended by itself."""
        stopped = child.StoppedFor()
        while supervisor.exit_code is None:
            for number in self._received[self._passed_on :]:
                self._passed_on += 1
                supervisor.signal(number)
            if stopped.note(supervisor.state() == child.STOPPED) >= lease.STOPPED_AFTER_S:
                return f"(process {supervisor.pid}) is stopped"
            time.sleep(lease.PING_S)
        return None if supervisor.exit_code >= 0 else f"was {child.ending(supervisor.exit_code)}"


def _free_ports(count: int) -> list[int]:
    """Return free ports; another program may take one before it is used.

    They are below those that the system uses for connections, of which one might take a worker's
    port between two of its processes.
    """
    try:
        end = int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        end = 0
    candidates = range(_LOWEST_PORT, end) or range(_LOWEST_PORT, 2**16)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(candidates, len(candidates)):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise errors.DeviceError(f"this machine has no {count} free ports")
