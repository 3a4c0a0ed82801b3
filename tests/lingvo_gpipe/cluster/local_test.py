"""The parent of a run on this machine, and the ports of its workers."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import isolation, local

# Notes its number; the first one waits, the next ones end.
SUPERVISOR = """
import os, pathlib, sys, time
pids = pathlib.Path(sys.argv[1])
first = not pids.exists()
with pids.open("a") as file: file.write(f"{os.getpid()}\\n")
if first or sys.argv[2] == "waits": time.sleep(60)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _needs_networks() -> None:
    try:
        isolation.PrivateNetwork().close()
    except OSError as error:
        pytest.skip(f"this system allows no network namespace: {error.strerror}")


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return list(map(int, path.read_text().split())) if path.exists() else []


def run_and_do(
    folder: Path, to_each: Callable[[int], None], what: str = "0", max_restarts: int = 9
) -> tuple[int | None, list[str]]:
    """Run a supervisor; call `to_each` with the number of each of its processes, once."""
    lines: list[str] = []
    is_done = threading.Event()

    def follow() -> None:
        seen = 0
        while not is_done.is_set():
            for pid in pids(folder)[seen:]:
                seen += 1
                to_each(pid)
            time.sleep(0.01)

    command = (sys.executable, "-c", SUPERVISOR, str(folder / "pids"), what)
    supervisor = local.PrivateSupervisor(command, dict(os.environ), lines.append, max_restarts)
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        return supervisor.run(), lines
    finally:
        is_done.set()
        thread.join()


def first_only(number: int, folder: Path) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number) if pid == pids(folder)[0] else None


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, r"the chief's supervisor was killed by SIGKILL: restart 1 of 9"),
        (signal.SIGSTOP, r"the chief's supervisor \(process \d+\) is stopped: restart 1 of 9"),
    ],
)
def test_a_supervisor_that_is_lost_is_started_again(
    tmp_path: Path, number: int, expected: str
) -> None:
    code, lines = run_and_do(tmp_path, first_only(number, tmp_path), "7")
    assert code == 7
    assert len(pids(tmp_path)) == 2
    (line,) = lines
    assert re.fullmatch(expected, line)


def test_a_supervisor_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(errors.DeviceError, match="was killed by SIGKILL, after 2 restarts"):
        run_and_do(tmp_path, kill, "waits")
    assert len(pids(tmp_path)) == 3


def test_no_restart_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(errors.DeviceError, match="after 0 restarts"):
        run_and_do(tmp_path, first_only(signal.SIGKILL, tmp_path), max_restarts=0)


def test_a_signal_reaches_the_supervisor_and_ends_the_run(tmp_path: Path) -> None:
    def terminate(pid: int) -> None:
        del pid
        os.kill(os.getpid(), signal.SIGTERM)

    code, lines = run_and_do(tmp_path, terminate, "waits")
    assert code == 128 + signal.SIGTERM
    assert lines == []


def test_a_private_network_is_given_up_for_data(tmp_path: Path) -> None:
    kill = first_only(signal.SIGKILL, tmp_path)
    code, lines = run_and_do(tmp_path, kill, str(local.NEEDS_NETWORK_EXIT_CODE))
    assert code is None
    assert lines[-1].startswith("the data must be fetched, or a hook reaches other hosts: ")


def test_free_ports_are_not_those_of_connections() -> None:
    found = local._free_ports(3)
    assert len(set(found)) == 3
    lowest, _ = map(int, local._EPHEMERAL_PORTS.read_text().split())
    assert max(found) < lowest


def test_gpus_are_those_of_the_driver_unless_some_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_DRIVER", tmp_path)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert local.gpus({}) == ["0", "1"]
    assert local.gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ["1"]
    assert local.gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr(local, "_DRIVER", tmp_path / "none")
    assert local.gpus({}) == []
