"""Leases: lost and late lines, proofs, versions, and two chiefs at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from lingvo_gpipe.cluster import lease, members
from tests.lingvo_gpipe.cluster import fakes
from tests.lingvo_gpipe.cluster.runs import LIMIT_S


async def pair() -> tuple[lease.Connection, lease.Connection]:
    """Return both ends of a connection."""
    accepted: asyncio.Future[lease.Connection] = asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(lease.Connection(reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one = lease.Connection(*await asyncio.open_connection("127.0.0.1", port))
    other = await accepted
    server.close()
    return one, other


def test_a_line_that_came_while_this_process_did_not_run_is_read() -> None:
    async def run() -> dict[str, object]:
        one, other = await pair()
        waiting = asyncio.ensure_future(one.receive(0.5))
        await asyncio.sleep(0.05)
        await other.send({"state": "running"})
        time.sleep(1.0)  # neither end runs, as on an overloaded machine
        try:
            return await waiting
        finally:
            await one.close()
            await other.close()

    assert asyncio.run(run()) == {"state": "running"}


def test_silence_is_noticed_in_time() -> None:
    async def run() -> float:
        one, other = await pair()
        began = time.monotonic()
        with pytest.raises(
            lease.LostError, match=r"no answer for 0\.5 s: it is stopped, or its host"
        ):
            await one.receive(0.5)
        await one.close()
        await other.close()
        return time.monotonic() - began

    assert 0.45 < asyncio.run(run()) < 1.0


def test_of_two_chiefs_at_once_the_second_waits() -> None:
    async def both() -> list[str]:
        waits = asyncio.Event()
        taken: list[lease.Connection] = []

        def claim() -> bool:
            taken.append(connections[len(taken)])
            return len(taken) == 1

        connections: list[lease.Connection] = []
        ends: list[str] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = lease.Connection(reader, writer)
            connections.append(connection)
            if len(connections) == 2:
                waits.set()
            await waits.wait()
            try:
                await lease.grant(connection, cluster, 0, fakes.TOKEN, claim)
                ends.append("granted")
            except lease.LostError as error:
                ends.append(str(error))
                await connection.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cluster = members.Cluster("127.0.0.1:1", (f"127.0.0.1:{port}",))
        found = await asyncio.gather(
            *(lease.take(cluster, fakes.TOKEN, 0) for _ in range(2)), return_exceptions=True
        )
        kinds = sorted(type(each).__name__ for each in found)
        for connection in (*connections, *found):
            if isinstance(connection, lease.Connection):
                await connection.close()
        server.close()
        return [*sorted(ends), *kinds]

    ends = asyncio.run(asyncio.wait_for(both(), LIMIT_S))
    assert ends == ["another chief has just taken the lease", "granted", "Connection", "LostError"]
