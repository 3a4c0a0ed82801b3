"""The chief's supervisor: it takes the leases, starts the chief, and starts both again at a loss.

An attempt goes like this. The chief's process begins to import TensorFlow; meanwhile the leases of
all workers are taken. The chief writes how many devices it needs of each worker; the workers open
their ports; the folder of the run is tried on every host; the chief connects and trains. When a
lease is lost, or the chief is, everything of this attempt ends, and another one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import child, lease, members, temporary, worker_supervisor
from lingvo_gpipe.cluster.checks import ports, sharing
from lingvo_gpipe.cluster.restarts import Restarts

LOST_EXIT_CODE = 75
"""Exit code of a chief that cannot go on, but could after a new start (EX_TEMPFAIL)."""
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
MAX_RESTARTS = 100
"""How often a run may be started again, where nothing else is asked for."""
_TICK_S = 0.05
_RETRY_S = 0.5
_SLOW_S = 0.5
_LOOK_S = 30.0
# After a chief that failed: how long a loss that explains it may take to be noticed.
_EXPLAINED_WITHIN_S = 2 * lease.PING_S


class FaultError(Exception):
    """Something of an attempt is lost; its text says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of a chief's supervisor.

    Attributes:
        cluster: processes of the run.
        token: secret of the run.
        command: program of the chief.
        environment: environment variables of the chief.
        report: receives lines for the user.
        folder: folder that all hosts must share; None: none.
        checkpoint: checkpoint that all hosts must see, or a folder of them; None: none.
        start_timeout_s: how long to wait for workers, and then for the connection to them.
        first_note_s: after how long it is first reported what is waited for.
        max_restarts: how often a run may be started again.
        port_timeout_s: how long to wait for the chief's port, if it is in use.
        keep_workers: starts the supervisors of this machine's workers that have ended; may raise
            `DeviceError`. Does nothing on clusters.
    """

    cluster: members.Cluster
    token: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    report: Callable[[str], None]
    folder: Path | None = None
    checkpoint: Path | None = None
    start_timeout_s: float = 300.0
    first_note_s: float = 1.5
    max_restarts: int = MAX_RESTARTS
    port_timeout_s: float = ports.TIMEOUT_S
    keep_workers: Callable[[], None] = lambda: None


async def run(options: Options) -> int:
    """Run the chief to its end, however often it must be started; return its exit code.

    Raises:
        DeviceError: the chief's port is in use, a worker does not come or cannot be one of this
            run, or the run is given up.
    """
    restarts = Restarts(options.max_restarts)
    signals: list[int] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.append, number)
    # TensorFlow would say so only once all workers serve, and without the port.
    await ports.check(options.cluster, members.Member(members.CHIEF), options.port_timeout_s)
    while True:
        options.keep_workers()
        attempt = _Attempt(options, signals)
        try:
            code, fault = await attempt.run(), None
        except FaultError as error:
            code, fault = 1, error
        except errors.DeviceError:
            await attempt.end(1)
            raise
        if signals and fault is not None:
            code, fault = 128 + signals[-1], None
        if fault is None:
            await attempt.end(code)
            return code
        try:
            wait_s = restarts.wait_s(str(fault), attempt.step)
        except errors.DeviceError:
            await attempt.end(1)
            raise
        await attempt.end(None)
        at = "before its first step" if attempt.step is None else f"at step {attempt.step}"
        wait = f", in {wait_s:.0f} s" if wait_s else ""
        options.report(f"{fault}, {at}: restart {restarts.count} of {options.max_restarts}{wait}")
        until = time.monotonic() + wait_s
        while not signals and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)


class _Attempt:
    """One start of the run.

    Attributes:
        step: number of the update that the chief began last; None: none.
    """

    def __init__(self, options: Options, signals: list[int]) -> None:
        self.step: int | None = None
        self._options = options
        self._signals = signals
        self._passed_on = 0
        self._is_connected = False
        self._needs: Mapping[str, object] | None = None
        self._holds: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[int] | None = None
        self._workers = [_Worker(options, i) for i in range(len(options.cluster.workers))]
        config = options.cluster.to_config(members.Member(members.CHIEF))
        # The chief has no cell: on a GPU of its host it would only take a worker's memory.
        environment = {**options.environment, members.VARIABLE: config, GPUS: ""}
        self._temporary: temporary.Folder | None = None
        with contextlib.suppress(OSError):  # without one, the chief has that of its supervisor
            self._temporary = temporary.Folder()
            environment["TMPDIR"] = str(self._temporary.path)
        self._chief = child.Child(options.command, child.Settings(environment, channel=True))

    async def run(self) -> int:
        """Run it; return the chief's exit code.

        Raises:
            FaultError: something is lost.
            DeviceError: no other attempt would help.
        """
        self._holds = [asyncio.ensure_future(worker.hold()) for worker in self._workers]
        watch = self._watch = asyncio.ensure_future(self._watch_chief())
        await asyncio.wait([watch, *self._holds], return_when=asyncio.FIRST_COMPLETED)
        self._read_chief()  # its last step
        if watch.done() and watch.exception() is None:
            if watch.result() == 0:
                return 0  # the run is done, whatever became of a worker meanwhile
            # A chief may fail because of a worker whose loss is noticed a moment later.
            await asyncio.wait(
                self._holds, timeout=_EXPLAINED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED
            )
        for hold in self._holds:
            if hold.done():
                hold.result()  # raises
        code = await watch
        if code < 0 and not self._signals:
            raise FaultError(f"{self._name} was {child.ending(code)}")
        if code == LOST_EXIT_CODE:
            raise FaultError(f"{self._name} could not go on")
        return code if code >= 0 else 128 - code

    @property
    def _name(self) -> str:
        return f"the chief ({socket.gethostname()}, process {self._chief.pid})"

    async def end(self, code: int | None) -> None:
        """End the chief and the leases.

        Args:
            code: exit code of the run, for the workers; None: another attempt follows.
        """
        self._chief.end()
        tasks = [*self._holds, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end(code) for worker in self._workers))
        # Last: a worker that waits longer than `lease.DROPPED_AFTER_S` would miss the end.
        if self._temporary is not None:
            self._temporary.remove()

    async def _watch_chief(self) -> int:
        """Return the chief's exit code once it has ended.

        Raises:
            FaultError: it is stopped, or does not connect to the workers.
        """
        stopped = child.StoppedFor()
        has_begun, began = False, 0.0
        while self._chief.exit_code is None:
            self._pass_signals_on()
            self._read_chief()
            if stopped.note(self._chief.state() == child.STOPPED) >= lease.STOPPED_AFTER_S:
                raise FaultError(f"{self._name} is stopped")
            if not has_begun and self._needs is not None and self._all_serve():
                has_begun = True
                await self._look()
                for worker in self._workers:
                    worker.is_used = True
                self._chief.write(GO)
                began = time.monotonic()
            timeout_s = self._options.start_timeout_s
            if has_begun and not self._is_connected and time.monotonic() - began > timeout_s:
                raise FaultError(
                    f"{self._name} has not connected to the workers within {timeout_s:.0f} s"
                )
            await asyncio.sleep(lease.PING_S if has_begun else _TICK_S)
        self._read_chief()
        return self._chief.exit_code

    def _read_chief(self) -> None:
        for line in self._chief.read():
            if line == CONNECTED:
                self._is_connected = True
            elif line.startswith(STEP):
                self.step = int(line.removeprefix(STEP))
            elif line.startswith(NEEDS):
                needs = self._needs = json.loads(line.removeprefix(NEEDS))
                for worker in self._workers:
                    worker.needs = needs

    def _pass_signals_on(self) -> None:
        for number in self._signals[self._passed_on :]:
            self._chief.signal(number)
        self._passed_on = len(self._signals)

    def _all_serve(self) -> bool:
        return all(worker.serves for worker in self._workers)

    async def _look(self) -> None:
        """Check that every host sees the run's folder, and the checkpoint to start from.

        Raises:
            DeviceError: one does not.
        """
        folder, checkpoint = self._options.folder, self._options.checkpoint
        if folder is not None:
            try:
                with sharing.marked(folder) as question:
                    await self._all_see(question, f"--logdir={folder}", "Name a folder")
            except OSError as error:
                raise errors.DeviceError(
                    f"--logdir={folder} cannot be written: {error.strerror}. Name a folder that "
                    "all hosts share"
                ) from error
        if checkpoint is not None:
            of_checkpoint = sharing.of_checkpoint(checkpoint)
            if of_checkpoint is not None:
                where = f"--checkpoint={checkpoint}"
                await self._all_see(of_checkpoint, where, "Name one in a folder")

    async def _all_see(self, question: sharing.Question, where: str, way_out: str) -> None:
        faults = await asyncio.gather(*(worker.look(question) for worker in self._workers))
        for worker, fault in zip(self._workers, faults, strict=True):
            if fault is not None:
                raise errors.DeviceError(
                    f"{where}: {worker} {fault}. {way_out} that all hosts share, by the same path"
                )


class _Worker:
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
        self._identity: lease.Identity | None = None
        self._pid: int | None = None  # of the worker itself; `_identity` is its supervisor's
        self._connection: lease.Connection | None = None
        # A line and its answer belong together: pings, and looks between them.
        self._asking = asyncio.Lock()
        self._is_slow = False

    def __str__(self) -> str:
        if self._identity is not None:
            process = "" if self._pid is None else f", process {self._pid}"
            return f"worker {self._index} ({self._identity.host}{process})"
        return f"worker {self._index} ({self._options.cluster.workers[self._index]})"

    async def hold(self) -> None:
        """Take the lease, let the worker serve, and watch it; never returns.

        Raises:
            FaultError: the worker is lost, or cannot reach another one any more.
            DeviceError: it does not come, cannot be a worker of this run, or never reaches
                another one.
        """
        self._connection = await self._take()
        try:
            stopped = child.StoppedFor()
            while self.needs is None:
                self._end_if_stopped(await self._ping(), stopped)
                await asyncio.sleep(lease.PING_S)
            await self._ask({"do": "serve", **self.needs})
            began, wait = time.monotonic(), None
            timeout_s = self._options.start_timeout_s
            while True:
                answer = await self._ping()
                state = self._end_if_stopped(answer, stopped)
                if state not in (
                    child.STOPPED,
                    worker_supervisor.STARTING,
                    worker_supervisor.SERVING,
                ):
                    raise FaultError(f"{self} is lost: {state}")
                unreachable = answer.get("unreachable")
                if not self.is_used:
                    self.serves = state == worker_supervisor.SERVING and unreachable == {}
                if unreachable:
                    wait = wait or _Wait(self._options)
                    self._note_unreachable(unreachable, wait)
                elif not self.serves and time.monotonic() - began > timeout_s:
                    raise FaultError(f"{self} does not begin to serve")
                await asyncio.sleep(lease.PING_S)
        except (lease.LostError, lease.RefusedError) as error:
            raise FaultError(f"the supervisor of {self._identity} is lost: {error}") from error

    def _end_if_stopped(self, answer: Mapping[str, object], stopped: child.StoppedFor) -> str:
        """Return the state of the worker's process.

        Raises:
            FaultError: it has been stopped for some time.
        """
        state = str(answer.get("state"))
        if stopped.note(state == child.STOPPED) >= lease.STOPPED_AFTER_S:
            raise FaultError(f"{self} is lost: its process is stopped")
        return state

    def _note_unreachable(self, unreachable: object, wait: _Wait) -> None:
        """Wait for a route from this worker to others; once they are used, it is a loss."""
        reasons = dict(unreachable) if isinstance(unreachable, Mapping) else {}
        for number, reason in reasons.items():
            other = f"worker {number} ({self._options.cluster.workers[int(number)]})"
            if self.is_used:
                raise FaultError(f"{self} cannot reach {other}: {reason}")
            waited_s = wait.note(f"{self} to reach {other}", str(reason))
            if waited_s > self._options.start_timeout_s:
                raise errors.DeviceError(
                    f"{self} cannot reach {other} after {waited_s:.0f} s (--start_timeout_s): "
                    f"{reason}. Let each worker reach the ports of the others"
                )

    async def look(self, question: sharing.Question) -> str | None:
        """Return what is wrong with a file on the worker's host; None: nothing.

        Raises:
            FaultError: the worker is lost.
        """
        line = {"do": "look", **question.to_line()}
        began = time.monotonic()
        try:
            while not (answer := await self._ask(line)).get("done"):
                if time.monotonic() - began > _LOOK_S:
                    return f"has not seen it within {_LOOK_S:.0f} s: its file system is stuck"
                await asyncio.sleep(_TICK_S)
        except (lease.LostError, lease.RefusedError) as error:
            raise FaultError(f"the supervisor of {self._identity} is lost: {error}") from error
        fault = answer.get("fault")
        return None if fault is None else str(fault)

    async def end(self, code: int | None) -> None:
        """End the lease; `code` as in `_Attempt.end`."""
        if self._connection is None:
            return
        with contextlib.suppress(lease.LostError):
            if code is not None:
                await self._connection.send({"do": "end", "code": code})
                await self._connection.finish()
        self._connection.close()
        self._connection = None

    async def _take(self) -> lease.Connection:
        """Take the lease, waiting for the worker where it is not there yet."""
        wait = _Wait(self._options)
        while True:
            try:
                connection, self._identity = await lease.take(
                    self._options.cluster, self._index, self._options.token
                )
                return connection
            except (lease.LostError, lease.RefusedError) as error:
                waited_s = wait.note(str(self), str(error))
                if waited_s > self._options.start_timeout_s:
                    raise errors.DeviceError(
                        f"{self} is missing after {waited_s:.0f} s (--start_timeout_s): {error}. "
                        "Start it there with --job=worker, and let the chief reach that port"
                    ) from error
            await asyncio.sleep(_RETRY_S)
            self._options.keep_workers()

    async def _ping(self) -> dict[str, object]:
        asked = time.monotonic()
        answer = await self._ask({"do": "ping"})
        took_s = time.monotonic() - asked
        if took_s > _SLOW_S and not self._is_slow:
            self._is_slow = True
            self._options.report(
                f"the supervisor of {self._identity} is slow: it has answered after {took_s:.1f} s"
            )
        if isinstance(pid := answer.get("pid"), int):
            self._pid = pid
        return answer

    async def _ask(self, line: Mapping[str, object]) -> dict[str, object]:
        async with self._asking:
            if self._connection is None:
                raise lease.LostError("its lease has ended")
            return await self._connection.ask(line, lease.LOST_AFTER_S)


class _Wait:
    """Something that is waited for, which is reported less and less often."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._began, self._since = time.monotonic(), time.strftime("%H:%M:%S")
        self._note_after_s = options.first_note_s

    def note(self, what: str, why: str) -> float:
        """Note that it is still waited for, and why; return for how many seconds it has been."""
        waited_s = time.monotonic() - self._began
        if self._note_after_s < waited_s <= self._options.start_timeout_s:
            self._note_after_s *= 2
            self._options.report(f"waiting for {what} since {self._since}: {why}")
        return waited_s
