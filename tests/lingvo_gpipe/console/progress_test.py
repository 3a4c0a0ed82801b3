"""Progress: a bar on a terminal, lines at intervals in logs."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import tqdm

from lingvo_gpipe.console import progress


class Clock:
    """A clock whose seconds the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Timer:
    """A timer that calls its function when the test says so."""

    made: list[Timer]

    def __init__(self, delay_s: float, function: Callable[[], None]) -> None:
        self.delay_s, self.call = delay_s, function
        self.daemon = self.is_cancelled = False
        Timer.made.append(self)

    def start(self) -> None:
        assert self.daemon

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture(autouse=True)
def no_timers() -> None:
    Timer.made = []


def count(clock: Clock, log: io.StringIO, total: int | None = None, **how: Any) -> progress.Count:
    timer: Any = Timer
    return progress.Count("reading", "pair", total, stream=log, clock=clock, timer=timer, **how)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_so_often_and_at_the_end() -> None:
    clock, log = Clock(), io.StringIO()
    shown = progress.Progress(total=100, start=40, interval_s=10.0, stream=log, clock=clock)
    clock.now_s += 7.0  # the first step traces
    for step in range(41, 101):
        clock.now_s += 0.5
        shown.update(step, {"loss": 1.0 / step})
    shown.close()
    lines = log.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "step 41/100  loss 0.02439  first step after 7.5 s"
    assert lines[1] == "step 61/100  loss 0.01639  2 steps/s  left 00:20"
    assert lines[-1] == "step 100/100  loss 0.01  2 steps/s  left 00:00"


def test_the_rate_is_that_of_the_last_stretch_and_the_rest_that_of_the_whole() -> None:
    clock, log = Clock(), io.StringIO()
    shown = progress.Progress(total=101, start=0, interval_s=10.0, stream=log, clock=clock)
    for step, seconds in ((1, 50.0), (11, 20.0), (51, 20.0)):
        clock.now_s += seconds
        shown.update(step, {})
    # 50 steps took 40 s, and 50 are left.
    assert log.getvalue().splitlines()[2].endswith("2 steps/s  left 00:40")


def test_a_terminal_gets_one_bar_that_begins_where_the_run_does() -> None:
    terminal = Terminal()
    shown = progress.Progress(total=100, start=40, stream=terminal, clock=Clock())
    shown.update(70, {"loss": 0.25})
    shown.close()
    text = terminal.getvalue()
    assert "\r" in text
    assert "70/100 steps [" in text
    assert "loss=0.25" in text
    assert "\nstep" not in text


def test_the_time_left_of_a_training_does_not_count_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, terminal = Clock(), Terminal()
    monkeypatch.setattr(tqdm.std, "time", clock)
    shown = progress.Progress(total=1000, start=0, stream=terminal, clock=clock)
    for step in range(1, 1000):
        clock.now_s += 60.0 if step == 1 else 0.5
        shown.update(step, {"loss": 1.0})
    shown.close()
    lines = re.split("[\r\n]", terminal.getvalue())
    known = [left for left in map(left_s, lines) if left is not None]
    assert len(known) > 100
    assert all(max(a, b) < 3 * max(1.0, min(a, b)) for a, b in itertools.pairwise(known))
    assert "2 steps/s, loss=1]" in terminal.getvalue()


def test_a_training_whose_first_step_takes_long_says_so_within_two_seconds() -> None:
    clock, log, timer = Clock(), io.StringIO(), cast(Any, Timer)
    shown = progress.Progress(total=9, start=4, stream=log, clock=clock, timer=timer)
    (waiting,) = Timer.made
    assert waiting.delay_s < 2.0
    waiting.call()
    assert log.getvalue() == "step 4/9  the next one builds its graphs first\n"
    shown.update(5, {})
    waiting.call()
    shown.close()
    assert waiting.is_cancelled
    assert len(log.getvalue().splitlines()) == 2


def test_work_that_is_counted_gets_a_line_every_so_often() -> None:
    clock, log = Clock(), io.StringIO()
    with count(clock, log, 4000) as counted:
        for _ in range(4):
            clock.now_s += 20.0
            counted.update(1000)
    # The rate begins with the second part.
    assert log.getvalue().splitlines() == [
        "reading:  25% 1,000/4,000 pairs [00:20<?]",
        "reading:  75% 3,000/4,000 pairs [01:00<00:20, 50 pairs/s]",
    ]


def test_work_of_unknown_size_is_counted_too() -> None:
    clock, log = Clock(), io.StringIO()
    with count(clock, log) as counted:
        for item in counted.over(range(70)):
            assert item < 70
            clock.now_s += 1.0
    assert log.getvalue().splitlines() == [
        "reading: 2 pairs [00:02, 1 pair/s]",
        "reading: 32 pairs [00:32, 1 pair/s]",
        "reading: 62 pairs [01:02, 1 pair/s]",
    ]


def test_one_thing_is_singular_and_work_without_units_shows_its_time() -> None:
    clock, log = Clock(), io.StringIO()
    with progress.Count("waiting", "", stream=log, clock=clock, interval_s=0.0) as counted:
        clock.now_s += 3.0
        counted.update()
    with progress.Count("reading", "line", 1, stream=log, clock=clock, interval_s=0.0) as counted:
        clock.now_s += 3.0
        counted.update()
    assert log.getvalue().splitlines()[0] == "waiting: [00:03]"
    assert log.getvalue().splitlines()[-1] == "reading: 100% 1/1 line [00:03<?]"


def test_a_line_appears_within_two_seconds_although_nothing_is_done() -> None:
    clock, log = Clock(), io.StringIO()
    with count(clock, log, 100) as counted:
        (timer,) = Timer.made
        clock.now_s += timer.delay_s
        timer.call()
        assert timer.delay_s < 2.0
        assert log.getvalue() == "reading:   0% 0/100 pairs [00:01<?]\n"
        timer.call()
        clock.now_s += 1.0
        counted.update(3)
        assert len(log.getvalue().splitlines()) == 1
    assert timer.is_cancelled


def left_s(line: str) -> float | None:
    found = re.search(r"<(?:(\d+):)?(\d+):(\d+),", line)
    if found is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(3600 * hours + 60 * minutes + seconds)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_time_left_does_not_jump_by_a_factor_of_ten(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    stream = Terminal() if is_terminal else io.StringIO()
    with count(clock, stream, 40_000, interval_s=2.0) as counted:
        # A graph is traced; groups of short sentences, which are fast; another graph; long ones.
        for seconds, size, times in ((30.0, 64, 1), (0.02, 64, 300), (40.0, 64, 1), (4.0, 64, 60)):
            for _ in range(times):
                clock.now_s += seconds
                counted.update(size)
    shown = [left_s(line) for line in re.split("[\r\n]", stream.getvalue())]
    known = [left for left in shown if left is not None]
    assert len(known) > 20
    assert all(max(a, b) < 10 * max(1.0, min(a, b)) for a, b in itertools.pairwise(known))
    assert max(known) > 100


def test_passing_work_has_a_bar_only_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = Clock(), Terminal()
    monkeypatch.setattr(tqdm.std, "time", clock)
    for seconds in (0.1, 1.0):
        assert terminal.getvalue() == ""
        how: Any = {"stream": terminal, "clock": clock, "passing": True}
        with progress.Count("evaluating", "mini-batch", 5, **how) as counted:
            for _ in counted.over(range(5)):
                clock.now_s += seconds
    *bars, last, end = terminal.getvalue().strip("\r").split("\r")
    assert "2/5 mini-batches [00:02<00:03, 1 mini-batch/s]" in bars[0]
    assert "5/5 mini-batches" in last
    assert end.strip() == ""


def test_a_terminal_of_unknown_width_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(terminal, "fileno", lambda: 7)
    for columns in (0, 80):
        size = os.terminal_size((columns, 24))
        monkeypatch.setattr(os, "get_terminal_size", lambda _, size=size: size)
        shown = progress.Progress(total=3, start=0, stream=terminal, clock=Clock())
        shown.update(1, {"loss": 2.0})
        shown.close()
        assert terminal.getvalue().startswith("step 1/3  loss 2  first step after")
    assert "1/3 steps" in terminal.getvalue()


def test_counted_work_is_a_bar_on_a_terminal_and_stops_for_no_full_disk() -> None:
    terminal = Terminal()
    with progress.Count("reading", "pair", 3, stream=terminal) as count:
        assert list(count.over("abc")) == ["a", "b", "c"]
    first, *_, last = re.split("[\r\n]+", terminal.getvalue().strip())
    assert re.fullmatch(r"reading:   0%\| +\| 0/3 pairs \[00:00<\?\]", first)
    assert re.match(r"reading: 100%\|#+\| 3/3 pairs \[00:00<00:00", last)

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    with progress.Count("reading", "pair", interval_s=0.0, stream=Full()) as count:
        count.update()
