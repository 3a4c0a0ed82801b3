"""Connections of lines: what is lost, and what only came late."""

from __future__ import annotations

import asyncio
import time

import pytest

from lingvo_gpipe.cluster import lease


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
            one.close()
            other.close()

    assert asyncio.run(run()) == {"state": "running"}


def test_silence_is_noticed_in_time() -> None:
    async def run() -> float:
        one, other = await pair()
        began = time.monotonic()
        with pytest.raises(lease.LostError, match=r"has not answered for 0\.5 s: it is stopped"):
            await one.receive(0.5)
        one.close()
        other.close()
        return time.monotonic() - began

    assert 0.45 < asyncio.run(run()) < 1.0
