"""The shape of a cluster: the host of each device, and what the links between hosts carry."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_gpipe import errors
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
        ("2x4", 6, (0, 0, 0, 0, 1, 1)),
        ("2x1", 2, (0, 1)),
    ],
)
def test_neighbours_lie_on_one_host(shape: str, num_devices: int, placed: tuple[int, ...]) -> None:
    assert hosts.parse(shape).place(num_devices) == placed


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(errors.PlacementError, match=r"3 devices are needed, but --hosts has 2 x"):
        hosts.parse("2x1").place(3)


def test_a_plan_shows_bytes_and_seconds_of_links_between_hosts() -> None:
    task = tiny_task.tiny_task()
    plain = step_plan.make_for(task)
    (link,) = [link for link in plain.links if link.source == 0]
    text = report.plan(task, cluster="2,memory=1B,between=1kB")
    seconds = f"{(link.forward_bytes + link.backward_bytes) / 1000:.3g}"
    (row,) = [line for line in text.splitlines() if "hosts 0 → 1" in line]
    assert row.split()[-1] == seconds
    assert f"host 0 sends host 1 {link.forward_bytes} B a step" in text
    assert f"host 1 sends host 0 {link.backward_bytes} B a step" in text
    assert text.count("more than it has") == 2
    assert "within host 0" in report.plan(task, cluster="1x2")
    assert "1 of 3 hosts have no cell" in report.plan(task, cluster="3")


def test_links_take_their_time_in_a_measured_plan() -> None:
    task = tiny_task.tiny_task()
    slow = hosts.Hosts(2, between=100)
    free = step_plan.make_for(task, profile=True)
    seconds = hosts.link_s(slow, free.analysis, free.links)
    (link,) = [link for link in free.links if link.source == 0]
    most = max(link.forward_bytes, link.backward_bytes)
    assert seconds == {(0, 1): most / 2 / 100}
    planned = step_plan.make_for(task, profile=True, cluster=slow)
    # There and back for one micro-batch at least.
    assert planned.timeline.makespan_s > 2 * seconds[0, 1]
    assert "at the speeds of --hosts" in report.render(planned)
    fast = dataclasses.replace(slow, between=None)
    assert "links taken as free" in report.render(dataclasses.replace(planned, cluster=fast))
