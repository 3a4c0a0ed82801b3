"""Supervisors of a chief and of workers: every process killed and stopped; wrong members refused.

Chief and workers are fakes, so that a case takes a second; the supervisors are real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import chief_supervisor, lease, members
from lingvo_gpipe.cluster.checks import peers, sharing
from tests.lingvo_gpipe.cluster import fakes

ROOT = str(Path(__file__).parents[3])
STEPS = 40
STEPS_OF_STOPS = 150  # they are noticed after 1.5 s
LIMIT_S = 15.0
DETECTED_S = 2.0


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    names = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return names


def wait_for(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come in {limit_s} s"
        time.sleep(0.01)


@contextlib.contextmanager
def in_use(address: str) -> Iterator[None]:
    """Keep a port, at which no connection is accepted."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        yield


@contextlib.contextmanager
def black_hole(address: str) -> Iterator[None]:
    """Let no connection to an address arrive, and refuse none: its queue is full."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_for(lambda: is_bound(server, host, int(port)), "the port")
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, int(port)))
        time.sleep(0.05)
        yield


def is_bound(server: socket.socket, host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        server.bind((host, port))
        return True
    return False


class Run:
    """Supervisors in processes of their own, which this object starts and ends."""

    def __init__(self, folder: Path, num_workers: int = 2) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.addresses = free_addresses(num_workers + 1)
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, *words: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        errors_file = open(self.folder / f"{name}.err", "a")  # noqa: SIM115 (the process has it)
        with errors_file:
            process = subprocess.Popen(
                [sys.executable, fakes.__file__, *words],
                stderr=errors_file,
                text=True,
                cwd=cwd,
                env={
                    **os.environ,
                    "PYTHONPATH": ROOT,
                    "TMPDIR": str(self.temporary),
                    **environment,
                },
            )
        self._started[name] = process
        return process

    def start_worker(
        self,
        index: int,
        addresses: list[str] | None = None,
        cwd: Path | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        cluster = json.dumps(addresses or self.addresses)
        words = ("supervisor-of-worker", str(self.folder), cluster, str(index))
        return self.start(f"supervisor{index}", *words, cwd=cwd, **environment)

    def start_chief(
        self, steps: str = str(STEPS), cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        words = ("supervisor-of-chief", str(self.folder), json.dumps(self.addresses), steps)
        return self.start("supervisor", *words, cwd=cwd, **environment)

    def start_all(self, steps: int = STEPS) -> None:
        for index in range(len(self.addresses) - 1):
            self.start_worker(index)
        self.start_chief(str(steps))

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    @property
    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text()) if path.exists() else 0

    def lines(self, name: str = "supervisor") -> list[str]:
        return (self.folder / f"{name}.err").read_text().splitlines()

    def code(self, name: str) -> int:
        return self._started[name].wait(LIMIT_S)

    def codes(self) -> dict[str, int]:
        return {name: process.wait(LIMIT_S) for name, process in self._started.items()}

    def end(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()
        pids = {path.stem: int(path.read_text()) for path in self.folder.glob("*.pid")}
        wait_for(lambda: all(map(is_gone, pids.values())), f"the end of {', '.join(pids)}")


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.end()
    left = list(made.temporary.iterdir())
    assert len(left) <= 1  # of a supervisor that was killed, until the next one starts


def test_a_run_ends_everywhere_with_its_exit_code_and_leaves_nothing(run: Run) -> None:
    run.start_all()
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == STEPS
    config = json.loads((run.folder / "went").read_text())
    assert config["task"] == {"type": "chief", "index": 0}
    assert config["cluster"]["worker"] == run.addresses[1:]
    assert list((run.folder / "shared").iterdir()) == []  # of the probes
    assert list(run.temporary.iterdir()) == []
    for name in ("chief", "worker0", "worker1"):
        assert is_gone(run.pid(name))
    for address in run.addresses:
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass


def test_a_user_s_mistake_ends_all_with_its_code(run: Run) -> None:
    run.start_worker(0)
    run.start_worker(1)
    run.start_chief("exit1")
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


def named(pid: int) -> str:
    """Return a pattern of how a line names a process of this host."""
    return rf"\({re.escape(socket.gethostname())}, process {pid}\)"


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_lost_is_named_in_time_and_everything_starts_again(run: Run, name: str) -> None:
    lost, number, expected = FAULTS[name]
    steps = STEPS_OF_STOPS if number == signal.SIGSTOP else STEPS
    run.start_all(steps)
    wait_for(lambda: run.step >= 5, "step 5")
    before = {each: run.pid(each) for each in ("chief", "worker0", "worker1")}
    step = run.step
    os.kill(before[lost], number)
    began_s = time.monotonic()
    wait_for(lambda: any("restart 1" in line for line in run.lines()), "the restart")
    assert time.monotonic() - began_s < DETECTED_S
    (line,) = [line for line in run.lines() if "restart 1" in line]
    expected = expected.replace("PROCESS", named(before[lost]))
    found = re.fullmatch(rf"{expected}, at step (\d+): restart 1 of 9", line)
    assert found, line
    assert int(found[1]) >= step - 1
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == steps
    # No process of before serves the new start: its memory would grow with each.
    assert all(run.pid(each) != pid and is_gone(pid) for each, pid in before.items())


def test_a_worker_that_is_stopped_before_the_chief_needs_it_is_found(run: Run) -> None:
    run.start_worker(0)
    run.start_worker(1)
    run.start_chief(GATED="1")
    for index in range(2):
        name = f"supervisor{index}"
        wait_for(functools.partial(says, run, "serves the chief", name), "the leases")
    wait_for((run.folder / "worker0.pid").exists, "the worker")
    os.kill(run.pid("worker0"), signal.SIGSTOP)
    began_s = time.monotonic()
    wait_for(lambda: any("restart 1" in line for line in run.lines()), "the restart")
    assert time.monotonic() - began_s < DETECTED_S
    assert "its process is stopped, before its first step: restart 1 of" in run.lines()[0]
    (run.folder / "gate").touch()
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == STEPS


def test_a_worker_s_supervisor_that_is_killed_takes_its_worker_along(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    worker, supervisor = run.pid("worker1"), run.pid("supervisor1")
    os.kill(supervisor, signal.SIGKILL)
    began_s = time.monotonic()
    wait_for(lambda: any("restart 1" in line for line in run.lines()), "the restart")
    assert time.monotonic() - began_s < DETECTED_S
    expected = f"the supervisor of worker 1 {named(supervisor)} is lost: its connection"
    assert re.match(expected, run.lines()[0])
    wait_for(lambda: is_gone(worker), "the worker's end", 2.0)
    run.code("supervisor1")
    run.start_worker(1)  # as an orchestrator does
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == STEPS


def test_a_worker_s_supervisor_that_is_stopped_is_waited_for(run: Run) -> None:
    run.start_all(STEPS_OF_STOPS)
    wait_for(lambda: run.step >= 5, "step 5")
    os.kill(run.pid("supervisor0"), signal.SIGSTOP)
    began_s = time.monotonic()
    wait_for(lambda: any("restart 1" in line for line in run.lines()), "the restart")
    assert time.monotonic() - began_s < DETECTED_S
    (line,) = [line for line in run.lines() if "restart 1" in line]
    assert re.match(
        f"the supervisor of worker 0 {named(run.pid('supervisor0'))} is lost: its host is there, "
        r"but its process has not answered for 1\.5 s: it is stopped, at step",
        line,
    )
    os.kill(run.pid("supervisor0"), signal.SIGCONT)
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == STEPS_OF_STOPS


def test_the_chief_s_supervisor_that_is_killed_takes_the_chief_along(run: Run) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    chief, worker = run.pid("chief"), run.pid("worker0")
    os.kill(run.pid("supervisor"), signal.SIGKILL)
    wait_for(lambda: is_gone(chief) and is_gone(worker), "the end of chief and worker", 2.0)
    run.code("supervisor")
    run.start_chief()  # the workers wait for the next chief
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert run.step == STEPS
    assert list(run.temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_chief_s_supervisor_reaches_the_chief(run: Run, number: int) -> None:
    run.start_all()
    wait_for(lambda: run.step >= 5, "step 5")
    os.kill(run.pid("supervisor"), number)
    code = 128 + number  # the fake handles none
    assert run.codes() == {"supervisor": code, "supervisor0": code, "supervisor1": code}
    assert 5 <= run.step < STEPS


def test_a_signal_to_a_worker_s_supervisor_ends_its_worker(run: Run) -> None:
    run.start_worker(0)
    wait_for((run.folder / "worker0.pid").exists, "the worker")
    os.kill(run.pid("supervisor0"), signal.SIGTERM)
    assert run.codes() == {"supervisor0": 143}
    assert is_gone(run.pid("worker0"))


def test_a_fault_that_repeats_at_the_same_step_ends_the_run(run: Run) -> None:
    run.start_worker(0)
    run.start_worker(1)
    run.start_chief(f"exit{chief_supervisor.LOST_EXIT_CODE}")
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    assert sum("restart" in line and " of 9" in line for line in run.lines()) == 2
    assert re.match(
        f"ClusterError: the chief {named(run.pid('chief'))} could not go on, before its first "
        "step, the 3rd time in a row",
        run.lines()[-1],
    )


def test_a_chief_that_does_not_connect_is_not_waited_for(run: Run) -> None:
    run.start_worker(0)
    run.start_worker(1)
    run.start_chief("hangs", START_TIMEOUT_S="1", MAX_RESTARTS="1")
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    what = r"the chief \(\S+, process \d+\) has not connected to the workers within 1 s"
    first, last = run.lines()
    assert re.fullmatch(f"{what}, before its first step: restart 1 of 1", first)
    assert re.match(f"ClusterError: {what}, before its first step, and --max_restarts=1", last)


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
        began_s = time.monotonic()
        wait_for(lambda: says(apart, "restart 1"), "the restart")
        assert time.monotonic() - began_s < DETECTED_S
    (line,) = apart.lines()
    assert re.fullmatch(rf"{CUT}: no answer, at step \d+: restart 1 of 9", line), line
    assert apart.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert apart.step == STEPS_OF_STOPS


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
        rf"waiting for {CUT.replace('cannot', 'to')} since \d\d:\d\d:\d\d: no answer",
        apart.lines()[0],
    )
    if heals:
        assert apart.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
        assert len(apart.lines()) == 1
    else:
        assert re.match(
            rf"ClusterError: {CUT} after 6 s \(--start_timeout_s\): no answer\. Let each worker",
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
        r"its host is there, but its process has not answered for 1\.5 s: it is stopped",
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
    waiting, error = run.lines()
    address = re.escape(run.addresses[2])
    assert re.fullmatch(
        rf"waiting for worker 1 \({address}\) since \d\d:\d\d:\d\d: {expected}", waiting
    )
    missing = r"is missing after \d s \(--start_timeout_s\)"
    assert re.match(rf"ClusterError: worker 1 \({address}\) {missing}: {expected}", error)
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
    assert re.match(f"ClusterError: {expected}", line), line
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
    assert line.startswith(f"ClusterError: worker 0 cannot listen at port {port}: ")


def test_the_chief_s_port_in_use_is_named_before_a_lease_is_taken(run: Run) -> None:
    port = int(run.addresses[0].rpartition(":")[2])
    run.start_worker(0)
    run.start_worker(1)
    with socket.create_server(("127.0.0.1", port)):
        run.start_chief()
        assert run.code("supervisor") == 1
    (line,) = run.lines()
    assert line.startswith(f"ClusterError: the chief cannot listen at port {port}: ")
    assert line.endswith("End the program that uses it, or name another port in the cluster")
    assert not any("serves the chief" in line for line in run.lines("supervisor0"))
    run.start_chief(PORT_TIMEOUT_S="20")  # the workers are free for it
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}


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


def test_versions_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from lingvo_gpipe import errors

    cluster = members.Cluster("a:1", ("b:1",))
    worker = lease.identity(cluster, 0)
    lease._check_identity(worker, cluster, 0)
    newer = {**lease.versions(), "tensorflow": "9.9"}
    monkeypatch.setattr(lease, "versions", lambda: newer)
    with pytest.raises(errors.ClusterError, match=r"has tensorflow 2\.\S+, the chief has 9\.9\. "):
        lease._check_identity(worker, cluster, 0)


@pytest.mark.parametrize(
    ("given", "of_workers"),
    [("0,1,5", ["0", "1,5"]), ("4", ["4", "4"]), ("", ["", ""]), ("-1", ["-1", "-1"])],
)
def test_workers_on_this_machine_share_its_gpus_and_the_chief_has_none(
    run: Run, given: str, of_workers: list[str]
) -> None:
    run.start_chief(KEEP="1", CUDA_VISIBLE_DEVICES=given)
    assert run.codes() == {"supervisor": 0}
    found = [(run.folder / f"worker{index}.gpus").read_text() for index in range(2)]
    assert found == of_workers
    assert (run.folder / "chief.gpus").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_supervisor_on_this_machine_is_replaced_before_its_lease_is_taken(
    run: Run, number: int
) -> None:
    with in_use(run.addresses[1]):
        run.start_chief(KEEP="1", PORT_TIMEOUT_S="20")  # worker 0 waits for its port
        wait_for((run.folder / "supervisor0.pid").exists, "the supervisor of worker 0")
        before = run.pid("supervisor0")
        os.kill(before, number)
    assert run.codes() == {"supervisor": 0}
    assert run.step == STEPS
    assert run.pid("supervisor0") != before


def test_supervisors_that_end_by_themselves_end_the_run(run: Run) -> None:
    with in_use(run.addresses[1]):
        run.start_chief(KEEP="1")
        assert run.code("supervisor") == 1
    assert run.lines()[-1].startswith(
        "ClusterError: the supervisor of worker 0 ended with exit code 1. Its own lines, above"
    )
    assert sum("cannot listen at port" in line for line in run.lines()) == 3


def test_a_port_that_becomes_free_is_waited_for(run: Run) -> None:
    with in_use(run.addresses[1]):
        run.start_worker(0, PORT_TIMEOUT_S="20")
        run.start_worker(1)
        run.start_chief()
        wait_for((run.folder / "worker1.pid").exists, "worker 1")
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}


def test_a_signal_ends_the_wait_for_the_next_start(run: Run) -> None:
    run.start_all(10**6)
    for restart in range(1, 6):
        step = run.step
        wait_for(functools.partial(has_gone_on, run, step), "a step")
        os.kill(run.pid("worker1"), signal.SIGKILL)
        wait_for(functools.partial(says, run, f"restart {restart} "), f"restart {restart}")
    assert run.lines()[-1].endswith(": restart 5 of 9, in 8 s")
    os.kill(run.pid("supervisor"), signal.SIGTERM)
    began_s = time.monotonic()
    assert run.codes() == {"supervisor": 143, "supervisor0": 143, "supervisor1": 143}
    assert time.monotonic() - began_s < 6.0


def test_no_restart_is_allowed(run: Run) -> None:
    for index in range(2):
        run.start_worker(index)
    run.start_chief(MAX_RESTARTS="0")
    wait_for(lambda: run.step >= 5, "step 5")
    os.kill(run.pid("worker1"), signal.SIGKILL)
    assert run.codes() == {"supervisor": 1, "supervisor0": 1, "supervisor1": 1}
    assert "is lost: killed by SIGKILL, at step" in run.lines()[-1]
    assert "--max_restarts=0 allows no further restart" in run.lines()[-1]


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
        wait_for(functools.partial(says, run, f"restart {restart} "), f"restart {restart}")
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


def has_gone_on(run: Run, step: int) -> bool:
    return run.step >= step + 3


def says(run: Run, what: str, name: str = "supervisor") -> bool:
    return any(what in line for line in run.lines(name))


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_files_of_a_probe_that_was_interrupted_are_removed(run: Run) -> None:
    shared = run.folder / "shared"
    shared.mkdir()
    left = [shared / f"shared-{'0' * 16}", shared / f"shared-{'0' * 16}.{'1' * 8}"]
    mine = shared / "shared-notes.txt"
    for path in (*left, mine):
        path.write_text("")
    run.start_all()
    assert run.codes() == {"supervisor": 0, "supervisor0": 0, "supervisor1": 0}
    assert list(shared.iterdir()) == [mine]


def test_of_two_chiefs_at_once_the_second_waits() -> None:
    async def both() -> list[str]:
        waits = asyncio.Event()
        taken: list[lease.Connection] = []

        def claim() -> bool:
            taken.append(connections[len(taken)])
            return len(taken) == 1

        connections: list[lease.Connection] = []
        ends: list[str] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = lease.Connection(reader, writer)
            connections.append(connection)
            if len(connections) == 2:
                waits.set()
            await waits.wait()
            try:
                await lease.grant(connection, worker, fakes.TOKEN, claim)
                ends.append("granted")
            except lease.RefusedError as error:
                ends.append(str(error))
                await connection.finish()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cluster = members.Cluster("127.0.0.1:1", (f"127.0.0.1:{port}",))
        worker = lease.identity(cluster, 0)
        found = await asyncio.gather(
            *(lease.take(cluster, 0, fakes.TOKEN) for _ in range(2)), return_exceptions=True
        )
        kinds = sorted(type(each).__name__ for each in found)
        for connection in (*connections, *(each[0] for each in found if isinstance(each, tuple))):
            connection.close()
        server.close()
        await asyncio.sleep(0.01)  # they are closed by the loop
        return [*sorted(ends), *kinds]

    ends = asyncio.run(asyncio.wait_for(both(), LIMIT_S))
    assert ends == ["another chief has just taken the lease", "granted", "LostError", "tuple"]


@pytest.mark.parametrize("proof", ["é", "\ud800", None, 7, {}])
def test_a_strange_proof_is_refused(proof: object) -> None:
    expected = lease._proof("a token é \udc80", "chief", "0", "a nonce \ud800")
    assert not lease._is_same(proof, expected)
    assert lease._is_same(str(expected), expected)


# Flag → content of the files on the chief's host and on that of worker 1; None: it has the same
# ones. Then the line's end; None: the run is done.
UNSEEN: dict[str, tuple[str, str | None, str | None]] = {
    "LOGDIR": (
        "",
        "",
        "does not see what the chief sees there. Name a folder that all hosts share, by the same "
        "path",
    ),
    "CHECKPOINT": (
        "five",
        "",
        "does not see what the chief sees there. Name one in a folder that all hosts share, by the "
        "same path",
    ),
    "CHECKPOINT of another run": ("five", "of another", "has another one there. Name one in a .*"),
    "CHECKPOINT copied": ("five", "five", None),
    "CHECKPOINT shared": ("five", None, None),
    "CHECKPOINT that the chief does not see": ("", None, None),  # the chief says it itself
}


@pytest.mark.parametrize("case", UNSEEN)
def test_files_that_a_host_does_not_see_are_named(run: Run, case: str) -> None:
    mine, other, expected = UNSEEN[case]
    flag = case.partition(" ")[0]
    hosts = [run.folder / "host0", run.folder / "host1"]
    for host, content in zip(hosts, (mine, other), strict=True):
        (host / "files").mkdir(parents=True)
        if content:
            for name in ("ckpt-5.index", "ckpt-5.params.txt", "ckpt-40.writing"):
                (host / "files" / name).write_text(content)
    before = sorted(run.folder.rglob("files/*"))
    run.start_worker(0, cwd=hosts[0])
    run.start_worker(1, cwd=hosts[0 if other is None else 1])
    run.start_chief(cwd=hosts[0], **{flag: "files"})
    code = run.code("supervisor")
    assert sorted(run.folder.rglob("files/*")) == before
    if expected is None:
        assert code == 0
        return
    assert code == 1
    (line,) = run.lines()
    where = rf"--{flag.lower()}=files: worker 1 \(\S+, process \d+\)"
    assert re.fullmatch(rf"ClusterError: {where} {expected}", line), line
    assert not (run.folder / "went").exists()


def test_a_folder_that_a_host_does_not_share_is_named(tmp_path: Path) -> None:
    def ask(folder: object, name: str, digest: str | None = None) -> str | None:
        return sharing.look(sharing.Question(str(folder), name, digest))

    (tmp_path / "seen").write_text("")
    assert ask(tmp_path, "seen") is None
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]
    assert ask(tmp_path, "other") == "does not see what the chief sees there"
    assert ask("/proc/self", "status") == "cannot write there: No such file or directory"
    assert ask(tmp_path, "../seen") == "'../seen' is not the name of a file"
    look = sharing.Look(sharing.Question(str(tmp_path), "other"))
    assert look.done.wait(LIMIT_S)
    assert look.fault == "does not see what the chief sees there"


def test_the_checkpoint_that_is_looked_for_is_the_newest_whole_one(tmp_path: Path) -> None:
    assert sharing.of_checkpoint(tmp_path) is None
    for name in ("ckpt-9", "ckpt-10"):
        (tmp_path / f"{name}.index").write_text(name)
        (tmp_path / f"{name}.params.txt").write_text("")
    (tmp_path / "ckpt-11.index").write_text("is being written")
    found = sharing.of_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "ckpt-10.index"
    for name in ("ckpt-10", "ckpt-10.index", "ckpt-10.params.txt"):
        assert sharing.of_checkpoint(tmp_path / name) == found
    assert sharing.look(found) is None
    assert sharing.of_checkpoint(tmp_path / "ckpt-12") is None
