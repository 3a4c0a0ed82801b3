"""Which devices of several hosts a network gets, and in which order its cells get them.

Hosts get equal shares (`share_out`). Their devices, in the order of (host, device), are given to
the cells in one of two orders: replica by replica, so that neighbouring cells share a host, and
what replicas exchange goes between hosts; or cell by cell, so that the replicas of a cell share a
host, and what cells send each other goes between hosts. The rule takes the order in which the
busiest host sends or receives fewer bytes in a step; replica by replica where both are equal.
Bytes within a host do not count: those links are the fast ones. A run knows no speeds, and the
rule needs none, so a plan and its run choose alike.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gpipe.network.analysis import Analysis
from lingvo_gpipe.network.traffic import INPUT, Exchange, Link, Sent, exchange, links


@dataclasses.dataclass(frozen=True, slots=True)
class BusiestHost:
    """Bytes that the busiest host sends or receives in a step, over links between hosts.

    Attributes:
        replica_by_replica: where neighbouring cells of a replica share a host.
        cell_by_cell: where the replicas of a cell do.
    """

    replica_by_replica: int
    cell_by_cell: int

    @property
    def chooses_cell_by_cell(self) -> bool:
        """Whether fewer bytes go between hosts where replicas of a cell share one."""
        return self.cell_by_cell < self.replica_by_replica


@dataclasses.dataclass(frozen=True, slots=True)
class HostOrder:
    """Where each device of a network lies; devices are numbered replica after replica, K for each.

    Attributes:
        places: for each device, its place among the devices of all hosts.
        hosts: for each device, its host.
        busiest: what the order was chosen by; None: there was no choice.
    """

    places: tuple[int, ...]
    hosts: tuple[int, ...]
    busiest: BusiestHost | None = None


def share_out(num_devices: int, available: Sequence[int]) -> tuple[int, ...]:
    """Return the host of each device that a network gets, neighbours on one host.

    All hosts get equal shares, but none more than it has.

    Args:
        num_devices: how many are needed, at most as many as are available.
        available: number of each host's devices.

    >>> share_out(3, [4, 4]), share_out(4, [1, 3])
    ((0, 0, 1), (0, 1, 1, 1))
    """
    counts: dict[int, int] = {}  # of hosts of which all devices are needed
    while True:
        others = [host for host in range(len(available)) if host not in counts]
        rest = num_devices - sum(counts.values())
        shares = collections.Counter(others[k * len(others) // rest] for k in range(rest))
        full = {host: available[host] for host in others if shares[host] > available[host]}
        if not full:
            shares.update(counts)
            return tuple(host for host in range(len(available)) for _ in range(shares[host]))
        counts.update(full)


def first_with_enough(num_devices: int, available: Sequence[int]) -> Sequence[int]:
    """Return the first of the hosts: as many as are needed. Accelerators are shared out so.

    The others would only be reached by slower links.

    >>> first_with_enough(6, [4, 4, 4])
    [4, 4]
    """
    sums = itertools.accumulate(available)
    return available[: next(n for n, devices in enumerate(sums, 1) if devices >= num_devices)]


def replica_by_replica(hosts: Sequence[int]) -> HostOrder:
    """Return the order of one host, of one replica, and of devices that the user names.

    Args:
        hosts: for each place, its host.
    """
    return HostOrder(tuple(range(len(hosts))), tuple(hosts))


def choose(hosts: Sequence[int], num_devices: int, sent: Iterable[Sent]) -> HostOrder:
    """Choose between the two orders.

    Args:
        hosts: for each place, its host.
        num_devices: K.
        sent: all that devices send each other in a step; not read where there is no choice.

    >>> one, other = Sent(0, 2, 5), Sent(0, 1, 4)  # between two replicas, between two cells
    >>> choose([0, 0, 1, 1], 2, [one, other]).hosts, choose([0, 0, 1, 1], 2, [other]).hosts
    ((0, 1, 0, 1), (0, 0, 1, 1))
    """
    plain = replica_by_replica(hosts)
    if not _has_choice(hosts, num_devices):
        return plain
    by_cell, sent = _cell_by_cell(hosts, num_devices), list(sent)
    busiest = BusiestHost(_busiest(plain.hosts, sent), _busiest(by_cell.hosts, sent))
    chosen = by_cell if busiest.chooses_cell_by_cell else plain
    return dataclasses.replace(chosen, busiest=busiest)


def of_network(analysis: Analysis, hosts: Sequence[int]) -> HostOrder:
    """Choose the order of a network's devices.

    Args:
        analysis: of the network, with all replicas.
        hosts: for each place, its host.
    """
    num_replicas, num_devices = analysis.params.num_replicas, analysis.table.num_devices
    if not _has_choice(hosts, num_devices):
        return replica_by_replica(hosts)
    exchanged = exchange(analysis, analysis.owners(num_replicas), num_replicas)
    return choose(hosts, num_devices, sent_by_all(analysis, links(analysis), exchanged))


def sent_by_all(
    analysis: Analysis, between_cells: Iterable[Link], exchanged: Exchange
) -> Iterator[Sent]:
    """Yield what devices send each other in a step, the fields of the mini-batch not counted.

    Args:
        analysis: of the network, or of one of its replicas.
        between_cells: what goes from cell to cell in one replica.
        exchanged: what replicas send each other.
    """
    num_devices = exchanged.num_devices
    for link in between_cells:
        if link.source == INPUT:
            continue
        source, target = (analysis.cells[k].device_number for k in (link.source, link.target))
        for replica in range(exchanged.num_replicas):
            first = replica * num_devices
            # The owner of a tied weight sends it to the devices of other replicas itself.
            others = (path for path in link.tied if exchanged.owners[path] != replica)
            from_owners = sum(analysis.variables[path].read_bytes for path in others)
            yield Sent(first + source, first + target, link.forward_bytes - from_owners)
            yield Sent(first + target, first + source, link.backward_bytes)
    yield from exchanged.weights
    yield from exchanged.gradients


def _has_choice(hosts: Sequence[int], num_devices: int) -> bool:
    return 1 < num_devices < len(hosts) and len(set(hosts)) > 1


def _cell_by_cell(hosts: Sequence[int], num_devices: int) -> HostOrder:
    num_replicas = len(hosts) // num_devices
    places = tuple(
        k * num_replicas + replica
        for replica, k in itertools.product(range(num_replicas), range(num_devices))
    )
    return HostOrder(places, tuple(hosts[place] for place in places))


def _busiest(hosts: Sequence[int], sent: Iterable[Sent]) -> int:
    """Return the bytes that the busiest host sends to others, or receives from them."""
    sizes: collections.Counter[tuple[int, str]] = collections.Counter()
    for transfer in sent:
        source, target = hosts[transfer.source], hosts[transfer.target]
        if source != target:
            sizes[source, "out"] += transfer.size
            sizes[target, "in"] += transfer.size
    return max(sizes.values(), default=0)
