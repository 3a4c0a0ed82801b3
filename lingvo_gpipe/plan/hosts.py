"""The hosts of a cluster: which devices lie on which, and what the links between them carry."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.plan.exchange import Exchange
from lingvo_gpipe.plan.links import INPUT, Link

_SHAPE = re.compile(r"(\d+)(?:x(\d+))?")
_SIZES = ("memory", "within", "between", "flops")
_MAX_DEVICES = 2**20
_MAX_ROWS = 16  # of hosts, and of links between hosts
_EXAMPLE = "--hosts=2x4,memory=16GiB,within=50GB,between=1.25GB"


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """The shape of a cluster.

    Attributes:
        count: number of hosts.
        devices: devices of each host; None: as many as the network needs, shared out evenly.
        memory: bytes of each device; None: not known.
        within: bytes per second between two devices of one host; None: not known.
        between: bytes per second from one host to others, and from them to it; None: not known.
        flops: FLOPs per second of each device; None: not known.
    """

    count: int
    devices: int | None = None
    memory: int | None = None
    within: int | None = None
    between: int | None = None
    flops: int | None = None

    def place(self, num_devices: int) -> tuple[int, ...]:
        """Return the host of each device of a network: neighbours on one host, host after host.

        This is the rule of `execution.placement`: devices in the order of (host, device).

        Raises:
            PlacementError: there are too few devices.
        """
        if self.devices is None:
            return tuple(k * self.count // num_devices for k in range(num_devices))
        there = self.count * self.devices
        if there < num_devices:
            raise errors.PlacementError(
                f"{num_devices} devices are needed, but --hosts has {self.count} x {self.devices}"
                f" = {there}. Lower num_partitions or num_replicas, or name more hosts"
            )
        return tuple(k // self.devices for k in range(num_devices))

    def bytes_per_s(self, source: int, target: int) -> int | None:
        """Return how fast the link from one host to another is; None: not known."""
        return self.within if source == target else self.between


def parse(text: str) -> Hosts:
    """Read the shape of a cluster.

    Args:
        text: hosts, or hosts x devices of each; then names and sizes, all between commas.

    Raises:
        ParamsError: it is not such a text.

    >>> parse("2x4,memory=16GiB,between=1.25GB").between
    1250000000
    """
    shape, *rest = (part.strip() for part in text.split(","))
    found = _SHAPE.fullmatch(shape)
    count, devices = (0, 0) if found is None else (int(found[1]), int(found[2] or 1))
    if not 1 <= count * devices <= _MAX_DEVICES:
        raise errors.ParamsError(
            f"--hosts={text[:60]}: {shape[:20]!r} is not a number of hosts, or hosts x devices. "
            f"Write {_EXAMPLE}"
        )
    sizes: dict[str, int] = {}
    for part in rest:
        name, _, size = part.partition("=")
        if name not in _SIZES or name in sizes:
            near = errors.nearest(name, _SIZES) or _SIZES
            raise errors.ParamsError(
                f"--hosts={text[:60]}: {part[:30]!r} is not one of {', '.join(_SIZES)}, once; "
                f"nearest {near[0]!r}. Write {_EXAMPLE}"
            )
        read = units.parse_count if name == "flops" else units.parse_size
        sizes[name] = read(size.removesuffix("/s"))
        if sizes[name] <= 0:
            raise errors.ParamsError(f"--hosts={text[:60]}: {name} is 0. Leave it out")
    return Hosts(count, devices if found and found[2] else None, **sizes)


def link_s(
    hosts: Hosts, analysis: network.Analysis, links: Sequence[Link]
) -> dict[tuple[int, int], float]:
    """Return (from, to) → seconds of one micro-batch's tensors over each link between cells."""
    host_of = hosts.place(analysis.table.num_devices)
    seconds = {}
    for link in links:
        if link.source == INPUT or link.source > link.target:
            continue
        ends = (host_of[analysis.cells[cell].device_number] for cell in (link.source, link.target))
        speed = hosts.bytes_per_s(*ends)
        if speed is not None:
            most = max(link.forward_bytes, link.backward_bytes)
            seconds[link.source, link.target] = most / len(analysis.sizes) / speed
    return seconds


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """How long what replicas send is on its way, for each device, in the slowest replica.

    Attributes:
        weights_s: [K] seconds, from the beginning of a step.
        gradients_s: [K] seconds, from the end of a device's last backward.
    """

    weights_s: tuple[float, ...]
    gradients_s: tuple[float, ...]


def exchange_times(hosts: Hosts, exchange: Exchange) -> ExchangeTimes:
    """Return how long the replicas' weights and gradients are on their way.

    All devices of a host share its connection to the others; links of unknown speed take no time.
    """
    num_devices = exchange.num_devices
    host_of = hosts.place(exchange.num_replicas * num_devices)
    found = []
    for is_weight in (True, False):
        # Bytes by device within its host, and by host from and to others.
        inside: collections.Counter[int] = collections.Counter()
        came: collections.Counter[int] = collections.Counter()
        went: collections.Counter[int] = collections.Counter()
        for sent in exchange.sent():
            if sent.is_weight != is_weight:
                continue
            source, target = host_of[sent.source], host_of[sent.target]
            if source == target:
                inside[sent.target] += sent.size
            else:
                went[source] += sent.size
                came[target] += sent.size
        seconds = [0.0] * num_devices
        for number, host in enumerate(host_of):
            within = inside[number] / hosts.within if hosts.within else 0.0
            between = max(came[host], went[host]) / hosts.between if hosts.between else 0.0
            device = number % num_devices
            seconds[device] = max(seconds[device], within, between)
        found.append(tuple(seconds))
    return ExchangeTimes(*found)


def lines(
    hosts: Hosts,
    analysis: network.Analysis,
    links: Sequence[Link],
    device_bytes: Sequence[int],
    exchange: Exchange,
) -> list[str]:
    """Return the text on hosts of a plan.

    Args:
        hosts: shape of the cluster.
        analysis: of the network of one replica.
        links: what goes from cell to cell.
        device_bytes: bytes that each device of a replica needs.
        exchange: what replicas send each other.
    """
    num_devices = len(device_bytes)
    host_of = hosts.place(exchange.num_replicas * num_devices)
    text = [*_hosts(hosts, host_of, device_bytes), ""]
    text += _links(hosts, host_of, analysis, links, exchange.num_replicas)
    carried: collections.Counter[tuple[int, int]] = collections.Counter()
    for link in links:
        if link.source == INPUT:
            continue
        ends = [analysis.cells[cell].device_number for cell in (link.source, link.target)]
        for first in range(0, len(host_of), num_devices):
            source, target = (host_of[first + device] for device in ends)
            carried[source, target] += link.forward_bytes
            carried[target, source] += link.backward_bytes
    for sent in exchange.sent():
        carried[host_of[sent.source], host_of[sent.target]] += sent.size
    between = {ends: size for ends, size in carried.items() if size and ends[0] != ends[1]}
    shown = sorted(sorted(between, key=lambda ends: -between[ends])[:_MAX_ROWS])
    for source, target in shown:
        size = between[source, target]
        time = "" if hosts.between is None else f", {size / hosts.between:.3g} s"
        text.append(f"host {source} sends host {target} {units.size(size)} a step{time}")
    if len(between) > len(shown):
        text.append(f"and {len(between) - len(shown)} more links between hosts, of less")
    return text


def _hosts(hosts: Hosts, host_of: Sequence[int], device_bytes: Sequence[int]) -> Iterator[str]:
    """Yield a line for each host, with its devices and their bytes."""
    used = sorted(set(host_of))
    for host in used[:_MAX_ROWS]:
        here = [number for number, other in enumerate(host_of) if other == host]
        span = f"device {here[0]}" if len(here) == 1 else f"devices {here[0]} to {here[-1]}"
        needed = [device_bytes[number % len(device_bytes)] for number in here]
        line = f"host {host}: {span}, {units.size(sum(needed))}"
        if hosts.memory is not None and max(needed) > hosts.memory:
            line += (
                f"; the heaviest needs {units.size(max(needed) - hosts.memory)} more than it has"
            )
        yield line
    if len(used) > _MAX_ROWS:
        yield f"and {len(used) - _MAX_ROWS} more hosts"
    if hosts.count > len(used):
        yield (
            f"{hosts.count - len(used)} of {hosts.count} hosts have no cell: raise num_partitions "
            "or num_replicas"
        )


def _links(
    hosts: Hosts,
    host_of: Sequence[int],
    analysis: network.Analysis,
    links: Sequence[Link],
    num_replicas: int,
) -> list[str]:
    """Return a table of the links between the cells of the first replica."""
    head = "link, per step" if num_replicas == 1 else "link of replica 0, per step"
    rows = [[head, "forward", "back", "over", "seconds"]]
    for link in links:
        if link.source == INPUT:
            continue
        source, target = (
            host_of[analysis.cells[cell].device_number] for cell in (link.source, link.target)
        )
        speed = hosts.bytes_per_s(source, target)
        size = link.forward_bytes + link.backward_bytes
        rows.append(
            [
                f"cell {link.source} → cell {link.target}",
                units.size(link.forward_bytes),
                units.size(link.backward_bytes),
                f"within host {source}" if source == target else f"hosts {source} → {target}",
                "" if speed is None else f"{size / speed:.3g}",
            ]
        )
    return units.table(rows, "lrrlr") if len(rows) > 1 else []
