"""The shape of a cluster: the host of each device, and what the links between hosts carry."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.network import host_order
from lingvo_gpipe.plan import hosts, report, step_plan
from tests import tiny_task


def test_a_shape_is_read() -> None:
    text = " 2x4, memory=16GiB, within=50GB/s, between=1.25GB"
    assert hosts.parse(text) == hosts.Hosts(2, 4, 2**34, 50 * 10**9, 1_250_000_000)
    assert hosts.parse("3") == hosts.Hosts(3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'' is not a number of hosts"),
        ("0x4", "'0x4' is not a number of hosts"),
        ("2x", "'2x' is not a number of hosts"),
        ("two", "'two' is not a number of hosts"),
        ("99999999", "is not a number of hosts"),
        ("2,betwen=1GB", "'betwen=1GB' is not one of .* nearest 'between'"),
        ("2,within=1GB,within=2GB", "once"),
        ("2,memory", "'' is not a size"),
        ("2,between=10Gb", "'10Gb' are bits"),
        ("2,memory=0", "memory is 0"),
    ],
)
def test_a_wrong_shape_is_refused_by_one_line(text: str, expected: str) -> None:
    with pytest.raises(errors.ParamsError, match=expected) as caught:
        hosts.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "num_devices", "placed"),
    [
        ("2", 4, (0, 0, 1, 1)),
        ("2", 3, (0, 0, 1)),
        ("4", 2, (0, 2)),
        ("2x4", 6, (0, 0, 0, 1, 1, 1)),
        ("3x4", 6, (0, 0, 0, 1, 1, 1)),
        ("512x8", 8, (0,) * 8),
        ("2x1", 2, (0, 1)),
    ],
)
def test_neighbours_lie_on_one_host(shape: str, num_devices: int, placed: tuple[int, ...]) -> None:
    assert hosts.parse(shape).place(num_devices) == placed


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(errors.DeviceError, match=r"3 devices are needed, but --hosts has 2 x"):
        hosts.parse("2x1").place(3)


def test_a_plan_shows_bytes_and_seconds_of_links_between_hosts() -> None:
    task = tiny_task.tiny_task()
    plain = step_plan.make_for(task)
    (link,) = [link for link in plain.links if link.source == 0]
    text = report.plan(task, cluster="2,memory=1B,between=1kB")
    seconds = f"{(link.forward_bytes + link.backward_bytes) / 1000:.3g}"
    (row,) = [line for line in text.splitlines() if "hosts 0 → 1" in line]
    assert row.split()[-2:] == [seconds, "x"]
    assert f"host 0 sends host 1 {link.forward_bytes} B a step" in text
    assert f"host 1 sends host 0 {link.backward_bytes} B a step" in text
    assert text.count("more than it has") == 2
    assert "within host 0" in report.plan(task, cluster="1x2")
    unknown, known = (report.plan(task, cluster=shape) for shape in ("3", "3x1"))
    assert "1 of 3 hosts have no cell" in unknown
    assert "for GPUs, add how many each host has: --hosts=3x8" in unknown.splitlines()
    assert "for GPUs" not in known


def test_links_take_their_time_in_a_measured_plan() -> None:
    task = tiny_task.tiny_task()
    slow = hosts.Hosts(2, between=100)
    free = step_plan.make_for(task, profile=True)
    seconds = hosts.link_s(slow, host_order.replica_by_replica((0, 1)), free.analysis, free.links)
    (link,) = [link for link in free.links if link.source == 0]
    most = max(link.forward_bytes, link.backward_bytes)
    assert seconds == {(0, 1): most / 2 / 100}
    planned = step_plan.make_for(task, profile=True, cluster=slow)
    # There and back for one micro-batch at least.
    assert planned.timeline.makespan_s > 2 * seconds[0, 1]
    assert "at the speeds of --hosts" in report.render(planned)
    fast = dataclasses.replace(slow, between=None)
    assert "links take no time" in report.render(dataclasses.replace(planned, cluster=fast))


def test_a_plan_says_in_which_order_devices_are_given_out_and_why() -> None:
    task = tiny_task.tiny_task()
    task.model.set(num_replicas=2, num_micro_batches=4)

    def text_of(shape: str) -> str:
        return report.render(step_plan.make_for(task, cluster=hosts.parse(shape)))

    assert "placed" not in text_of("1x4,within=1kB")
    planned = step_plan.make_for(task, cluster=hosts.parse("2"))
    assert planned.order is not None
    busiest = planned.order.busiest
    assert busiest is not None
    by_replica, by_cell = busiest.replica_by_replica, busiest.cell_by_cell
    assert by_cell < by_replica
    text = text_of("2")
    line = (
        f"placed cell by cell: the busiest host's links carry {by_cell} B a step; "
        f"replica by replica {by_replica} B"
    )
    assert line in text.splitlines()
    assert "host 1: devices 1, 3, " in text
    # What goes between hosts, both ways, is what the rule has counted.
    (there,) = [row for row in text.splitlines() if row.startswith("host 0 sends host 1")]
    (back,) = [row for row in text.splitlines() if row.startswith("host 1 sends host 0")]
    assert by_cell == max(int(row.split()[5]) for row in (there, back))
    # Each device on a host of its own: all is sent in either order.
    line = "placed replica by replica: the busiest host's links carry"
    assert line in text_of("4")
    task.model.devices = ("a", "b", "c", "d")
    assert "placed in the order of model.devices" in text_of("2").splitlines()
    task.model.set(devices=None, num_replicas=1)
    line = "placed in the order of hosts and their devices: neighbouring cells share a host"
    assert line in text_of("2").splitlines()
    assert "placed" not in text_of("1x4")


def test_a_plan_says_what_the_chief_sends_to_each_host() -> None:
    """Eight examples of four floats and a label, which the first and the last cell read."""
    task = tiny_task.tiny_task()
    text = report.plan(task, cluster="2,between=1kB").splitlines()
    assert [line for line in text if line.startswith("chief")] == [
        "chief sends host 0 128 B a step, 0.128 s",
        "chief sends host 1 32 B a step, 0.032 s",
    ]
    task.model.set(num_replicas=2, num_micro_batches=4)  # all first cells are on one host
    text = report.plan(task, cluster="2").splitlines()
    assert [line for line in text if line.startswith("chief")] == [
        "chief sends host 0 128 B a step",
        "chief sends host 1 32 B a step",
    ]
    assert "chief" not in report.plan(task, cluster="1x4")
    task.input.on_worker = True
    assert "chief" not in report.plan(task, cluster="2")


def test_replicas_that_leave_one_host_share_its_connection() -> None:
    task = tiny_task.tiny_task()
    task.model.set(num_replicas=2, num_micro_batches=4)
    cluster = hosts.parse("2,between=1kB,within=100kB")
    planned = step_plan.make_for(task, cluster=cluster)
    (link,) = [link for link in planned.links if link.source == 0]
    most = max(link.forward_bytes, link.backward_bytes) / len(planned.analysis.sizes)
    for places, seconds in (
        ((0, 0, 1, 1), most / 100_000),
        ((0, 1, 2, 3), most / 1000),
        ((0, 1, 0, 1), 2 * most / 1000),
        ((0, 1, 2, 1), 2 * most / 1000),  # they reach one host
        ((0, 1, 0, 2), 2 * most / 1000),  # they leave one host
        ((0, 1, 1, 1), most / 1000),  # the slower replica
        ((0, 1, 1, 0), most / 1000),  # one leaves it, one reaches it
    ):
        order = host_order.replica_by_replica(places)
        found = hosts.link_s(cluster, order, planned.analysis, planned.links)
        assert found == {(0, 1): pytest.approx(seconds)}
