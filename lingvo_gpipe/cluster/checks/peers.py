"""Which other workers' hosts a worker's host cannot reach.

Tensors go from worker to worker, where no lease is. So the supervisor of each worker connects to
the ports of the others again and again, and reports hosts at which no connection arrives. A port at
which nothing listens refuses the connection, which shows that its host is there.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from lingvo_gpipe.cluster import members

_PERIOD_S = 0.25
# From this many workers on, a supervisor tries this many in a period, so that it has time left.
_TRIED_AT_ONCE = 25
_TRIES = 3
_TRY_S = 0.4
# What another host answers; other errors are this host's, which has no route to it.
_ANSWERED = (errno.ECONNREFUSED, errno.ECONNRESET)


class Peers:
    """The workers on other hosts than one of them."""

    def __init__(self, cluster: members.Cluster, index: int) -> None:
        """Try none yet.

        Args:
            cluster: processes of the run.
            index: number of the worker whose supervisor this process is.
        """
        places = [members.host_and_port(address) for address in cluster.workers]
        self._places = {
            number: place for number, place in enumerate(places) if place[0] != places[index][0]
        }
        self._found: dict[int, str | None] = {}

    @property
    def unreachable(self) -> dict[int, str] | None:
        """Number of a worker → why it is not reached; None: not all were tried yet."""
        if len(self._found) < len(self._places):
            return None
        return {number: reason for number, reason in self._found.items() if reason is not None}

    async def watch(self) -> None:
        """Try all of them again and again; never returns."""
        period_s = _PERIOD_S * max(1.0, len(self._places) / _TRIED_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for number, place in self._places.items():
                group.create_task(self._watch(number, *place, period_s))

    async def _watch(self, number: int, host: str, port: int, period_s: float) -> None:
        address: tuple[socket.AddressFamily, tuple[object, ...]] | None = None
        while True:
            try:
                if address is None:  # asked once: a name server may be slow
                    address = await _resolved(host, port)
                self._found[number] = await _fault(*address)
            except socket.gaierror:
                self._found[number] = f"there is no host {host!r}"
            await asyncio.sleep(period_s)


async def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


async def _fault(family: socket.AddressFamily, address: tuple[object, ...]) -> str | None:
    """Return why no connection arrives at an address; None: one does.

    Each try sends a packet of its own: on a busy network, one may be lost.
    """
    reason = "no answer"
    loop = asyncio.get_running_loop()
    for _ in range(_TRIES):
        began = loop.time()
        with socket.socket(family, socket.SOCK_STREAM) as each:
            each.setblocking(False)
            try:
                async with asyncio.timeout(_TRY_S):
                    await loop.sock_connect(each, address)
                return None
            except TimeoutError:
                reason = "no answer"
            except OSError as error:
                if error.errno in _ANSWERED:
                    return None
                reason = (error.strerror or str(error)).lower()
        await asyncio.sleep(_TRY_S - (loop.time() - began))
    return reason
