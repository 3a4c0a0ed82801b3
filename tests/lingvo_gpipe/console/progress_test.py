"""Progress: a bar on a terminal, lines in logs."""

from __future__ import annotations

import io
import re
import sys

import pytest

from lingvo_gpipe.console import progress


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_at_the_begin_after_the_first_step_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = progress.Progress(total=100, start=40)
    for step in range(41, 101):
        shown.update(step, {"loss": 1.0 / step})
    shown.close()
    begin, first, last = capsys.readouterr().err.splitlines()
    assert begin.startswith("step 40/100 [")
    assert first.startswith("step 41/100, loss=0.02439 [")
    assert re.fullmatch(r"step 100/100, loss=0.01 \[00:0\d<00:00, .*step/s\]", last)


def test_a_log_gets_lines_of_long_work_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (3, None):
        with progress.Count("reading", "pair", total) as count:
            assert list(count.over("abc")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_LOG_INTERVAL_S", 0.0)
    with progress.Count("reading", "pair", 4000) as count:
        count.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("reading 0/4000 [")
    assert lines[-1].startswith("reading 1000/4000 [")


def test_a_terminal_gets_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = progress.Progress(total=100, start=40)
    shown.update(70, {"loss": 0.25})
    shown.close()
    text = terminal.getvalue()
    assert "70/100 [" in text
    assert "loss=0.25" in text
    assert text.count("\n") == 1


def test_passing_work_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.Count("evaluating", "mini-batch", 5, passing=True) as count:
        count.update()
    assert "0/5 [" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[0].split("\r")[-1].strip() == ""


def test_a_full_disk_under_a_log_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    shown = progress.Progress(total=2, start=0)
    shown.update(1, {"loss": 0.25})
    shown.close()
