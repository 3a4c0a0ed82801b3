"""Workers that cannot reach each other are named in time."""

from __future__ import annotations

import asyncio
import functools
import re

import pytest

from lingvo_gpipe.cluster import members, peers
from tests.lingvo_gpipe.cluster.runs import (
    STEPS_OF_STOPS,
    Run,
    black_hole,
    free_addresses,
    says,
    wait_for,
    wait_for_restart,
)


@pytest.fixture
def apart(run: Run) -> Run:
    """A run whose worker 1 has an address of its own."""
    run.addresses[2] = run.addresses[2].replace("127.0.0.1", "127.0.0.2")
    return run


CUT = r"worker 0 \(\S+, process \d+\) cannot reach worker 1 \(127\.0\.0\.2:\d+\)"


def test_a_cut_between_two_workers_is_named_in_time_and_the_run_starts_again(apart: Run) -> None:
    apart.start_worker(0)
    apart.start_worker(1, PORT_TIMEOUT_S="20")
    apart.start_chief(str(STEPS_OF_STOPS))
    wait_for(lambda: apart.step >= 5, "step 5")
    with black_hole(apart.addresses[2]):
        line = wait_for_restart(apart)
    assert re.fullmatch(rf"{CUT}: no answer, at step \d+: restart 1", line), line
    assert apart.lines() == [line]
    apart.check_end(STEPS_OF_STOPS)


@pytest.mark.parametrize("heals", [True, False])
def test_workers_that_do_not_reach_each_other_yet_are_waited_for(apart: Run, heals: bool) -> None:
    apart.start_worker(0)
    apart.start_worker(1, PORT_TIMEOUT_S="20")
    apart.start_chief(GATED="1", START_TIMEOUT_S="20" if heals else "6")
    for index in range(2):
        name = f"supervisor{index}"
        wait_for(functools.partial(says, apart, "serves the chief", name), "the leases")
    with black_hole(apart.addresses[2]):
        (apart.folder / "gate").touch()
        wait_for(lambda: says(apart, "waiting for worker 0"), "the line")
        if not heals:
            assert apart.code("supervisor") == 1
    assert re.fullmatch(
        rf"waiting for {CUT.replace('cannot', 'to')}: no answer",
        apart.lines()[0],
    )
    if heals:
        apart.check_end()
        assert len(apart.lines()) == 1
    else:
        assert re.match(
            rf"DeviceError: {CUT} after 6 s \(--start_timeout_s\): no answer\. Let each worker",
            apart.lines()[-1],
        )
        assert not (apart.folder / "went").exists()


def test_hosts_that_cannot_be_reached_are_found() -> None:
    async def found(cluster: members.Cluster) -> dict[int, str] | None:
        others = peers.Peers(cluster, 0)
        watch = asyncio.ensure_future(others.watch())
        while others.unreachable is None:
            await asyncio.sleep(0.01)
        watch.cancel()
        return others.unreachable

    refuses, hole = (f"127.0.0.{2 + i}:{free_addresses(1)[0][10:]}" for i in range(2))
    workers = ("127.0.0.1:1", "127.0.0.1:2", refuses, hole, "there-is-no.invalid:3")
    with black_hole(hole):
        unreachable = asyncio.run(found(members.Cluster("127.0.0.1:9", workers)))
    assert unreachable == {3: "no answer", 4: "there is no host 'there-is-no.invalid'"}
    assert peers.Peers(members.Cluster("a:1", ("b:1", "b:2")), 1).unreachable == {}
