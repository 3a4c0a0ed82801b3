"""Processes that end with the one that started them, and networks of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingvo_gpipe.cluster import child, isolation, local

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def wait_for(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def start(command: tuple[str, ...], **settings: object) -> child.Child:
    return child.Child(command, child.Settings(ENVIRONMENT, **settings))  # type: ignore[arg-type]


def test_the_state_of_a_child_is_seen() -> None:
    process = start(SLEEP)
    try:
        assert process.state() == child.RUNNING
        process.signal(signal.SIGSTOP)
        wait_for(lambda: process.state() == child.STOPPED)
        process.signal(signal.SIGCONT)
        wait_for(lambda: process.state() == child.RUNNING)
        process.signal(signal.SIGTERM)
        wait_for(lambda: process.state() == "killed by SIGTERM")
    finally:
        process.end()
    process = start((sys.executable, "-c", "raise SystemExit(3)"))
    wait_for(lambda: process.state() == "ended with exit code 3")
    process.end()


def test_lines_go_both_ways_and_a_child_that_ends_loses_them() -> None:
    program = (
        "from lingvo_gpipe.cluster import child\n"
        "channel = child.channel()\n"
        "channel.write('first'); channel.write(channel.read() + ' again')\n"
        "assert channel.read() == ''"  # its supervisor has closed the pipe
    )
    process = start((sys.executable, "-c", program), channel=True)
    lines: list[str] = []
    process.write("what was asked")
    end_s = time.monotonic() + 10.0
    while len(lines) < 2 and time.monotonic() < end_s:
        lines += process.read()
    assert lines == ["first", "what was asked again"]
    process.end()
    process.write("nobody reads this")
    assert child.channel() is None


def test_a_supervisor_that_does_not_read_does_not_stop_its_child() -> None:
    program = (
        "from lingvo_gpipe.cluster import child\n"
        "channel = child.channel()\n"
        "for step in range(100000): channel.write(f'step {step}')"
    )
    process = start((sys.executable, "-c", program), channel=True)
    wait_for(lambda: process.exit_code == 0)
    assert process.read()[:2] == ["step 0", "step 1"]
    process.end()


def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import os, sys, time\n"
        "from lingvo_gpipe.cluster import child\n"
        f"started = child.Child({SLEEP!r}, child.Settings(dict(os.environ)))\n"
        "print(started.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 2.0)


def test_a_private_network_has_nothing_but_its_own_loopback(tmp_path: Path) -> None:
    try:
        network = isolation.PrivateNetwork()
    except OSError as error:
        pytest.skip(f"this system allows no network namespace: {error.strerror}")
    program = (
        "import pathlib, socket, sys, time\n"
        "server = socket.create_server(('127.0.0.1', 2222))\n"
        "socket.create_connection(('127.0.0.1', 2222)).close()\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: text = error.strerror\n"
        "pathlib.Path(sys.argv[1]).write_text(text); time.sleep(60)"
    )
    outs = [tmp_path / "0", tmp_path / "1"]
    first = start((sys.executable, "-c", program, str(outs[0])), prepare=network.enter)
    try:
        wait_for(lambda: outs[0].exists() and outs[0].read_text())
        # The same network: the port is taken there, and free outside.
        second = start((sys.executable, "-c", program, str(outs[1])), prepare=network.enter)
        network.close()
        wait_for(lambda: second.state() == "ended with exit code 1")
        second.end()
    finally:
        first.end()
    assert outs[0].read_text() == "Network is unreachable"
    assert not outs[1].exists()


def test_cores_are_shared_out() -> None:
    assert local.shares([0, 1], 2) == [[0], [1]]
    assert local.shares([3], 2) == [[3], [3]]
    assert local.shares([0, 1, 2, 3], 3) == [[0], [1], [2, 3]]


def test_an_interrupt_waits_until_the_child_can_receive_it(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, sys, time\n"
        "from lingvo_gpipe.cluster import child\n"
        # Tests that run in the background of a shell ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "try: child.receive_interrupts(); time.sleep(60)\n"
        "except KeyboardInterrupt: sys.exit(7)"
    )
    began, sent = tmp_path / "began", tmp_path / "sent"
    process = start((sys.executable, "-c", program, str(began), str(sent)))
    try:
        wait_for(began.exists)
        process.signal(signal.SIGINT)
        sent.touch()
        wait_for(lambda: process.state() == "ended with exit code 7")
    finally:
        process.end()
