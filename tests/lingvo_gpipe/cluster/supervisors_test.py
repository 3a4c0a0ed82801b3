"""Supervisors of a chief and of workers: every process killed and stopped.

Chief and workers are fakes, so that a case takes a second; the supervisors are real processes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import members, worker_supervisor
from tests.lingvo_gpipe.cluster.runs import (
    STEPS,
    STEPS_OF_STOPS,
    Run,
    has_gone_on,
    is_gone,
    named,
    says,
    stat,
    wait_for,
    wait_for_restart,
)


def test_a_run_ends_everywhere_with_its_exit_code_and_leaves_nothing(run: Run) -> None:
    run.start_all()
    run.check_end()
    config = json.loads((run.folder / "went").read_text())
    assert config["task"] == {"type": "chief", "index": 0}
    assert config["cluster"]["worker"] == run.addresses[1:]
    assert list(run.temporary.iterdir()) == []
    for name in ("chief", "worker0", "worker1"):
        assert is_gone(run.pid(name))
    for address in run.addresses:
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("its server does not start: no port", "its server does not start: no port"),
        (worker_supervisor.SERVES, "ended with exit code 3"),
        ("", "ended with exit code 3"),
    ],
)
def test_a_worker_that_has_ended_leaves_its_reason(line: str, fault: str) -> None:
    imports = "from lingvo_gpipe.cluster import child\n"
    program = f"{imports}child.channel().write({line!r}); raise SystemExit(3)"
    cluster = members.Cluster("a:1", ("b:2",))
    worker = worker_supervisor.WorkerProcess(cluster, 0, (sys.executable, "-c", program))
    wait_for(worker.fault, "the end")
    assert worker.fault() == fault
    asyncio.run(worker.close())


def test_a_user_s_mistake_ends_all_with_its_code(run: Run) -> None:
    run.start_all("exit1")
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    assert not any("restart" in line for line in run.lines())


# Process, signal, the line of the chief's supervisor; PROCESS is the host and that process.
FAULTS = {
    "worker killed": ("worker1", signal.SIGKILL, "worker 1 PROCESS is lost: killed by SIGKILL"),
    "worker stopped": (
        "worker0",
        signal.SIGSTOP,
        "worker 0 PROCESS is lost: its process is stopped",
    ),
    "chief killed": ("chief", signal.SIGKILL, "the chief PROCESS was killed by SIGKILL"),
    "chief stopped": ("chief", signal.SIGSTOP, "the chief PROCESS is stopped"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_lost_is_named_in_time_and_everything_starts_again(run: Run, name: str) -> None:
    lost, number, expected = FAULTS[name]
    steps = STEPS_OF_STOPS if number == signal.SIGSTOP else STEPS
    run.start_all(steps)
    wait_for(lambda: run.step >= 5, "step 5")
    before = {each: run.pid(each) for each in ("chief", "worker0", "worker1")}
    step = run.step
    os.kill(before[lost], number)
    line = wait_for_restart(run)
    expected = expected.replace("PROCESS", named(before[lost]))
    found = re.fullmatch(rf"{expected}, at step (\d+): restart 1", line)
    assert found, line
    assert int(found[1]) >= step - 1
    run.check_end(steps)
    # No process of before serves the new start: its memory would grow with each.
    assert all(run.pid(each) != pid and is_gone(pid) for each, pid in before.items())


def test_a_worker_that_is_stopped_before_the_chief_needs_it_is_found(run: Run) -> None:
    run.start_all(GATED="1")
    for index in range(2):
        name = f"supervisor{index}"
        wait_for(functools.partial(says, run, "serves the chief", name), "the leases")
    wait_for((run.folder / "worker0.pid").exists, "the worker")
    os.kill(run.pid("worker0"), signal.SIGSTOP)
    wait_for_restart(run)
    assert "its process is stopped, before its first step: restart 1" in run.lines()[0]
    (run.folder / "gate").touch()
    run.check_end()


def test_a_worker_s_supervisor_that_is_killed_takes_its_worker_along(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    worker, supervisor = run.pid("worker1"), run.pid("supervisor1")
    os.kill(supervisor, signal.SIGKILL)
    wait_for_restart(run)
    expected = f"the supervisor of worker 1 {named(supervisor)} is lost: its connection"
    assert re.match(expected, run.lines()[0])
    wait_for(lambda: is_gone(worker), "the worker's end", 2.0)
    run.code("supervisor1")
    run.start_worker(1)  # as an orchestrator does
    run.check_end()


def test_a_worker_s_supervisor_that_is_stopped_is_waited_for(run: Run) -> None:
    run.start_all(STEPS_OF_STOPS)
    wait_for(lambda: run.step >= 5, "step 5")
    os.kill(run.pid("supervisor0"), signal.SIGSTOP)
    line = wait_for_restart(run)
    assert re.match(
        f"the supervisor of worker 0 {named(run.pid('supervisor0'))} is lost: no answer for "
        r"1\.5 s: it is stopped, or its host cannot be reached, at step",
        line,
    )
    os.kill(run.pid("supervisor0"), signal.SIGCONT)
    run.check_end(STEPS_OF_STOPS)


def test_the_chief_s_supervisor_that_is_killed_takes_the_chief_along(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    chief, worker = run.pid("chief"), run.pid("worker0")
    os.kill(run.pid("supervisor"), signal.SIGKILL)
    wait_for(lambda: is_gone(chief) and is_gone(worker), "the end of chief and worker", 2.0)
    run.code("supervisor")
    run.start_chief()  # the workers wait for the next chief
    run.check_end()


def test_a_signal_to_the_chief_s_supervisor_reaches_the_chief(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    os.kill(run.pid("supervisor"), signal.SIGTERM)
    code = 128 + signal.SIGTERM  # the fake handles none
    assert run.codes() == {"supervisor": code, "supervisor0": code, "supervisor1": code}
    assert 5 <= run.step < STEPS


def test_a_signal_to_a_worker_s_supervisor_ends_its_worker(run: Run) -> None:
    run.start_worker(0)
    wait_for((run.folder / "worker0.pid").exists, "the worker")
    os.kill(run.pid("supervisor0"), signal.SIGTERM)
    assert run.codes() == {"supervisor0": 143}
    assert is_gone(run.pid("worker0"))


def test_a_fault_that_repeats_at_the_same_step_ends_the_run(run: Run) -> None:
    run.start_all(f"exit{os.EX_TEMPFAIL}")
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    assert sum(": restart " in line for line in run.lines()) == 2
    assert re.match(
        f"DeviceError: the chief {named(run.pid('chief'))} could not go on, before its first "
        "step, the 3rd time in a row",
        run.lines()[-1],
    )


def test_a_chief_that_does_not_connect_is_not_waited_for(run: Run) -> None:
    run.start_all("hangs", START_TIMEOUT_S="1")
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    what = r"the chief \(\S+, process \d+\) has not connected to the workers within 1 s"
    first, _, last = run.lines()
    assert re.fullmatch(f"{what}, before its first step: restart 1", first)
    assert re.match(f"DeviceError: {what}, before its first step, the 3rd time in a row", last)


@pytest.mark.parametrize(("given", "of_workers"), [("0,1,5", ["0", "1,5"]), ("", ["", ""])])
def test_workers_on_this_machine_share_its_gpus_and_the_chief_has_none(
    run: Run, given: str, of_workers: list[str]
) -> None:
    run.start_chief(LOCAL="1", CUDA_VISIBLE_DEVICES=given)
    assert run.codes() == {"supervisor": 0}
    found = [(run.folder / f"worker{index}.gpus").read_text() for index in range(2)]
    assert found == of_workers
    assert (run.folder / "chief.gpus").read_text() == ""


def test_a_worker_on_this_machine_that_is_lost_is_replaced(run: Run) -> None:
    run.start_chief(LOCAL="1")
    wait_for(lambda: run.step >= 5, "step 5")
    before = run.pid("worker1")
    os.kill(before, signal.SIGKILL)
    wait_for_restart(run)
    run.check_end()
    assert is_gone(before)
    assert list(run.temporary.iterdir()) == []


def test_a_supervisor_on_this_machine_that_is_killed_takes_all_along(run: Run) -> None:
    run.start_chief(LOCAL="1")
    wait_for(lambda: run.step >= 5, "step 5")
    pids = [run.pid(name) for name in ("chief", "worker0", "worker1")]
    os.kill(run.pid("supervisor"), signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, pids)), "the end of all", 2.0)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_restarts_leak_no_file_and_no_zombie(run: Run) -> None:
    run.start_all(10**6)
    counts: list[tuple[int, int]] = []
    for restart in range(1, 6):
        step = run.step
        wait_for(functools.partial(has_gone_on, run, step), "a step")
        counts.append((descriptors(run.pid("supervisor")), descriptors(run.pid("supervisor0"))))
        os.kill(run.pid("worker1"), signal.SIGKILL)
        wait_for(functools.partial(says, run, f": restart {restart}"), f"restart {restart}")
    assert counts[1:] == [counts[1]] * 4
    supervisors = {run.pid(name) for name in ("supervisor", "supervisor0", "supervisor1")}

    def zombies() -> list[Path]:
        return [
            path
            for path in Path("/proc").glob("[0-9]*")
            if (fields := stat(int(path.name)))[:1] == ["Z"] and int(fields[1]) in supervisors
        ]

    # One that ended a moment ago has yet to be waited for.
    wait_for(lambda: not zombies(), "the end of all zombies")
