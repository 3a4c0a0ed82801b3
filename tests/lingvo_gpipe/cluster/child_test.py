"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lingvo_gpipe.cluster import child
from tests.lingvo_gpipe.cluster.runs import is_gone, wait_for
from tests.support import programs

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def start(program: str) -> child.Child:
    imports = "from lingvo_gpipe.cluster import child\nchannel = child.channel()\n"
    return child.Child((sys.executable, "-c", imports + program), programs.environment())


def test_the_state_of_a_child_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child.Child(SLEEP, programs.environment())
    assert process.fault() is None
    process.signal(signal.SIGSTOP)
    wait_for(lambda: process.fault() == "its process is stopped", "the stop")
    process.signal(signal.SIGCONT)
    wait_for(lambda: process.fault() is None, "the continuation")
    monkeypatch.setattr(child, "STOPPED_AFTER_S", 60.0)
    process.signal(signal.SIGSTOP)
    assert process.fault() is None  # not for long enough
    process.end()
    assert process.fault() == "killed by SIGKILL"
    process = start("raise SystemExit(3)")
    wait_for(lambda: process.fault() == "ended with exit code 3", "the end")
    process.end()


def test_lines_go_both_ways_and_a_child_that_ends_loses_them() -> None:
    process = start(
        "channel.write('first'); channel.write(channel.wait() + ' again')\n"
        "assert channel.wait() == ''"  # its supervisor has closed the channel
    )
    lines: list[str] = []
    process.channel.write("what was asked")

    def have_come() -> bool:
        lines.extend(process.channel.lines())
        return len(lines) == 2

    wait_for(have_come, "the lines")
    assert lines == ["first", "what was asked again"]
    process.channel.close()
    wait_for(lambda: process.exit_code == 0, "the end")
    process.channel.write("nobody reads this")
    assert child.channel() is None


def test_a_supervisor_that_does_not_read_does_not_stop_its_child() -> None:
    process = start("for step in range(100000): channel.write(f'step {step}')")
    wait_for(lambda: process.exit_code == 0, "the end")
    assert list(process.channel.lines())[:2] == ["step 0", "step 1"]
    process.end()


def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import os, sys, time\n"
        "from lingvo_gpipe.cluster import child\n"
        f"started = child.Child({SLEEP!r}, os.environ)\n"
        "print(started.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=programs.environment(),
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    wait_for(lambda: is_gone(pid), "the end", 2.0)
