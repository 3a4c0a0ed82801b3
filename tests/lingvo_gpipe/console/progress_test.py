"""Progress: a bar on a terminal, lines at intervals in logs."""

from __future__ import annotations

import io

from lingvo_gpipe.console import progress


class Clock:
    """A clock whose seconds the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
    assert "70/100" in text
    assert "loss=0.25" in text
    assert "\nstep" not in text


def test_work_that_is_counted_gets_a_line_every_so_often() -> None:
    clock, log = Clock(), io.StringIO()
    with progress.Count("reading", "pair", 4000, stream=log, clock=clock) as count:
        for _ in range(4):
            clock.now_s += 20.0
            count.update(1000)
    assert log.getvalue().splitlines() == [
        "reading:  50% 2.00k/4.00k [00:40<00:40, 50.0pair/s]",
        "reading: 100% 4.00k/4.00k [01:20<00:00, 50.0pair/s]",
    ]


def test_work_of_unknown_size_is_counted_too() -> None:
    clock, log = Clock(), io.StringIO()
    with progress.Count("reading", "pair", stream=log, clock=clock) as count:
        for item in count.over(range(70)):
            assert item < 70
            clock.now_s += 1.0
    assert log.getvalue().splitlines() == [
        "reading: 30.0pair [00:30, 1.00pair/s]",
        "reading: 60.0pair [01:00, 1.00pair/s]",
    ]


def test_counted_work_is_a_bar_on_a_terminal_and_stops_for_no_full_disk() -> None:
    terminal = Terminal()
    with progress.Count("reading", "pair", 3, stream=terminal) as count:
        assert list(count.over("abc")) == ["a", "b", "c"]
    assert "reading: 100%" in terminal.getvalue()

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    with progress.Count("reading", "pair", interval_s=0.0, stream=Full()) as count:
        count.update()
