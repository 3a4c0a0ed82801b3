"""The worker's supervisor: it grants the lease, and starts a new worker process for each chief.

A worker process serves one chief only. Its memory is returned when the lease ends, with whatever
variables that chief left. The next process begins at once, and imports TensorFlow while it waits
for the next lease; it opens no port before that. The supervisor listens at the worker's own
address, and stops listening there when the lease is taken: TensorFlow's server takes the port over.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import child, lease, members, peers
from lingvo_gpipe.console import signals

SERVER = (sys.executable, "-m", "lingvo_gpipe.run.worker")
"""Program of a worker process."""
SERVES = "serves"
"""The worker's line once its port is open; any other line is the reason why it ends."""
_MAX_EARLY_ENDS = 3
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


class WorkerProcess:
    """A worker's process, on this machine.

    Attributes:
        host: name of this host.
        pid: number of this process, its supervisor.
    """

    def __init__(
        self,
        cluster: members.Cluster,
        index: int,
        command: Sequence[str] = SERVER,
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
        self.host, self.pid = socket.gethostname(), os.getpid()
        self._config = json.loads(cluster.to_config(members.Member(members.WORKER, index)))
        self._child = child.Child(command, {**_QUIET, **environment}, cores)
        self._line = ""

    async def ask(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a line of the chief's supervisor: "ping", or "serve" with what the chief needs."""
        if line["do"] == "serve":
            self._child.channel.write(json.dumps({**self._config, **line}))
        fault = self.fault()
        serves = self._line == SERVES
        return {"serves": serves, "fault": fault, "pid": self._child.pid, "unreachable": {}}

    def fault(self) -> str | None:
        """Return why it does not run; None: it does."""
        fault = self._child.fault()  # first, so that the last line of one that has ended is read
        for line in self._child.channel.lines():
            self._line = line
        return self._line if fault and self._line not in ("", SERVES) else fault

    async def close(self, code: int | None = None) -> None:
        """End it, whatever the exit code of the run."""
        del code
        self._child.end()


async def run(
    cluster: members.Cluster,
    index: int,
    token: str,
    report: Callable[[str], None],
    command: Sequence[str] = SERVER,
) -> int:
    """Serve chiefs until one says that the run has ended; return the run's exit code.

    A signal ends this process with 128 + its number.

    Args:
        cluster: processes of the run.
        index: number of the worker.
        token: secret of the run.
        report: receives lines for the user.
        command: program of the worker process.

    Raises:
        DeviceError: the address cannot be used, or the worker process does not start.
    """
    supervisor = _Supervisor(cluster, index, token, report, command)
    with signals.handled(lambda number, _: sys.exit(128 + number)):
        try:
            return await supervisor.serve()
        finally:
            await supervisor.end_worker()


class _Supervisor:
    """The supervisor: a worker process, and the lease if it is granted."""

    def __init__(
        self,
        cluster: members.Cluster,
        index: int,
        token: str,
        report: Callable[[str], None],
        command: Sequence[str],
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._token = token
        self._report = report
        self._command = command
        self._name = f"worker {index}"
        self._worker: WorkerProcess | None = None
        self._early_ends = 0

    async def serve(self) -> int:
        """Grant leases, one after the other, until a chief says that the run has ended."""
        while True:
            connection = await self._next_lease()
            self._report(f"{self._name} serves the chief at {connection.peer}")
            self._early_ends = 0
            try:
                return await self._hold(connection)
            except lease.LostError as error:
                self._report(f"{self._name} lost its chief: {error}; it waits for the next")
            finally:
                await connection.close()
                await self.end_worker()

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
                await lease.grant(connection, self._cluster, self._index, self._token, claim)
            except lease.LostError as error:
                peer = connection.peer
                self._report(f"{self._name} refused a connection from {peer}: {error}")
                await connection.close()

        address = self._cluster.workers[self._index]
        listener = await asyncio.start_server(
            connected, sock=members.listen(self._name, address), limit=lease.MAX_LINE_BYTES
        )
        self._report(f"{self._name} waits for its chief at {address}")
        try:
            while not granted.done():
                await self._running_worker()
                await asyncio.wait([granted], timeout=lease.PING_S)
        finally:
            listener.close()
        return granted.result()

    async def _hold(self, connection: lease.Connection) -> int:
        """Answer the chief's supervisor; return the run's exit code once it has ended."""
        others = peers.Peers(self._cluster, self._index)
        watch: asyncio.Task[None] | None = None
        worker = self._worker or await self._running_worker()
        try:
            while True:
                line = await connection.receive(lease.DROPPED_AFTER_S)
                if line["do"] == "end":
                    return int(line["code"])
                if line["do"] == "serve":
                    watch = asyncio.create_task(others.watch())
                answer = await worker.ask(line)
                await connection.send({**answer, "unreachable": others.unreachable})
        finally:
            if watch is not None:
                watch.cancel()

    async def _running_worker(self) -> WorkerProcess:
        """Return the worker process; start one, unless one runs."""
        if self._worker is not None and (fault := self._worker.fault()) is not None:
            self._early_ends += 1
            await self.end_worker()
            if self._early_ends >= _MAX_EARLY_ENDS:
                raise errors.DeviceError(
                    f"the process of {self._name} ends before it serves: {fault}. Its own lines, "
                    "above, say why"
                )
        if self._worker is None:
            self._worker = WorkerProcess(self._cluster, self._index, self._command)
        return self._worker

    async def end_worker(self) -> None:
        """End the worker process."""
        if self._worker is not None:
            await self._worker.close()
            self._worker = None
