"""Signals that reach this process while it works, or waits for a program."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lingvo_gpipe.console import signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_work_to_stop(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # a fault must not end the tests' own process
    with signals.StopRequest() as request:
        assert not request.should_stop()
        os.kill(os.getpid(), number)
        assert request.should_stop()
        assert request.seen == number
    signal.signal(number, before)


def test_ctrl_c_is_not_passed_on_since_the_terminal_sends_it_to_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = signals.handled

    @contextlib.contextmanager
    def interrupted(receive: Any) -> Iterator[None]:
        with real(receive):
            os.kill(os.getpid(), signal.SIGINT)
            yield

    monkeypatch.setattr(signals, "handled", interrupted)
    program = [sys.executable, "-c", "raise SystemExit(3)"]
    assert signals.run_program(program) == (3, signal.SIGINT)
