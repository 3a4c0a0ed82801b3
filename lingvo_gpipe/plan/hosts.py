"""The hosts of a cluster: which devices lie on which, and what the links between them carry."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.plan.links import INPUT, Link

_SHAPE = re.compile(r"(\d+)(?:x(\d+))?")
_SIZES = ("memory", "within", "between")
_MAX_DEVICES = 2**20
_EXAMPLE = "--hosts=2x4,memory=16GiB,within=50GB,between=1.25GB"


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """The shape of a cluster.

    Attributes:
        count: number of hosts.
        devices: devices of each host; None: as many as the network needs, shared out evenly.
        memory: bytes of each device; None: not known.
        within: bytes per second between two devices of one host; None: not known.
        between: bytes per second between two hosts, in each direction; None: not known.
    """

    count: int
    devices: int | None = None
    memory: int | None = None
    within: int | None = None
    between: int | None = None

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
                f"{num_devices} partitions need {num_devices} devices, but {self.count} hosts of "
                f"{self.devices} have {there}. Lower num_partitions, or name more hosts in --hosts"
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
        sizes[name] = units.parse_size(size.removesuffix("/s"))
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


def lines(
    hosts: Hosts, analysis: network.Analysis, links: Sequence[Link], device_bytes: Sequence[int]
) -> list[str]:
    """Return the text on hosts of a plan.

    Args:
        hosts: shape of the cluster.
        analysis: of the network.
        links: what goes from cell to cell.
        device_bytes: bytes that each device needs.
    """
    host_of = hosts.place(analysis.table.num_devices)
    text = []
    for host in sorted(set(host_of)):
        here = [number for number, other in enumerate(host_of) if other == host]
        span = f"device {here[0]}" if len(here) == 1 else f"devices {here[0]} to {here[-1]}"
        needed = [device_bytes[number] for number in here]
        line = f"host {host}: {span}, {units.size(sum(needed))}"
        if hosts.memory is not None and max(needed) > hosts.memory:
            line += (
                f"; the heaviest needs {units.size(max(needed) - hosts.memory)} more than it has"
            )
        text.append(line)
    unused = hosts.count - len(set(host_of))
    if unused:
        text.append(f"{unused} of {hosts.count} hosts have no cell: raise num_partitions")
    rows = [["link, per step", "forward", "back", "over", "seconds"]]
    carried: dict[tuple[int, int], int] = {}
    for link in links:
        if link.source == INPUT:
            continue
        source, target = (
            host_of[analysis.cells[cell].device_number] for cell in (link.source, link.target)
        )
        if source != target:
            carried[source, target] = carried.get((source, target), 0) + link.forward_bytes
            carried[target, source] = carried.get((target, source), 0) + link.backward_bytes
        speed = hosts.bytes_per_s(source, target)
        time_s = (
            "" if speed is None else f"{(link.forward_bytes + link.backward_bytes) / speed:.3g}"
        )
        rows.append(
            [
                f"cell {link.source} → cell {link.target}",
                units.size(link.forward_bytes),
                units.size(link.backward_bytes),
                f"within host {source}" if source == target else f"hosts {source} → {target}",
                time_s,
            ]
        )
    text += ["", *units.table(rows, "lrrlr")] if len(rows) > 1 else []
    for (source, target), size in sorted(carried.items()):
        time = "" if hosts.between is None else f", {size / hosts.between:.3g} s"
        text.append(f"host {source} sends host {target} {units.size(size)} a step{time}")
    return text
