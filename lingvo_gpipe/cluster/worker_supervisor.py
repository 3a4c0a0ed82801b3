"""The worker's supervisor: it grants the lease, and starts a new worker process for each chief.

A worker process serves one chief only. Its memory is returned when the lease ends, with whatever
variables that chief left. The next process begins at once, and imports TensorFlow while it waits
for the next lease; it opens no port before that. The supervisor listens at the worker's own
address, and stops listening there when the lease is taken: TensorFlow's server takes the port over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import child, lease, members
from lingvo_gpipe.cluster.checks import peers, ports, sharing

SERVER = (sys.executable, "-m", "lingvo_gpipe.cluster.worker_server")
SERVING = "serving"
STARTING = "starting"
_MAX_EARLY_ENDS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of a worker's supervisor.

    Attributes:
        cluster: processes of the run.
        index: number of the worker.
        token: secret of the run.
        report: receives lines for the user.
        command: program of the worker process.
        port_timeout_s: how long to wait for its port, if that is in use.
        cores: cores of the worker process; None: those of the supervisor, which itself answers in
            time only if it can run on any core.
    """

    cluster: members.Cluster
    index: int
    token: str
    report: Callable[[str], None]
    command: tuple[str, ...] = SERVER
    port_timeout_s: float = ports.TIMEOUT_S
    cores: tuple[int, ...] | None = None


async def run(options: Options) -> int:
    """Serve chiefs until one says that the run has ended, or a signal comes.

    Returns:
        The exit code: that of the run, or 128 + the number of the signal.

    Raises:
        DeviceError: the address cannot be used, or the worker process does not start.
    """
    supervisor = _Supervisor(options)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    serving = asyncio.ensure_future(supervisor.serve())
    try:
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        return ended.result() if ended.done() else serving.result()
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await serving
        supervisor.close()


class _Supervisor:
    """The supervisor: a worker process, and the lease if it is granted."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._member = members.Member(members.WORKER, options.index)
        self._identity = lease.identity(options.cluster, options.index)
        self._server: _Server | None = None
        self._early_ends = 0
        self._refused: set[str] = set()
        self._look: sharing.Look | None = None

    async def serve(self) -> int:
        """Grant leases, one after the other, until a chief says that the run has ended."""
        while True:
            connection = await self._next_lease()
            self._early_ends = 0
            try:
                code = await self._hold(connection)
                if code is not None:
                    return code
            except (lease.LostError, lease.RefusedError) as error:
                self._options.report(f"{self._name} lost its chief: {error}; it waits for the next")
            finally:
                connection.close()
                self._end_server()

    def close(self) -> None:
        """End the worker process."""
        self._end_server()

    @property
    def _name(self) -> str:
        return str(self._member)

    async def _next_lease(self) -> lease.Connection:
        """Listen until a chief with the right token has connected."""
        granted: asyncio.Future[lease.Connection] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = lease.Connection(reader, writer)

            def claim() -> bool:
                if granted.done():
                    return False
                granted.set_result(connection)
                return True

            try:
                await lease.grant(connection, self._identity, self._options.token, claim)
            except (lease.LostError, lease.RefusedError) as error:
                self._note_refusal(connection.peer, error)
                await connection.finish()

        listener = await ports.listen(
            self._options.cluster, self._member, connected, self._options.port_timeout_s
        )
        address = self._options.cluster.workers[self._options.index]
        self._options.report(f"{self._name} waits for its chief at {address}")
        try:
            while not granted.done():
                self._keep_server()
                await asyncio.wait([granted], timeout=lease.PING_S)
        finally:
            listener.close()
        return granted.result()

    async def _hold(self, connection: lease.Connection) -> int | None:
        """Answer the chief's supervisor; return the run's exit code once it has ended."""
        self._options.report(f"{self._name} serves the chief at {connection.peer}")
        others = peers.Peers(self._options.cluster, self._options.index)
        watch: asyncio.Task[None] | None = None
        try:
            while True:
                line = await connection.receive(lease.DROPPED_AFTER_S)
                asked = line.get("do")
                if asked == "end":
                    return int(line.get("code", 0))
                answer: Mapping[str, object]
                if asked == "serve":
                    self._keep_server().serve(self._options, line)
                    watch = watch or asyncio.ensure_future(others.watch())
                    answer = {"state": STARTING}
                elif asked == "look":
                    answer = self._answer_look(sharing.Question.of_line(line))
                else:
                    state, pid = STARTING, None
                    if self._server is not None:
                        state, pid = self._server.state(), self._server.pid
                    answer = {"state": state, "pid": pid, "unreachable": others.unreachable}
                await connection.send(answer)
        finally:
            if watch is not None:
                watch.cancel()

    def _answer_look(self, question: sharing.Question) -> Mapping[str, object]:
        """Return whether a look is done, and what it has found; the first call begins it."""
        if self._look is None or self._look.question != question:
            self._look = sharing.Look(question)
        return {"done": self._look.done.is_set(), "fault": self._look.fault}

    def _keep_server(self) -> _Server:
        """Start a worker process, unless one runs."""
        if self._server is not None and self._server.has_ended:
            self._early_ends += 1
            state = self._server.state()
            self._end_server()
            if self._early_ends >= _MAX_EARLY_ENDS:
                raise errors.DeviceError(
                    f"the process of {self._name} ends before it serves: {state}. Its own lines, "
                    "above, say why"
                )
        if self._server is None:
            self._server = _Server(self._options.command, self._options.cores)
        return self._server

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None

    def _note_refusal(self, peer: str, error: Exception) -> None:
        if peer not in self._refused:
            self._refused.add(peer)
            self._options.report(f"{self._name} refused a connection from {peer}: {error}")


class _Server:
    """A worker process.

    Attributes:
        pid: number of the process.
        has_ended: whether it has ended.
    """

    def __init__(self, command: tuple[str, ...], cores: tuple[int, ...] | None) -> None:
        settings = child.Settings(dict(os.environ), cores, channel=True)
        self._child = child.Child(command, settings)
        self._said = STARTING

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._child.exit_code is not None

    def serve(self, options: Options, needs: Mapping[str, Any]) -> None:
        """Let it open its port.

        Args:
            options: settings of its supervisor.
            needs: what the chief needs of it: "devices", the number of its CPU devices, and
                "packages", whose classes the text of an input may name.
        """
        member = members.Member(members.WORKER, options.index)
        config = json.loads(options.cluster.to_config(member))
        needed = {
            "devices": int(needs.get("devices", 1)),
            "packages": [str(name) for name in needs.get("packages", ())],
        }
        self._child.write(json.dumps({**config, **needed}))

    def state(self) -> str:
        """Return `STARTING`, `SERVING`, `child.STOPPED`, or why it does not serve."""
        state = self._child.state()  # first, so that the last line of one that has ended is read
        for line in self._child.read():
            self._said = line
        gave_reason = self.has_ended and self._said not in (STARTING, SERVING)
        return self._said if state == child.RUNNING or gave_reason else state

    def end(self) -> None:
        """End it."""
        self._child.end()
