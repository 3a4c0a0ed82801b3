"""Listening at the address of a member, by the member itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import lease, members

TIMEOUT_S = 5.0
"""How long to wait for a port: after its supervisor, a process needs a moment to end."""
_LOOPBACK = ("localhost", "127.", "::1")


async def listen(
    cluster: members.Cluster,
    member: members.Member,
    connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
    timeout_s: float,
) -> asyncio.Server:
    """Listen at the address of a member.

    Args:
        cluster: processes of the run.
        member: this process.
        connected: called for each connection.
        timeout_s: how long to wait for the port, if it is in use.

    Raises:
        DeviceError: the port cannot be used.
    """
    host, port = members.host_and_port(cluster.address(member))
    where = host if host.startswith(_LOOPBACK) else None
    began = time.monotonic()
    while True:
        try:
            return await asyncio.start_server(
                connected, where, port, limit=lease.MAX_LINE_BYTES, reuse_address=True
            )
        except OSError as error:
            if time.monotonic() - began < timeout_s:
                await asyncio.sleep(lease.PING_S)
                continue
            raise errors.DeviceError(in_use(member, port, error.strerror or str(error))) from error


async def check(cluster: members.Cluster, member: members.Member, timeout_s: float) -> None:
    """Check that a member's port can be used; parameters and errors as in `listen`."""
    server = await listen(cluster, member, lambda _, writer: writer.close(), timeout_s)
    server.close()
    await server.wait_closed()


def in_use(member: members.Member, port: int, reason: str) -> str:
    """Return the line for a port at which a member cannot listen."""
    who = "the chief" if member.job == members.CHIEF else str(member)
    return (
        f"{who} cannot listen at port {port}: {reason}. End the program that uses it, or name "
        "another port in the cluster"
    )
