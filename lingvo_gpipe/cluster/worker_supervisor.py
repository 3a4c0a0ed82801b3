"""The worker's supervisor: it grants the lease, and starts a new worker process for each chief.

A worker process serves one chief only. Its memory is returned when the lease ends, with whatever
variables that chief left. The next process begins at once, and imports TensorFlow while it waits
for the next lease; it opens no port before that. The supervisor listens at the worker's own
address, and stops listening there when the lease is taken: TensorFlow's server takes the port over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import child, lease, members, peers
from lingvo_gpipe.console import signals

SERVER = (sys.executable, "-m", "lingvo_gpipe.run.worker")
"""Program of a worker process."""
SERVES = "serves"
"""The worker's line once its port is open; any other line is the reason why it ends."""
_MAX_EARLY_ENDS = 3


class Worker:
    """A worker process."""

    def __init__(
        self,
        cluster: members.Cluster,
        index: int,
        command: tuple[str, ...] = SERVER,
        environment: Mapping[str, str] = os.environ,
        cores: Collection[int] | None = None,
    ) -> None:
        """Start it; it serves when it is asked to.

        Args:
            cluster: processes of the run.
            index: its number.
            command: its program.
            environment: its environment variables.
            cores: the cores that it may use; None: those of this process.
        """
        self._config = json.loads(cluster.to_config(members.Member(members.WORKER, index)))
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
        self._child = child.Child(command, {**quiet, **environment}, cores)
        self._line = ""

    def answer(self, line: Mapping[str, Any]) -> dict[str, object]:
        """Answer a line of the chief's supervisor: "ping", or "serve" with what the chief needs."""
        if line["do"] == "serve":
            self._child.channel.write(json.dumps({**self._config, **line}))
        fault = self.fault()
        return {"serves": self._line == SERVES, "fault": fault, "pid": self._child.pid}

    def fault(self) -> str | None:
        """Return why it does not run; None: it does."""
        fault = self._child.fault()  # first, so that the last line of one that has ended is read
        for line in self._child.channel.lines():
            self._line = line
        return self._line if fault and self._line not in ("", SERVES) else fault

    def end(self) -> None:
        """End it."""
        self._child.end()


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of a worker's supervisor.

    Attributes:
        cluster: processes of the run.
        index: number of the worker.
        token: secret of the run.
        report: receives lines for the user.
        command: program of the worker process.
    """

    cluster: members.Cluster
    index: int
    token: str
    report: Callable[[str], None]
    command: tuple[str, ...] = SERVER


async def run(options: Options) -> int:
    """Serve chiefs until one says that the run has ended; return the run's exit code.

    A signal ends this process with 128 + its number.

    Raises:
        DeviceError: the address cannot be used, or the worker process does not start.
    """
    supervisor = _Supervisor(options)
    with signals.handled(lambda number, _: sys.exit(128 + number)):
        try:
            return await supervisor.serve()
        finally:
            supervisor.end_worker()


class _Supervisor:
    """The supervisor: a worker process, and the lease if it is granted."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._name = f"worker {options.index}"
        self._worker: Worker | None = None
        self._early_ends = 0

    async def serve(self) -> int:
        """Grant leases, one after the other, until a chief says that the run has ended."""
        while True:
            connection = await self._next_lease()
            self._options.report(f"{self._name} serves the chief at {connection.peer}")
            self._early_ends = 0
            try:
                return await self._hold(connection)
            except (lease.LostError, lease.RefusedError) as error:
                self._options.report(f"{self._name} lost its chief: {error}; it waits for the next")
            finally:
                await connection.close()
                self.end_worker()

    async def _next_lease(self) -> lease.Connection:
        """Listen until a chief with the right token has connected."""
        options = self._options
        granted: asyncio.Future[lease.Connection] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = lease.Connection(reader, writer)

            def claim() -> bool:
                if granted.done():
                    return False
                granted.set_result(connection)
                return True

            try:
                await lease.grant(connection, options.cluster, options.index, options.token, claim)
            except (lease.LostError, lease.RefusedError) as error:
                peer = connection.peer
                options.report(f"{self._name} refused a connection from {peer}: {error}")
                await connection.close()

        address = options.cluster.workers[options.index]
        listener = await asyncio.start_server(
            connected, sock=members.listen(self._name, address), limit=lease.MAX_LINE_BYTES
        )
        options.report(f"{self._name} waits for its chief at {address}")
        try:
            while not granted.done():
                self._running_worker()
                await asyncio.wait([granted], timeout=lease.PING_S)
        finally:
            listener.close()
        return granted.result()

    async def _hold(self, connection: lease.Connection) -> int:
        """Answer the chief's supervisor; return the run's exit code once it has ended."""
        others = peers.Peers(self._options.cluster, self._options.index)
        watch: asyncio.Task[None] | None = None
        try:
            while True:
                line = await connection.receive(lease.DROPPED_AFTER_S)
                if line["do"] == "end":
                    return int(line["code"])
                if line["do"] == "serve":
                    watch = asyncio.create_task(others.watch())
                worker = self._worker or self._running_worker()
                await connection.send({**worker.answer(line), "unreachable": others.unreachable})
        finally:
            if watch is not None:
                watch.cancel()

    def _running_worker(self) -> Worker:
        """Return the worker process; start one, unless one runs."""
        if self._worker is not None and (fault := self._worker.fault()) is not None:
            self._early_ends += 1
            self.end_worker()
            if self._early_ends >= _MAX_EARLY_ENDS:
                raise errors.DeviceError(
                    f"the process of {self._name} ends before it serves: {fault}. Its own lines, "
                    "above, say why"
                )
        if self._worker is None:
            options = self._options
            self._worker = Worker(options.cluster, options.index, options.command)
        return self._worker

    def end_worker(self) -> None:
        """End the worker process."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
