"""In which order hosts' devices are given out: by hand, and against counting every transfer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network, pipelining
from lingvo_gpipe.network import host_order, traffic
from lingvo_gpipe.network.traffic import Sent
from lingvo_gpipe.plan import hosts, step_plan


def transfers(
    num_replicas: int, num_devices: int, between_cells: int, exchanged: int
) -> list[Sent]:
    """Return what neighbouring cells send there and back, and replicas of a cell each other."""
    found = []
    for replica, k in itertools.product(range(num_replicas), range(num_devices)):
        device = replica * num_devices + k
        if k + 1 < num_devices:
            found.append(Sent(device, device + 1, between_cells))
            found.append(Sent(device + 1, device, between_cells))
        others = set(range(num_replicas)) - {replica}
        found += [Sent(device, other * num_devices + k, exchanged) for other in others]
    return found


def most(devices: Sequence[int], sent: Sequence[Sent]) -> int:
    """Return the most bytes that a host sends or receives; one count for each host."""
    return max(
        max(
            sum(s.size for s in sent if devices[s.source] == host != devices[s.target]),
            sum(s.size for s in sent if devices[s.target] == host != devices[s.source]),
        )
        for host in devices
    )


def test_what_is_more_bytes_stays_within_a_host() -> None:
    where = (0, 0, 1, 1)
    much_exchanged = host_order.choose(where, 2, transfers(2, 2, 10, 11))
    assert much_exchanged.places == (0, 2, 1, 3)
    assert much_exchanged.hosts == (0, 1, 0, 1)
    # Two links of a step for each order, both ways: one host's two devices send 2 x 10 or 2 x 11.
    assert much_exchanged.busiest == host_order.BusiestHost(22, 20)
    much_between_cells = host_order.choose(where, 2, transfers(2, 2, 11, 10))
    assert much_between_cells.places == (0, 1, 2, 3)
    assert much_between_cells.hosts == where
    assert much_between_cells.busiest == host_order.BusiestHost(20, 22)


@pytest.mark.parametrize(
    ("where", "num_devices"),
    [
        ((0, 0, 0, 0), 2),  # one host
        ((3, 3, 3, 3), 2),  # one, whatever its number
        ((0, 0, 1, 1), 4),  # one replica
        ((0, 0, 1, 1), 1),  # one cell: the orders are the same
        ((0,), 1),
    ],
)
def test_where_there_is_no_choice_nothing_is_computed(
    where: tuple[int, ...], num_devices: int
) -> None:
    def refused() -> Any:
        pytest.fail("it was read")
        yield

    found = host_order.choose(where, num_devices, refused())
    assert found == host_order.HostOrder(tuple(range(len(where))), where)


@pytest.mark.parametrize(("num_replicas", "num_devices"), [(2, 2), (2, 3), (3, 2), (3, 3), (4, 2)])
def test_every_division_of_devices_over_hosts_takes_the_order_with_fewer_bytes(
    num_replicas: int, num_devices: int
) -> None:
    """Hosts of any unequal numbers of devices, and any bytes from device to device."""
    numbers = random.Random(num_replicas * 10 + num_devices)
    wanted = num_replicas * num_devices
    chosen = set()
    for last in itertools.product((False, True), repeat=wanted - 1):
        where = tuple(itertools.accumulate(last, initial=0))
        between_cells = numbers.choice([1, 20])
        sent = transfers(num_replicas, num_devices, between_cells, 3)
        source, target = numbers.sample(range(wanted), 2)
        sent.append(Sent(source, target, numbers.randrange(40)))
        found = host_order.choose(where, num_devices, sent)
        pairs = list(itertools.product(range(num_replicas), range(num_devices)))
        by_cell = [where[k * num_replicas + r] for r, k in pairs]
        figures = most(where, sent), most(by_cell, sent)
        assert found.hosts == (where if figures[0] <= figures[1] else tuple(by_cell))
        assert found.hosts == tuple(where[place] for place in found.places)
        assert sorted(found.places) == list(range(wanted))
        if last.count(True):
            assert found.busiest == host_order.BusiestHost(*figures)
            chosen.add(figures[1] < figures[0])
    assert chosen == {False, True}


def small(num_replicas: int, units: int) -> network.PipelineParams:
    """Return two cells, each with `units` x 4 weights twice, that send each other four features."""
    found: network.PipelineParams = pipelining.PipeliningLayer.Params(
        layers=[
            layers.Dense.Params(name="up0", units=units),
            layers.Dense.Params(name="down0", units=4),
            layers.Dense.Params(name="up1", units=units),
            layers.Dense.Params(name="down1", units=4),
            layers.MeanSquaredError.Params(reads=("x", "y")),
        ],
        cuts=(2, 3),
        num_partitions=2,
        num_micro_batches=2 * num_replicas,
        num_replicas=num_replicas,
    )
    return found


FIELDS = {"x": tf.TensorSpec([24, 4]), "y": tf.TensorSpec([24, 4])}


@pytest.mark.parametrize(("units", "by_cell"), [(2, False), (40, True)])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_run_places_as_its_plan_shows(num_replicas: int, units: int, by_cell: bool) -> None:
    params = small(num_replicas, units)
    for shape in ("2", "2,within=50GB,between=1GB", f"{2 * num_replicas}"):
        cluster = hosts.parse(shape)
        planned = step_plan.make(params, FIELDS, cluster=cluster)
        where = cluster.place(2 * num_replicas)
        assert host_order.of_network(network.analyze(params, FIELDS), where) == planned.order
        assert planned.order is not None
        expected = by_cell and shape != f"{2 * num_replicas}"
        assert (planned.order.places[1] != 1) == expected


def test_a_run_counts_what_its_own_cuts_send() -> None:
    for cuts in ((1, 4), (3, 2)):
        params = small(2, 40).set(cuts=cuts)
        planned = step_plan.make(params, FIELDS, cluster=hosts.parse("2"))
        built = network.analyze(params, FIELDS)
        assert host_order.of_network(built, (0, 0, 1, 1)) == planned.order
    uneven = step_plan.make(small(2, 40), FIELDS, cluster=hosts.parse("2")).order
    assert uneven is not None
    assert planned.order is not None
    assert planned.order.busiest != uneven.busiest


def test_all_that_devices_send_is_counted_for_every_replica() -> None:
    one = network.analyze(small(1, 40), {n: tf.TensorSpec([8, 4]) for n in FIELDS})
    between_cells = traffic.links(one)
    exchanged = traffic.exchange(one, one.owners(3), 3)
    sent = list(host_order.sent_by_all(one, between_cells, exchanged))
    assert sent[6:] == [*exchanged.weights, *exchanged.gradients]
    # Eight examples of four features, both ways, in three replicas of two devices.
    size = 8 * 4 * 4
    assert sent[:6] == [
        Sent(first + source, first + 1 - source, size) for first in (0, 2, 4) for source in (0, 1)
    ]


def test_a_tied_weight_comes_from_its_owner_in_every_replica() -> None:
    """The kernel of the first cell, tied in the second one, once for each device that reads it."""
    params = small(1, 40)
    params.layers[2].set(tie={"kernel": "up0/kernel"})
    analysis = network.analyze(params, {n: tf.TensorSpec([8, 4]) for n in FIELDS})
    between_cells = traffic.links(analysis)
    owners = dict.fromkeys(analysis.variables, 2)
    exchanged = traffic.exchange(analysis, owners, 3)
    sent = list(host_order.sent_by_all(analysis, between_cells, exchanged))
    values, kernel = 8 * 4 * 4, 4 * 40 * 4
    assert sent[:6] == [
        *(Sent(0, 1, values), Sent(1, 0, values + kernel)),
        *(Sent(2, 3, values), Sent(3, 2, values + kernel)),
        *(Sent(4, 5, values + kernel), Sent(5, 4, values + kernel)),
    ]
    assert {(4, 1), (4, 3)} <= {(one.source, one.target) for one in exchanged.weights}
