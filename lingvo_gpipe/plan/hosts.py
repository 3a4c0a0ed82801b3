"""The hosts of a cluster: which devices lie on which, and what the links between them carry."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.network import host_order
from lingvo_gpipe.network.host_order import HostOrder
from lingvo_gpipe.network.traffic import INPUT, Exchange, Link

_SHAPE = re.compile(r"(\d+)(?:x(\d+))?")
_SIZES = ("memory", "within", "between", "flops")
_MAX_DEVICES = 2**20
_MAX_ROWS = 16  # of hosts, of links between hosts, and of devices of a host
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
        """Return the host of each device, in the order of (host, device), as a run does.

        Which device a cell has, `network.host_order` chooses.

        Raises:
            DeviceError: there are too few devices.
        """
        if self.devices is None:
            return host_order.share_out(num_devices, [num_devices] * self.count)
        available = self.count * self.devices
        if available < num_devices:
            raise errors.DeviceError(
                f"{num_devices} devices are needed, but --hosts has {self.count} x {self.devices}"
                f" = {available}. Lower num_partitions or num_replicas, or name more hosts"
            )
        used = host_order.first_with_enough(num_devices, [self.devices] * self.count)
        return host_order.share_out(num_devices, used)

    @property
    def states_speeds(self) -> bool:
        """Whether some links have a speed."""
        return self.within is not None or self.between is not None

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
    match = _SHAPE.fullmatch(shape)
    count, devices = (0, 0) if match is None else (int(match[1]), int(match[2] or 1))
    if not 1 <= count * devices <= _MAX_DEVICES:
        raise errors.ParamsError(
            f"--hosts={text[:60]}: {shape[:20]!r} is not a number of hosts, or hosts x devices. "
            f"Write {_EXAMPLE}"
        )
    sizes: dict[str, int] = {}
    for part in rest:
        name, _, size = part.partition("=")
        if name not in _SIZES or name in sizes:
            raise errors.ParamsError(
                f"--hosts={text[:60]}: {part[:30]!r} is not one of {', '.join(_SIZES)}, once; "
                f"{errors.suggestion(name, _SIZES)}. Write {_EXAMPLE}"
            )
        read = units.parse_count if name == "flops" else units.parse_size
        sizes[name] = read(size.removesuffix("/s"))
        if sizes[name] <= 0:
            raise errors.ParamsError(f"--hosts={text[:60]}: {name} is 0. Leave it out")
    return Hosts(count, devices if match and match[2] else None, **sizes)


def link_s(
    hosts: Hosts, order: HostOrder, analysis: network.Analysis, links: Sequence[Link]
) -> dict[tuple[int, int], float]:
    """Return (from, to) → seconds of one micro-batch's tensors over each link between cells.

    In the slowest replica. Replicas whose link leaves a host, or reaches it, share its connection.
    """
    seconds = {}
    for link in links:
        if link.source == INPUT or link.source > link.target:
            continue
        most = max(link.forward_bytes, link.backward_bytes) / len(analysis.sizes)
        pairs = collections.Counter(_host_pairs(order, analysis, link.source, link.target))
        leaving: collections.Counter[int] = collections.Counter()
        reaching: collections.Counter[int] = collections.Counter()
        for (source, target), count in pairs.items():
            if source != target:
                leaving[source] += count
                reaching[target] += count
        sharing = max([0, *leaving.values(), *reaching.values()])
        times = []
        if hosts.within is not None and any(source == target for source, target in pairs):
            times.append(most / hosts.within)
        if hosts.between is not None and sharing:
            times.append(most * sharing / hosts.between)
        if times:
            seconds[link.source, link.target] = max(times)
    return seconds


def _host_pairs(
    order: HostOrder, analysis: network.Analysis, source: int, target: int
) -> Iterator[tuple[int, int]]:
    """Yield the hosts of two cells, for each replica."""
    num_devices = analysis.table.num_devices
    first, second = (analysis.cells[cell].device_number for cell in (source, target))
    for start in range(0, len(order.hosts), num_devices):
        yield order.hosts[start + first], order.hosts[start + second]


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """How long what replicas send is on its way, for each device, in the slowest replica.

    Attributes:
        weights_s: [K] seconds, from the beginning of a step.
        gradients_s: [K] seconds, from the end of a device's last backward.
    """

    weights_s: tuple[float, ...]
    gradients_s: tuple[float, ...]


def exchange_times(hosts: Hosts, order: HostOrder, exchange: Exchange) -> ExchangeTimes:
    """Return how long the replicas' weights and gradients are on their way.

    Each device has a link within its host, and all devices of a host share its connection to the
    others. A link carries both ways at once; those of unknown speed take no time.
    """
    seconds_of_kinds = []
    for kind in (exchange.weights, exchange.gradients):
        # Bytes that go out and come in: of a device within its host, and of a host to others.
        device_out, device_in, host_out, host_in = (collections.Counter[int]() for _ in range(4))
        for sent in kind:
            source, target = order.hosts[sent.source], order.hosts[sent.target]
            if source == target:
                device_out[sent.source] += sent.size
                device_in[sent.target] += sent.size
            else:
                host_out[source] += sent.size
                host_in[target] += sent.size
        seconds = [0.0] * exchange.num_devices
        for number, host in enumerate(order.hosts):
            inside, outside = (
                max(device_in[number], device_out[number]),
                max(host_in[host], host_out[host]),
            )
            within = inside / hosts.within if hosts.within else 0.0
            between = outside / hosts.between if hosts.between else 0.0
            device = number % exchange.num_devices
            seconds[device] = max(seconds[device], within, between)
        seconds_of_kinds.append(tuple(seconds))
    return ExchangeTimes(*seconds_of_kinds)


def link_texts(hosts: Hosts, order: HostOrder, analysis: network.Analysis, link: Link) -> list[str]:
    """Return over what a link of the first replica goes, and its seconds in a step."""
    if link.source == INPUT:
        return ["", ""]
    source, target = next(_host_pairs(order, analysis, link.source, link.target))
    speed = hosts.bytes_per_s(source, target)
    size = link.forward_bytes + link.backward_bytes
    over = f"within host {source}" if source == target else f"hosts {source} → {target}"
    return [over, "" if speed is None else f"{size / speed:.3g}"]


def lines(
    hosts: Hosts,
    order: HostOrder,
    analysis: network.Analysis,
    links: Sequence[Link],
    device_bytes: Sequence[int],
    exchange: Exchange,
    *,
    reads_on_worker: bool = False,
) -> list[str]:
    """Return the text on hosts of a plan.

    Args:
        hosts: shape of the cluster.
        order: where each device lies.
        analysis: of the network of one replica.
        links: what goes from cell to cell.
        device_bytes: bytes that each device of all replicas needs.
        exchange: what replicas send each other.
        reads_on_worker: whether workers read the mini-batches, not the chief.
    """
    host_of = order.hosts
    text = [*_rule(hosts, order, analysis), *_hosts(hosts, host_of, device_bytes)]
    if hosts.devices is None:
        text.append(f"for GPUs, add how many each host has: --hosts={hosts.count}x8")
    if hosts.count == 1:
        return text
    carried: collections.Counter[tuple[str, str]] = collections.Counter()
    for sent in host_order.sent_by_all(analysis, links, exchange):
        source, target = host_of[sent.source], host_of[sent.target]
        if source != target:
            carried[f"host {source}", f"host {target}"] += sent.size
    for link in links:
        if link.source == INPUT and not reads_on_worker:
            device = analysis.cells[link.target].device_number
            for host in host_of[device :: analysis.table.num_devices]:  # of each replica
                carried["chief", f"host {host}"] += link.forward_bytes
    for (sender, receiver), size in carried.most_common(_MAX_ROWS):
        time = "" if hosts.between is None else f", {size / hosts.between:.3g} s"
        text.append(f"{sender} sends {receiver} {units.size(size)} a step{time}")
    if len(carried) > _MAX_ROWS:
        text.append(f"and {len(carried) - _MAX_ROWS} more links between hosts, of less")
    return text


def _rule(hosts: Hosts, order: HostOrder, analysis: network.Analysis) -> Iterator[str]:
    """Yield the line that says in which order devices are given out, and why."""
    if order.busiest is None:
        if analysis.params.devices is not None:
            yield "placed in the order of model.devices"
        elif hosts.count > 1:
            yield "placed in the order of hosts and their devices: neighbouring cells share a host"
        return
    orders = [
        ("replica by replica", order.busiest.replica_by_replica),
        ("cell by cell", order.busiest.cell_by_cell),
    ]
    if order.busiest.chooses_cell_by_cell:
        orders.reverse()
    (chosen, least), (other, most) = orders
    yield (
        f"placed {chosen}: the busiest host's links carry {units.size(least)} a step; "
        f"{other} {units.size(most)}"
    )


def _hosts(hosts: Hosts, host_of: Sequence[int], device_bytes: Sequence[int]) -> Iterator[str]:
    """Yield a line for each host, with its devices and their bytes."""
    used = sorted(set(host_of))
    for host in used[:_MAX_ROWS]:
        here = [number for number, other in enumerate(host_of) if other == host]
        needed = [device_bytes[number] for number in here]
        devices = ", ".join(map(str, here[:_MAX_ROWS])) + ", …" * (len(here) > _MAX_ROWS)
        line = f"host {host}: {'device' if len(here) == 1 else 'devices'} {devices}, "
        line += units.size(sum(needed))
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
