"""The chief's supervisor: it takes the leases, starts the chief, and starts both again at a loss.

An attempt goes like this. The chief's process begins to import TensorFlow; meanwhile the leases of
all workers are taken. The chief writes how many devices it needs of each worker; the workers open
their ports; the chief connects and trains. When a lease is lost, or the chief is, everything of
this attempt ends, and another one begins.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import child, lease, members, worker_supervisor
from lingvo_gpipe.console import signals

NEEDS = "needs "
"""Begins the chief's line with what it needs of each worker, as JSON."""
STEP = "step "
"""Begins the chief's line with the number of the update that it begins."""
CONNECTED = "connected"
"""The chief's line once TensorFlow has connected to the workers."""
GO = "go"
"""The supervisor's line once the workers serve."""
GPUS = "CUDA_VISIBLE_DEVICES"
"""The environment variable of the GPUs that a process uses."""
_TICK_S = 0.05
_RETRY_S = 0.5
_FIRST_NOTE_S = 1.5
_MOST_LOSSES = 3
"""Losses in a row at one step after which a run is given up."""


class FaultError(Exception):
    """Something of an attempt is lost; its text says what."""


Link: TypeAlias = "lease.Connection | worker_supervisor.WorkerProcess"
"""What the chief's supervisor asks a worker by: a lease, or the worker process itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of a chief's supervisor.

    Attributes:
        cluster: processes of the run.
        command: program of the chief.
        environment: environment variables of the chief.
        report: receives lines for the user.
        link: number of a worker → link to it; see `lease.take` for what it raises.
        start_timeout_s: how long to wait for workers, and then for the connection to them.
    """

    cluster: members.Cluster
    command: tuple[str, ...]
    environment: Mapping[str, str]
    report: Callable[[str], None]
    link: Callable[[int], Awaitable[Link]]
    start_timeout_s: float


async def run(options: Options) -> int:
    """Run the chief to its end, however often it must be started; return its exit code.

    Raises:
        DeviceError: the chief's port is in use, a worker does not come or cannot be one of this
            run, or the run was lost three times in a row at one step.
    """
    received: list[int] = []
    losses: list[int | None] = []  # the step of each; None: before the first
    with signals.handled(lambda number, _: received.append(number)):
        # TensorFlow would share the port with another chief of the same user.
        members.listen("the chief", options.cluster.chief).close()
        while True:
            attempt = _Attempt(options, received)
            code: int | None = 1
            try:
                try:
                    code = await attempt.run()
                except FaultError as error:
                    if not received:
                        losses.append(attempt.step)
                        place = (
                            f"at step {attempt.step}"
                            if attempt.step is not None
                            else "before its first step"
                        )
                        if losses[-_MOST_LOSSES:] == [attempt.step] * _MOST_LOSSES:
                            raise errors.DeviceError(
                                f"{error}, {place}, the 3rd time in a row at the same place: "
                                "another restart would not help. Look at the lines above; the same "
                                "command continues the run"
                            ) from error
                        options.report(f"{error}, {place}: restart {len(losses)}")
                        code = None
                if code and received:
                    code = 128 + received[-1]
            finally:
                await attempt.end(code)
            if code is not None:
                return code


class _Attempt:
    """One start of the run.

    Attributes:
        step: number of the update that the chief began last; None: none.
    """

    def __init__(self, options: Options, received: list[int]) -> None:
        self.step: int | None = None
        self._options = options
        self._received = received  # signals to pass on
        self._passed_on = 0
        self._is_connected = False
        self._workers = [_WatchedWorker(options, i) for i in range(len(options.cluster.workers))]
        self._tasks: list[asyncio.Task[Any]] = []
        # What TensorFlow writes there, a process that is killed does not remove.
        self._temporary = tempfile.TemporaryDirectory(
            prefix="lingvo_gpipe-chief-", ignore_cleanup_errors=True
        )
        config = options.cluster.to_config(members.Member(members.CHIEF))
        # The chief has no cell: on a GPU of its host it would only take a worker's memory.
        more = {members.VARIABLE: config, GPUS: "", "TMPDIR": self._temporary.name}
        self._chief = child.Child(options.command, {**options.environment, **more})

    async def run(self) -> int:
        """Run it; return the chief's exit code.

        Raises:
            FaultError: something is lost.
            DeviceError: no other attempt would help.
        """
        workers = [asyncio.create_task(worker.watch()) for worker in self._workers]
        chief = asyncio.create_task(self._watch_chief())
        self._tasks = [chief, *workers]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._read_chief()  # its last step
        if chief.done() and chief.exception() is None:
            if chief.result() == 0:
                return 0  # the run is done, whatever became of a worker meanwhile
            # A chief may fail because of a worker whose loss is noticed a moment later.
            await asyncio.wait(
                workers, timeout=2 * lease.PING_S, return_when=asyncio.FIRST_COMPLETED
            )
        for worker in workers:
            if worker.done():
                worker.result()  # raises
        code = await chief
        if code < 0 and not self._received:
            raise FaultError(f"{self._name} was {child.ending(code)}")
        if code == child.START_AGAIN:
            raise FaultError(f"{self._name} could not go on")
        return code if code >= 0 else 128 - code

    @property
    def _name(self) -> str:
        return f"the chief ({socket.gethostname()}, process {self._chief.pid})"

    async def _watch_chief(self) -> int:
        """Return the chief's exit code once it has ended.

        Raises:
            FaultError: it is stopped, or does not connect to the workers.
        """
        began_s: float | None = None
        timeout_s = self._options.start_timeout_s
        while self._chief.fault() is None:
            for _ in self._received[self._passed_on :]:
                self._chief.signal(signal.SIGTERM)
                self._passed_on += 1
            self._read_chief()
            if began_s is None and all(worker.serves for worker in self._workers):
                for worker in self._workers:
                    worker.is_used = True
                self._chief.channel.write(GO)
                began_s = time.monotonic()
            if began_s is None:
                await asyncio.sleep(_TICK_S)
                continue
            if not self._is_connected and time.monotonic() - began_s > timeout_s:
                raise FaultError(
                    f"{self._name} has not connected to the workers within {timeout_s:.0f} s"
                )
            await asyncio.sleep(lease.PING_S)
        self._read_chief()
        code = self._chief.exit_code
        if code is None:
            raise FaultError(f"{self._name} is stopped")
        return code

    def _read_chief(self) -> None:
        for line in self._chief.channel.lines():
            if line == CONNECTED:
                self._is_connected = True
            elif line.startswith(STEP):
                self.step = int(line.removeprefix(STEP))
            elif line.startswith(NEEDS):
                for worker in self._workers:
                    worker.needs = json.loads(line.removeprefix(NEEDS))

    async def end(self, code: int | None) -> None:
        """End the chief and the workers.

        Args:
            code: exit code of the run, for the workers; None: another attempt follows.
        """
        self._chief.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end(code) for worker in self._workers))
        # Last: a worker that waits longer than `lease.DROPPED_AFTER_S` would miss the end.
        self._temporary.cleanup()


class _WatchedWorker:
    """A worker, as the chief's supervisor sees it.

    Attributes:
        needs: what it must serve; None: not known yet.
        serves: whether it does, and reaches the other workers.
        is_used: whether the chief has begun to use it.
    """

    def __init__(self, options: Options, index: int) -> None:
        self.needs: Mapping[str, object] | None = None
        self.serves = False
        self.is_used = False
        self._options = options
        self._index = index
        self._link: Link | None = None
        self._pid: int | None = None

    def __str__(self) -> str:
        if self._link is None:
            return f"worker {self._index} ({self._options.cluster.workers[self._index]})"
        process = "" if self._pid is None else f", process {self._pid}"
        return f"worker {self._index} ({self._link.host}{process})"

    async def watch(self) -> None:
        """Take the lease, let the worker serve once the chief needs it, and watch it.

        Raises:
            FaultError: the worker is lost, or cannot reach another one any more.
            DeviceError: it does not come, cannot be a worker of this run, or never reaches
                another one.
        """
        link = self._link = await self._take()
        wait: _Wait | None = None
        try:
            while True:
                line: Mapping[str, object] = {"do": "ping"}
                if wait is None and self.needs is not None:
                    line, wait = {"do": "serve", **self.needs}, _Wait(self._options)
                answer = await link.ask(line)
                self._pid = answer["pid"]
                if answer["fault"] is not None:
                    raise FaultError(f"{self} is lost: {answer['fault']}")
                self.serves = answer["serves"] and answer["unreachable"] is not None
                if wait is not None:
                    self._check_routes(answer["unreachable"] or {}, wait)
                    if not self.serves and wait.is_over:
                        raise FaultError(f"{self} does not begin to serve")
                await asyncio.sleep(lease.PING_S)
        except lease.LostError as error:
            raise FaultError(
                f"the supervisor of worker {self._index} ({link.host}, process {link.pid}) is "
                f"lost: {error}"
            ) from error

    def _check_routes(self, unreachable: Mapping[str, str], wait: _Wait) -> None:
        """Wait for a route from this worker to others; once they are used, it is a loss."""
        for number, reason in unreachable.items():
            self.serves = False
            other = f"worker {number} ({self._options.cluster.workers[int(number)]})"
            if self.is_used:
                raise FaultError(f"{self} cannot reach {other}: {reason}")
            if wait.note(f"{self} to reach {other}", reason):
                raise errors.DeviceError(
                    f"{self} cannot reach {other} after {self._options.start_timeout_s:.0f} s "
                    f"(--start_timeout_s): {reason}. Let each worker reach the ports of the others"
                )

    async def _take(self) -> Link:
        """Take the lease, waiting for the worker where it is not there yet."""
        wait = _Wait(self._options)
        while True:
            try:
                return await self._options.link(self._index)
            except lease.LostError as error:
                if wait.note(str(self), str(error)):
                    raise errors.DeviceError(
                        f"{self} is missing after {self._options.start_timeout_s:.0f} s "
                        f"(--start_timeout_s): {error}. Start it there with --job=worker, and let "
                        "the chief reach that port"
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def end(self, code: int | None) -> None:
        """End the lease; `code` as in `_Attempt.end`."""
        if self._link is not None:
            await self._link.close(code)


class _Wait:
    """Something that is waited for, for at most `start_timeout_s`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._began_s = time.monotonic()
        self._reported = ""

    @property
    def is_over(self) -> bool:
        """Whether it has been too long."""
        return time.monotonic() - self._began_s > self._options.start_timeout_s

    def note(self, what: str, why: str) -> bool:
        """Report what is waited for, and why, if that is new; return `is_over`."""
        if self.is_over:
            return True
        line = f"waiting for {what}: {why}"
        if line != self._reported and time.monotonic() - self._began_s > _FIRST_NOTE_S:
            self._options.report(line)
            self._reported = line
        return False
