"""The lease: one TCP connection from the chief's supervisor to a worker's supervisor.

It is taken before TensorFlow opens a port. Both supervisors prove that they know the run's token,
which never crosses the network, and refuse another version, another number or another cluster.
Then the worker's supervisor answers each line of the chief's, every `PING_S` while a run goes on.
If no answer comes within `LOST_AFTER_S`, the worker is lost; TensorFlow itself would wait forever.

    worker → chief   {"lease": 1, "nonce": …}
    chief  → worker  {"nonce": …, "proof": …}
    worker → chief   {"proof": …, "host": …, "pid": …, "index": …, "workers": …, "versions": …}
    chief  → worker  {"do": "serve", "devices": 2, …}     → {"serves": false, "fault": null, …}
    chief  → worker  {"do": "ping"}                       → {"serves": true, "fault": null, …}
    chief  → worker  {"do": "end", "code": 0}

A line is one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import members

PING_S = 0.25
LOST_AFTER_S = 1.5
"""How long the chief's supervisor waits for an answer."""
DROPPED_AFTER_S = 1.75
"""How long the worker's supervisor waits for the next line, before it is free for another chief.

Longer than the chief's supervisor waits, which can say which of several workers is lost.
"""
_VERSION = 1
_HANDSHAKE_S = 5.0
_SECOND_LOOK_S = 0.25
MAX_LINE_BYTES = 2**20
_NOT_A_LEASE = (
    "what answers there is not a worker that waits for a chief: another program, or the worker of "
    "another run"
)


class LostError(Exception):
    """The other end is gone, does not answer, or refuses the lease; its text says why."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("lingvo-gpipe", "tensorflow", "keras", "numpy"):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "unknown"
    return installed


class Connection:
    """One end of a connection of lines, each a JSON object.

    Attributes:
        peer: address of the other end.
        host: name of the other end's host, once it has said it.
        pid: number of the other end's process, once it has said it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        peer = (writer.get_extra_info("peername") or ("unknown",))[0]
        self.peer = str(peer).removeprefix("::ffff:")
        self.host, self.pid = "", 0

    async def send(self, line: Mapping[str, object]) -> None:
        """Send a line.

        Raises:
            LostError: the connection is gone.
        """
        self._writer.write(f"{json.dumps(line)}\n".encode())
        try:
            await self._writer.drain()
        except OSError as error:
            raise LostError(_reason(error)) from error

    async def receive(self, timeout_s: float = LOST_AFTER_S) -> dict[str, Any]:
        """Return the next line.

        Raises:
            LostError: the connection is gone, no line came in time, or it is not one of a lease.
        """
        try:
            line = json.loads(await self._line(timeout_s))
        except TimeoutError as error:
            raise LostError(
                f"no answer for {timeout_s:.1f} s: it is stopped, or its host cannot be reached"
            ) from error
        except asyncio.IncompleteReadError as error:
            reason = _NOT_A_LEASE if error.partial else "its connection was closed"
            raise LostError(reason) from error
        except OSError as error:
            raise LostError(_reason(error)) from error
        except (asyncio.LimitOverrunError, ValueError, RecursionError) as error:
            raise LostError(_NOT_A_LEASE) from error
        if not isinstance(line, dict):
            raise LostError(_NOT_A_LEASE)
        return line

    async def _line(self, timeout_s: float) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s - _SECOND_LOOK_S):
                return await self._reader.readuntil(b"\n")
        # If this process itself did not run meanwhile, the line is there already.
        async with asyncio.timeout(_SECOND_LOOK_S):
            return await self._reader.readuntil(b"\n")

    async def ask(self, line: Mapping[str, object]) -> dict[str, Any]:
        """Send a line and return the answer; as `send` and `receive`."""
        await self.send(line)
        return await self.receive()

    async def close(self, code: int | None = None) -> None:
        """Close the connection once everything is sent, or after half a second.

        Args:
            code: exit code of the run, if it has ended, to send before.
        """
        with contextlib.suppress(LostError, OSError, TimeoutError):
            async with asyncio.timeout(0.5):
                if code is not None:
                    await self.send({"do": "end", "code": code})
                self._writer.close()
                await self._writer.wait_closed()
        self._writer.transport.abort()


async def take(cluster: members.Cluster, token: str, index: int) -> Connection:
    """Take the lease of a worker, as its chief's supervisor.

    Args:
        cluster: the run's processes.
        token: the run's secret.
        index: number of the worker.

    Raises:
        LostError: the worker is not there, or is in use; try again later.
        DeviceError: it can never be a worker of this run.
    """
    address = cluster.workers[index]
    connection = await _connect(address)
    try:
        hello = await connection.receive()
        if hello.get("lease") != _VERSION:
            raise LostError(_NOT_A_LEASE)
        nonces = str(hello.get("nonce")), secrets.token_hex(16)
        answer = await connection.ask({"nonce": nonces[1], "proof": _proof(token, "chief", nonces)})
        if not _is_same(answer.get("proof"), _proof(token, "worker", nonces)):
            raise errors.DeviceError(
                f"worker {index} at {address} has another token. Start all processes of a run with "
                "the same one (--token_file, or LINGVO_GPIPE_TOKEN)"
            )
        _check(answer, cluster, index)
        connection.host, connection.pid = str(answer["host"]), int(answer["pid"])
    except BaseException:
        await connection.close()
        raise
    return connection


async def _connect(address: str) -> Connection:
    host, port = members.host_and_port(address)
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            streams = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
    except TimeoutError as error:
        raise LostError("its host does not answer") from error
    except (socket.gaierror, UnicodeError) as error:
        raise LostError(f"there is no host {host!r}") from error
    except OSError as error:
        raise LostError(_reason(error)) from error
    return Connection(*streams)


def _check(worker: Mapping[str, Any], cluster: members.Cluster, index: int) -> None:
    """Check what a worker's supervisor says about itself."""
    address, host = cluster.workers[index], worker["host"]
    if worker["index"] != index:
        raise errors.DeviceError(
            f"the process at {address} is worker {worker['index']}, but the chief's cluster has "
            f"worker {index} there ({host}). Give both the same list, in one order"
        )
    if tuple(worker["workers"]) != cluster.workers:
        raise errors.DeviceError(
            f"worker {index} ({host}) was started with other workers: "
            f"{', '.join(worker['workers'])}; the chief has {', '.join(cluster.workers)}. Give all "
            "processes the same cluster"
        )
    for package, version in versions().items():
        if (other := worker["versions"].get(package, "unknown")) != version:
            raise errors.DeviceError(
                f"worker {index} ({host}) has {package} {other}, the chief has {version}. "
                "Install the same version on all hosts"
            )


async def grant(
    connection: Connection,
    cluster: members.Cluster,
    index: int,
    token: str,
    claim: Callable[[], bool],
) -> None:
    """Grant the lease of a worker to a chief's supervisor that connected; as its own supervisor.

    Args:
        connection: to the other end.
        cluster: the processes with which this worker was started.
        index: number of the worker.
        token: the run's secret.
        claim: called once the other end has proved that it knows the token; returns whether it can
            have the lease, which another may have got meanwhile.

    Raises:
        LostError: the other end is gone, is no chief's supervisor, has another token, or comes too
            late.
    """
    nonce = secrets.token_hex(16)
    await connection.send({"lease": _VERSION, "nonce": nonce})
    answer = await connection.receive(_HANDSHAKE_S)
    nonces = nonce, str(answer.get("nonce"))
    if not _is_same(answer.get("proof"), _proof(token, "chief", nonces)):
        await connection.send({"proof": ""})
        raise LostError("it has another token")
    if not claim():
        raise LostError("another chief has just taken the lease")
    await connection.send(
        {
            "proof": _proof(token, "worker", nonces),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "index": index,
            "workers": cluster.workers,
            "versions": versions(),
        }
    )


def _proof(token: str, job: str, nonces: tuple[str, str]) -> str:
    message = "\n".join((job, *nonces))
    return hmac.new(_bytes(token), _bytes(message), hashlib.sha256).hexdigest()


def _is_same(proof: object, expected: str) -> bool:
    return hmac.compare_digest(_bytes(str(proof)), _bytes(expected))


def _bytes(text: str) -> bytes:
    """Return bytes of any text: what others send may be no valid UTF-8."""
    return text.encode(errors="surrogatepass")


def _reason(error: OSError) -> str:
    return f"its connection failed: {os.strerror(error.errno) if error.errno else error}"
