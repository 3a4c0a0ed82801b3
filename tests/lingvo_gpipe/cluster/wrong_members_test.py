"""A member that is missing or wrong is named, as is one in use, or whose port is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.lingvo_gpipe.cluster.runs import (
    DETECTED_S,
    STEPS,
    Run,
    black_hole,
    free_addresses,
    in_use,
    says,
    wait_for,
)


@contextlib.contextmanager
def stopped_supervisor(run: Run) -> Iterator[None]:
    run.start_worker(1)
    wait_for(lambda: says(run, "waits for its chief", "supervisor1"), "the supervisor")
    os.kill(run.pid("supervisor1"), signal.SIGSTOP)
    yield
    os.kill(run.pid("supervisor1"), signal.SIGKILL)


# Why worker 1 is not there → what happens at its address, the end of the line.
MISSING: dict[str, tuple[Callable[[Run], contextlib.AbstractContextManager[None]], str]] = {
    "not started": (lambda _: contextlib.nullcontext(), "its connection failed: .*"),
    "unreachable": (lambda run: black_hole(run.addresses[2]), "its host does not answer"),
    "stopped": (
        stopped_supervisor,
        r"no answer for 1\.5 s: it is stopped, or its host cannot be reached",
    ),
}


@pytest.mark.parametrize("why", MISSING)
def test_a_worker_that_is_missing_is_named_in_time_and_given_up(run: Run, why: str) -> None:
    at_its_address, expected = MISSING[why]
    run.start_worker(0)
    wait_for(lambda: says(run, "waits for its chief", "supervisor0"), "the supervisor")
    with at_its_address(run):
        run.start_chief(START_TIMEOUT_S="2.5")
        wait_for((run.folder / "supervisor.pid").exists, "the chief's supervisor")
        began_s = time.monotonic()
        wait_for(run.lines, "the line")
        assert time.monotonic() - began_s < DETECTED_S
        assert run.code("supervisor") == 1
    *waiting, error = run.lines()
    address = re.escape(run.addresses[2])
    line = rf"waiting for worker 1 \({address}\): {expected}"
    # On a busy machine worker 0 may be late, too.
    (of_worker,) = (each for each in waiting if not each.startswith("waiting for worker 0 "))
    assert re.fullmatch(line, of_worker)
    missing = r"is missing after \d s \(--start_timeout_s\)"
    assert re.match(rf"DeviceError: worker 1 \({address}\) {missing}: {expected}", error)
    assert run.code("supervisor0") == 1


# What is wrong with worker 1 → (its addresses, its index, its environment), the chief's line.
WRONG: dict[str, tuple[Callable[[list[str]], list[str]], int, dict[str, str], str]] = {
    "another token": (
        lambda each: each,
        1,
        {"TOKEN": "another"},
        r"worker 1 at \S+ has another token",
    ),
    "swapped indices": (
        lambda each: [each[0], each[2], each[1]],
        0,
        {},
        r"the process at \S+ is worker 0, but the chief's cluster has worker 1 there",
    ),
    "another version": (
        lambda each: each,
        1,
        {"VERSION": "9.9"},
        r"worker 1 \(.*\) has python 9\.9, the chief has 3\.\d+\. Install the same version on all",
    ),
    "other workers": (
        lambda each: [each[0], "127.0.0.1:9", each[2]],
        1,
        {},
        r"worker 1 \(.*\) was started with other workers: 127\.0\.0\.1:9, ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_member_is_refused_by_one_line(run: Run, name: str) -> None:
    change, index, environment, expected = WRONG[name]
    run.start_worker(0)
    words = ("supervisor-of-worker", str(run.folder), json.dumps(change(run.addresses)), str(index))
    run.start("wrong", *words, cwd=None, **environment)
    run.start_chief()
    assert run.code("supervisor") == 1
    (line,) = run.lines()
    assert re.match(f"DeviceError: {expected}", line), line
    assert not (run.folder / "went").exists()


def test_a_worker_in_use_is_not_taken_away(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    other = run.folder / "other"
    other.mkdir()
    cluster = json.dumps([free_addresses(1)[0], *run.addresses[1:]])
    words = ("supervisor-of-chief", str(other), cluster, "9")
    run.start("second", *words, START_TIMEOUT_S="0")
    assert run.code("second") == 1
    assert "is missing after" in run.lines("second")[-1]
    assert run.code("supervisor") == 0
    assert run.step == STEPS


def test_a_port_in_use_is_named(run: Run) -> None:
    port = int(run.addresses[1].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        run.start_worker(0)
        assert run.codes() == {"supervisor0": 1}
    (line,) = run.lines("supervisor0")
    assert line.startswith(f"DeviceError: worker 0 cannot listen at port {port}: ")


def test_the_chief_s_port_in_use_is_named_before_a_lease_is_taken(run: Run) -> None:
    port = int(run.addresses[0].rpartition(":")[2])
    run.start_worker(0)
    run.start_worker(1)
    with socket.create_server(("127.0.0.1", port)):
        run.start_chief()
        assert run.code("supervisor") == 1
    (line,) = run.lines()
    assert line.startswith(f"DeviceError: the chief cannot listen at port {port}: ")
    assert line.endswith("End the program that uses it, or name another port in the cluster")
    assert not any("serves the chief" in line for line in run.lines("supervisor0"))
    run.start_chief(PORT_TIMEOUT_S="20")  # the workers are free for it
    run.check_end()


def test_another_program_at_the_address_is_named(run: Run) -> None:
    port = int(run.addresses[2].rpartition(":")[2])
    run.start_worker(0)
    wait_for(lambda: run.lines("supervisor0"), "the supervisor of worker 0")
    with socket.create_server(("127.0.0.1", port)) as server:
        run.start_chief(START_TIMEOUT_S="0")
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert run.code("supervisor") == 1
    assert "what answers there is not a worker that waits for a chief" in run.lines()[-1]


def test_a_port_that_becomes_free_is_waited_for(run: Run) -> None:
    with in_use(run.addresses[1]):
        run.start_worker(0, PORT_TIMEOUT_S="20")
        run.start_worker(1)
        run.start_chief()
        wait_for((run.folder / "worker1.pid").exists, "worker 1")
    run.check_end()
