"""Workers on this machine: pinned to cores, in a network of their own.

    parent ── agent of the chief ──┬── chief
                  (in the          ├── agent of worker 0 ── worker 0
                   private network)└── agent of worker 1 ── worker 1

Each process ends with the one that started it, however that ended. Where the system has no private
network, or the run must reach another (to fetch data), the parent is itself the chief's agent, and
says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from lingvo_gpipe.cluster import chief_agent, child, isolation, members

NEEDS_NETWORK_EXIT_CODE = 76
"""Exit code of a chief in a private network that must fetch its data."""
TOKEN = "LINGVO_GPIPE_TOKEN"
"""The environment variable of a run's secret."""
LOCAL = "LINGVO_GPIPE_LOCAL"
"""Set for processes of `--workers=local:N`: `_PRIVATE` or `_OPEN`."""
_PRIVATE = "private"
_OPEN = "open"
_FIRST_PORT = 2222
_TICK_S = 0.05
_END_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def is_private() -> bool:
    """Return whether this process is in a private network."""
    return os.environ.get(LOCAL) == _PRIVATE


def is_local() -> bool:
    """Return whether this process was started for `--workers=local:N`."""
    return LOCAL in os.environ


def run(
    num_workers: int,
    arguments: Sequence[str],
    options: Callable[[members.Cluster, str], chief_agent.Options],
    report: Callable[[str], None],
    *,
    private: bool = True,
) -> int:
    """Run a chief with workers on this machine; return the run's exit code.

    Args:
        num_workers: N.
        arguments: the command line's, for the processes that do the same again.
        options: (cluster, token) → options of the chief's agent.
        report: receives lines for the user.
        private: whether to try a private network.
    """
    if private and not is_local():
        code = _in_private_network(arguments, report)
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
    local = _LocalWorkers(cluster)
    made = dataclasses.replace(options(cluster, token), keep_workers=local.keep)
    try:
        return asyncio.run(chief_agent.run(made))
    finally:
        local.end()


class _LocalWorkers:
    """The agents of this machine's workers."""

    def __init__(self, cluster: members.Cluster) -> None:
        self._cluster = cluster
        self._agents: dict[int, child.Child] = {}

    def keep(self) -> None:
        """Start every agent that does not run; one that is stopped is ended first."""
        cores = shares(sorted(os.sched_getaffinity(0)), len(self._cluster.workers))
        for index, own_cores in enumerate(cores):
            agent = self._agents.get(index)
            if agent is not None:
                if agent.state() == child.RUNNING:
                    continue
                agent.end()
            member = members.Member(members.WORKER, index)
            config = {members.VARIABLE: self._cluster.to_config(member)}
            self._agents[index] = child.Child(
                [sys.executable, "-m", "lingvo_gpipe.trainer", "--job=worker"],
                child.Settings({**os.environ, **config}, own_cores),
            )

    def end(self) -> None:
        """End all agents; most end by themselves, once the run has ended."""
        limit_s = time.monotonic() + _END_S
        while time.monotonic() < limit_s and any(
            agent.exit_code is None for agent in self._agents.values()
        ):
            time.sleep(_TICK_S)
        for agent in self._agents.values():
            agent.end()


def shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """Divide cores among workers: neighbours together; with too few, several share one.

    >>> shares([0, 1, 2, 3, 4], 2), shares([0, 1], 3)
    ([[0, 1], [2, 3, 4]], [[0], [0], [1]])
    """
    n = len(cores)
    if count > n:
        return [[cores[i * n // count]] for i in range(count)]
    return [list(cores[i * n // count : (i + 1) * n // count]) for i in range(count)]


def _in_private_network(arguments: Sequence[str], report: Callable[[str], None]) -> int | None:
    """Do the same command again in a private network; None where that cannot be."""
    try:
        network = isolation.PrivateNetwork()
    except OSError as error:
        report(
            f"this system allows no private network ({error.strerror}): the workers' ports are "
            "open to every host that reaches this machine"
        )
        return None
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        with contextlib.suppress(UnboundLocalError, NameError):
            agent.signal(number)

    before = {number: signal.signal(number, receive) for number in _SIGNALS}
    agent = child.Child(
        [sys.executable, "-m", "lingvo_gpipe.trainer", *arguments],
        child.Settings({**os.environ, LOCAL: _PRIVATE}, prepare=network.enter),
    )
    try:
        network.close()
        while agent.exit_code is None:
            time.sleep(_TICK_S)
    finally:
        agent.end()
        for number, old in before.items():
            signal.signal(number, old)
    code = agent.exit_code
    if code == NEEDS_NETWORK_EXIT_CODE:
        report("the data must be fetched: the run begins again without a private network")
        return None
    return code if code >= 0 else 128 - code


def _free_ports(count: int) -> list[int]:
    """Return free ports; another program may take one before it is used."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]
