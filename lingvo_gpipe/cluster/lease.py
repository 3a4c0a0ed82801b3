"""The lease: one TCP connection from the chief's supervisor to a worker's supervisor.

It is taken before TensorFlow opens a port. Both supervisors prove that they know the run's token
(which never crosses the network), and refuse another version, another number or another cluster.
Then each line of the chief's supervisor is answered by one of the worker's, every `PING_S` while a
run goes on: an answer that does not come within `LOST_AFTER_S` means that the worker is lost, where
TensorFlow itself would wait forever.

    worker → chief   {"lease": 1, "nonce": …}
    chief  → worker  {"nonce": …, "proof": …}
    worker → chief   {"proof": …, "host": …, "pid": …, "index": …, "workers": …, "versions": …}
    chief  → worker  {"do": "serve", "devices": 2}        → {"state": "serving"}
    chief  → worker  {"do": "ping"}                       → {"state": "serving", "pid": …, …}
    chief  → worker  {"do": "end", "code": 0}

A line is one JSON object of at most `MAX_LINE_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import members

PING_S = 0.25
LOST_AFTER_S = 1.5
"""How long the chief's supervisor waits for an answer."""
STOPPED_AFTER_S = LOST_AFTER_S - PING_S
"""For how long a process, which is looked at every `PING_S`, is seen stopped until it is lost."""
DROPPED_AFTER_S = 1.75
"""How long the worker's supervisor waits for the next line, before it is free for another chief.

Longer than the chief's supervisor waits, which can say which of several workers is lost.
"""
MAX_LINE_BYTES = 2**20
_VERSION = 1
_HANDSHAKE_S = 5.0
_SECOND_LOOK_S = 0.25
# struct tcp_info of Linux: byte 2 is the number of retransmissions without an answer; then, from
# byte 8, 32-bit numbers, of which the fifth counts the segments that nobody has acknowledged.
_TCP_INFO_BYTES = 104


class LostError(Exception):
    """The other end is gone, or does not answer; its text says which."""


class RefusedError(Exception):
    """The other end refuses the lease; its text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a worker's supervisor says about itself.

    Attributes:
        host: name of its host.
        pid: number of its own process, not of the worker's.
        index: number of its worker.
        workers: addresses of all workers, as it was started with.
        versions: package → version that it runs.
    """

    host: str
    pid: int
    index: int
    workers: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return f"worker {self.index} ({self.host}, process {self.pid})"


def identity(cluster: members.Cluster, index: int) -> Identity:
    """Return the identity of this process."""
    return Identity(socket.gethostname(), os.getpid(), index, cluster.workers, versions())


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run."""
    return {
        "lingvo_gpipe": _version_of("lingvo-gpipe"),
        "tensorflow": _version_of("tensorflow"),
        "keras": _version_of("keras"),
        "numpy": _version_of("numpy"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Connection:
    """One end of a connection of lines, each a JSON object.

    Attributes:
        peer: address of the other end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = writer.get_extra_info("peername") or ("unknown",)
        self.peer = str(peer[0])

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

    async def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """Return the next line.

        Args:
            timeout_s: how long to wait; None: forever.

        Raises:
            LostError: the connection is gone, or no line came in time.
            RefusedError: what came is not a line of a lease.
        """
        try:
            line = await self._line(timeout_s)
        except TimeoutError as error:
            raise LostError(self._silence(timeout_s)) from error
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise RefusedError(_NOT_A_LEASE) from error
            raise LostError("its connection was closed") from error
        except asyncio.LimitOverrunError as error:
            raise RefusedError(_NOT_A_LEASE) from error
        except OSError as error:
            raise LostError(_reason(error)) from error
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RefusedError(_NOT_A_LEASE) from error
        if not isinstance(value, dict):
            raise RefusedError(_NOT_A_LEASE)
        return value

    async def _line(self, timeout_s: float | None) -> bytes:
        if timeout_s is None:
            return await self._reader.readuntil(b"\n")
        try:
            async with asyncio.timeout(timeout_s - _SECOND_LOOK_S):
                return await self._reader.readuntil(b"\n")
        except TimeoutError:
            # If this process itself did not run meanwhile, the line is there already.
            async with asyncio.timeout(_SECOND_LOOK_S):
                return await self._reader.readuntil(b"\n")

    async def ask(self, line: Mapping[str, object], timeout_s: float | None) -> dict[str, Any]:
        """Send a line and return the answer; as `send` and `receive`."""
        await self.send(line)
        return await self.receive(timeout_s)

    def close(self) -> None:
        """Close the connection at once; what was not sent yet is dropped."""
        self._writer.transport.abort()

    async def finish(self, timeout_s: float = 0.5) -> None:
        """Close the connection once everything is sent, or after some seconds."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                self._writer.close()
                await self._writer.wait_closed()
        self.close()

    def _silence(self, timeout_s: float | None) -> str:
        """Return why no line came: whether the other host still acknowledges what it receives."""
        waited = f"for {timeout_s:.1f} s"
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError as error:
            return _reason(error)
        unacknowledged = struct.unpack_from("=5I", info, 8)[4]
        if unacknowledged or info[2]:
            return f"its host cannot be reached {waited}: nothing that is sent arrives there"
        return f"its host is there, but its process has not answered {waited}: it is stopped"


_NOT_A_LEASE = (
    "what answers there is not a worker that waits for a chief: another program, or the worker of "
    "another run"
)


async def take(cluster: members.Cluster, index: int, token: str) -> tuple[Connection, Identity]:
    """Take the lease of a worker, as its chief's supervisor.

    Args:
        cluster: the run's processes.
        index: number of the worker.
        token: the run's secret.

    Raises:
        LostError: the worker is not there; try again later.
        RefusedError: it answers, but is in use; try again later.
        DeviceError: it can never be a worker of this run.
    """
    address = cluster.workers[index]
    connection = await _connect(address)
    try:
        hello = await connection.receive(LOST_AFTER_S)
        if hello.get("lease") != _VERSION or not isinstance(hello.get("nonce"), str):
            raise RefusedError(_NOT_A_LEASE)
        nonce = secrets.token_hex(16)
        proof = _proof(token, "chief", hello["nonce"], nonce)
        answer = await connection.ask({"nonce": nonce, "proof": proof}, LOST_AFTER_S)
        expected = _proof(token, "worker", hello["nonce"], nonce)
        if not _is_same(answer.get("proof"), expected):
            raise errors.DeviceError(
                f"worker {index} at {address} has another token. Start all processes of a run with "
                "the same one (--token_file, or LINGVO_GPIPE_TOKEN)"
            )
        worker = Identity(
            host=str(answer.get("host")),
            pid=int(answer.get("pid", 0)),
            index=int(answer.get("index", -1)),
            workers=tuple(map(str, answer.get("workers", ()))),
            versions={str(k): str(v) for k, v in dict(answer.get("versions", {})).items()},
        )
        _check_identity(worker, cluster, index)
    except BaseException:
        connection.close()
        raise
    return connection, worker


async def _connect(address: str) -> Connection:
    host, port = members.host_and_port(address)
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
    except TimeoutError as error:
        raise LostError("its host does not answer") from error
    except socket.gaierror as error:
        raise LostError(f"there is no host {host!r}") from error
    except OSError as error:
        raise LostError(_reason(error)) from error
    return Connection(reader, writer)


def _check_identity(worker: Identity, cluster: members.Cluster, index: int) -> None:
    address = cluster.workers[index]
    if worker.index != index:
        raise errors.DeviceError(
            f"the process at {address} is worker {worker.index}, but the chief's cluster has "
            f"worker {index} there ({worker.host}). Give both the same list, in one order"
        )
    if worker.workers != cluster.workers:
        raise errors.DeviceError(
            f"worker {index} ({worker.host}) was started with other workers: "
            f"{', '.join(worker.workers)}; the chief has {', '.join(cluster.workers)}. Give all "
            "processes the same cluster"
        )
    for package, version in versions().items():
        other = worker.versions.get(package, "unknown")
        if other != version:
            raise errors.DeviceError(
                f"worker {index} ({worker.host}) has {package} {other}, the chief has {version}. "
                "Install the same version on all hosts"
            )


async def grant(
    connection: Connection, worker: Identity, token: str, claim: Callable[[], bool]
) -> None:
    """Grant the lease of a worker to a chief's supervisor that connected; as its own supervisor.

    Args:
        connection: to the other end.
        worker: what it receives about this process.
        token: the run's secret.
        claim: called once the other end has proved that it knows the token; returns whether it can
            have the lease, which another may have got meanwhile.

    Raises:
        LostError: the other end is gone.
        RefusedError: it is not a chief's supervisor, has another token, or comes too late.
    """
    nonce = secrets.token_hex(16)
    answer = await connection.ask({"lease": _VERSION, "nonce": nonce}, _HANDSHAKE_S)
    other = str(answer.get("nonce", ""))
    if not _is_same(answer.get("proof"), _proof(token, "chief", nonce, other)):
        await connection.send({"proof": ""})
        raise RefusedError("it has another token")
    if not claim():
        raise RefusedError("another chief has just taken the lease")
    fields = dataclasses.asdict(worker) | {"workers": list(worker.workers)}
    await connection.send({"proof": _proof(token, "worker", nonce, other), **fields})


def _proof(token: str, job: str, worker_nonce: str, chief_nonce: str) -> str:
    message = f"{job}\n{worker_nonce}\n{chief_nonce}"
    return hmac.new(_bytes(token), _bytes(message), hashlib.sha256).hexdigest()


def _is_same(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(_bytes(proof), _bytes(expected))


def _bytes(text: str) -> bytes:
    """Return bytes of any text: a token may be no UTF-8, and what others send no text at all."""
    return text.encode(errors="surrogatepass")


def _reason(error: OSError) -> str:
    return f"its connection failed: {error.strerror or error}"
