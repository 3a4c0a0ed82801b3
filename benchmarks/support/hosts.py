"""Hosts on this machine: network namespaces around a bridge, whose links can be cut silently."""

from __future__ import annotations

import os
import subprocess

_NOBODY = "02:00:00:00:00:fe"


class Hosts:
    """Hosts with addresses of their own; used as `with Hosts(3) as hosts`; needs root.

    The last two have one address, of which only one is connected at a time: the second replaces
    the first when its link is cut for good.

    Attributes:
        addresses: IP address of each host.
    """

    def __init__(self, count: int) -> None:
        self._name = f"faults{os.getpid()}"
        self._count = count
        self.addresses = [f"10.80.0.{10 + i}" for i in range(count)]
        self.addresses.append(self.addresses[-1])

    def __enter__(self) -> Hosts:
        bridge = self._bridge
        try:
            _ip("netns", "add", bridge)
            _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", bridge, "link", "set", "br0", "up")
            for i, address in enumerate(self.addresses):
                host, port = self._host(i), f"p{i}"
                mac = f"02:00:00:00:00:{min(i, self._count - 1):02x}"
                _ip("netns", "add", host)
                _ip("-n", host, "link", "set", "lo", "up")
                eth = ("link", "add", "eth0", "address", mac, "netns", host, "type", "veth")
                _ip(*eth, "peer", "name", port, "netns", bridge)
                _ip("-n", bridge, "link", "set", port, "master", "br0")
                _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", host, "link", "set", "eth0", "up")
                if i < self._count:
                    self.join(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*(self._host(i) for i in range(len(self.addresses))), self._bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def command(self, host: int) -> list[str]:
        """Return what begins a command that runs on a host, as the process that is started."""
        return ["ip", "netns", "exec", self._host(host)]

    def cut(self, host: int) -> None:
        """Drop everything that a host sends and receives, without a reset."""
        _ip("-n", self._bridge, "link", "set", f"p{host}", "down")

    def join(self, host: int) -> None:
        """Connect a host (again)."""
        _ip("-n", self._bridge, "link", "set", f"p{host}", "up")

    def part(self, one: int, other: int) -> None:
        """Drop everything that two hosts send each other, without a reset."""
        for host, peer in ((one, other), (other, one)):
            address = ("neigh", "replace", self.addresses[peer], "lladdr", _NOBODY)
            _ip("-n", self._host(host), *address, "dev", "eth0", "nud", "permanent")

    def rejoin(self, one: int, other: int) -> None:
        """Let two hosts reach each other again."""
        for host, peer in ((one, other), (other, one)):
            _ip("-n", self._host(host), "neigh", "del", self.addresses[peer], "dev", "eth0")

    def open_ports(self) -> list[str]:
        """Return the ports at which something still listens, as "HOST:PORT"."""
        found = []
        for i in range(len(self.addresses)):
            files = ("/proc/net/tcp", "/proc/net/tcp6")
            for line in _run([*self.command(i), "cat", *files]).splitlines():
                words = line.split()
                if len(words) > 3 and words[3] == "0A":
                    found.append(f"host {i}:{int(words[1].rpartition(':')[2], 16)}")
        return found

    def left(self) -> list[str]:
        """Return the namespaces of this object that there are."""
        return [name for name in _run(["ip", "netns", "list"]).split() if self._name in name]

    @property
    def _bridge(self) -> str:
        return f"{self._name}-bridge"

    def _host(self, i: int) -> str:
        return f"{self._name}-{i}"


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
