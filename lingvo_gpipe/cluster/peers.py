"""Which other workers' hosts a worker's host cannot reach.

Tensors go from worker to worker, where no lease is. So the supervisor of each worker connects to
the ports of the workers on other hosts again and again. A port at which nothing listens refuses the
connection, which shows that its host is there.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from lingvo_gpipe.cluster import lease, members

_TRY_S = 1.25
"""Long enough for two packets: the system sends the second after a second."""
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
        self._faults: dict[int, str | None] = {}

    @property
    def unreachable(self) -> dict[int, str] | None:
        """Number of a worker → why it is not reached; None: not all were tried yet."""
        if len(self._faults) < len(self._places):
            return None
        return {number: fault for number, fault in self._faults.items() if fault is not None}

    async def watch(self) -> None:
        """Try all of them again and again; never returns."""
        async with asyncio.TaskGroup() as group:
            for number, place in self._places.items():
                group.create_task(self._watch(number, *place))

    async def _watch(self, number: int, host: str, port: int) -> None:
        while True:
            self._faults[number] = await _fault(host, port)
            await asyncio.sleep(lease.PING_S)


async def _fault(host: str, port: int) -> str | None:
    """Return why no connection arrives at a port; None: one does."""
    try:
        async with asyncio.timeout(_TRY_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no answer"
    except (socket.gaierror, UnicodeError):
        return f"there is no host {host!r}"
    except OSError as error:
        return None if error.errno in _ANSWERED else (error.strerror or str(error)).lower()
    writer.transport.abort()
    return None
