"""Progress of a run: a bar on a terminal, elsewhere a line at intervals."""

from __future__ import annotations

import abc
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TextIO, TypeAlias, TypeVar

import tqdm

from lingvo_gpipe.console import units

_Item = TypeVar("_Item")
# A line says that work has begun before its user wonders.
_FIRST_LINE_S = 1.5
# Two rates that are shown within this time differ at most by this factor.
_STEADY_S, _STEADY_FACTOR = 1.0, 3.0
# `done` and `pace` are texts of `_texts`.
_BAR = "{desc}: {percentage:3.0f}%|{bar}|{done} [{elapsed}<{remaining}{pace}]"
_WITHOUT_BAR = "{desc}: {percentage:3.0f}%{done} [{elapsed}<{remaining}{pace}]"
_WITHOUT_TOTAL = "{desc}:{done} [{elapsed}{pace}]"
_BAR_OF_STEPS = "{percentage:3.0f}%|{bar}|{done} [{elapsed}<{remaining}{pace}{postfix}]"
_Timer: TypeAlias = Callable[[float, Callable[[], None]], threading.Timer]


class _Pace:
    """How fast work goes: the mean since its first part, which may have waited for a graph.

    Where parts take very different times, what is shown changes gradually.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        self._shown: tuple[float, float] | None = None

    def note(self, now: float, count: float) -> None:
        """Note that `count` things are done."""
        self._last = (now, count)
        self._first = self._first or self._last

    def rate(self) -> float:
        """Return things per second; 0, which is not shown, while only the first part is done."""
        if self._first is None or self._last is None or self._last[1] == self._first[1]:
            return 0.0
        now = self._clock()
        rate = (self._last[1] - self._first[1]) / max(now - self._first[0], 1e-9)
        if self._shown is not None:
            then, before = self._shown
            if now - then < _STEADY_S:
                return before
            rate = min(max(rate, before / _STEADY_FACTOR), before * _STEADY_FACTOR)
        self._shown = (now, rate)
        return rate


def _texts(count: int, total: int | None, unit: str, rate: float) -> dict[str, Any]:
    """Return tqdm's fields for a count of things named `unit`, at `rate` things per second."""
    done = units.things(count, unit) if total is None else f"{count:,}/{units.things(total, unit)}"
    pace = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return {
        "rate": rate,
        "done": f" {done}" if unit else "",
        "pace": f", {pace} {unit if pace == '1' else units.plural(unit)}/s"
        if unit and rate
        else "",
    }


class _Bar(tqdm.tqdm):
    """A bar that shows the rate of `pace`."""

    pace: _Pace | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """What is shown; tqdm's interface for other texts than its own."""
        shown: dict[str, Any] = super().format_dict
        rate = 0.0 if self.pace is None else self.pace.rate()
        return {**shown, **_texts(self.n, self.total, self.unit, rate)}


def _has_width(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with room for a bar; some have no known width."""
    if not stream.isatty():
        return False
    with contextlib.suppress(OSError):  # what is not a file has no size, and may be a terminal
        return os.get_terminal_size(stream.fileno()).columns > 0
    return True


class _Display(abc.ABC):
    """A bar on a terminal; on anything else (a file, a scheduler's log) lines at intervals."""

    def __init__(
        self,
        interval_s: float,
        stream: TextIO | None,
        clock: Callable[[], float],
        timer: _Timer,
        **bar: Any,
    ) -> None:
        """Begin.

        Args:
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
            timer: seconds and a function, which it calls after them once it is started.
            bar: arguments of the bar.
        """
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._started_s = clock()
        self._next_s = 0.0
        self._rate = _Pace(clock)
        self._lock = threading.Lock()
        self._bar: _Bar | None = None
        self._timer: threading.Timer | None = None
        if _has_width(self._stream):
            self._bar = _Bar(file=self._stream, dynamic_ncols=True, **bar)
            self._bar.pace = self._rate
        else:
            # The first part may take much longer than the line should wait for.
            self._timer = timer(_FIRST_LINE_S, self._show_waiting)
            self._timer.daemon = True

    def close(self) -> None:
        """Leave the bar as it is; show no further line."""
        if self._timer is not None:
            self._timer.cancel()
        if self._bar is not None:
            self._bar.close()

    def _begin(self) -> None:
        """Start the timer; the last thing that a subclass does in `__init__`."""
        if self._timer is not None:
            self._timer.start()

    @abc.abstractmethod
    def _show_waiting(self) -> None:
        """Write a line for work that has not come far; called from a thread of its own."""

    def _line_is_due(self, now: float, *, last: bool = False) -> bool:
        """Return whether a line is to be written now, and plan the next."""
        if now < self._next_s and not last:
            return False
        self._next_s = now + self._interval_s
        return True

    def _write(self, line: str) -> None:
        # Work does not stop because the reader of a log has ended, or its disk is full.
        with contextlib.suppress(OSError):
            self._stream.write(f"{line}\n")
            self._stream.flush()


class Progress(_Display):
    """Shows steps, rate, loss and time left on the standard error.

    The first step, which traces the graphs, counts in no rate. Without a terminal, a line comes
    after 1.5 seconds if there is no step yet, one after the first step, and then one every
    `interval_s` seconds.
    """

    def __init__(
        self,
        *,
        total: int,
        start: int,
        interval_s: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: _Timer = threading.Timer,
    ) -> None:
        """Begin at step `start` of `total`.

        Args:
            total: step at which the run ends.
            start: step at which it begins (a resumed run's is not 0).
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
            timer: as in `Count`.
        """
        bar = {"total": total, "initial": start, "unit": "step", "bar_format": _BAR_OF_STEPS}
        super().__init__(interval_s, stream, clock, timer, **bar)
        self._total = total
        self._begun: tuple[int, float] | None = None
        self._last_line = (start, self._started_s)
        self._begin()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step` steps are done, and values of the last one (its loss)."""
        now = self._clock()
        self._rate.note(now, step)
        if self._bar is not None:
            shown = {name: f"{value:.4g}" for name, value in values.items()}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        with self._lock:
            if self._line_is_due(now, last=step >= self._total):
                numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
                self._write(f"step {step}/{self._total}  {numbers}  {self._pace(step, now)}")

    def _show_waiting(self) -> None:
        with self._lock:
            if self._begun is None and self._last_line[0] < self._total:
                step, _ = self._last_line
                self._write(f"step {step}/{self._total}  the next one builds its graphs first")

    def _pace(self, step: int, now: float) -> str:
        """Return the rate since the last line, and the time left at the overall rate."""
        if self._begun is None:
            self._begun = self._last_line = (step, now)
            return f"first step after {now - self._started_s:.1f} s"
        rate = (step - self._last_line[0]) / max(now - self._last_line[1], 1e-9)
        overall = (step - self._begun[0]) / max(now - self._begun[1], 1e-9)
        self._last_line = (step, now)
        left_s = (self._total - step) / overall if overall > 0 else 0.0
        return f"{rate:.3g} steps/s  left {tqdm.tqdm.format_interval(round(left_s))}"


class Count(_Display):
    """Shows how many things are done of some work, on the standard error.

    Without a terminal, a line comes after 1.5 seconds and then every `interval_s`, and none where
    the work is done before.

    >>> with Count("reading", "pair", total=2) as count:
    ...     items = [item for item in count.over("ab")]
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None = None,
        *,
        interval_s: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: _Timer = threading.Timer,
        passing: bool = False,
    ) -> None:
        """Begin with 0.

        Args:
            what: name of the work.
            unit: name of one of the things that are counted; empty: only the time is shown.
            total: how many there will be; None: not known.
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
            timer: seconds and a function, which it calls after them once it is started.
            passing: the bar appears only after 1.5 seconds, and is removed at the end.
        """
        bar_format = _WITHOUT_TOTAL if total is None else _BAR
        bar: dict[str, Any] = {"desc": what, "unit": unit, "total": total}
        bar["bar_format"] = bar_format
        if passing:
            bar |= {"delay": _FIRST_LINE_S, "leave": False}
        super().__init__(interval_s, stream, clock, timer, **bar)
        self._what, self._unit, self._total = what, unit, total
        self._next_s = self._started_s + min(interval_s, _FIRST_LINE_S)
        self._count = 0
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items; each counts as done when the next is asked for."""
        for item in items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        """Show that `count` more are done."""
        self._count += count
        now = self._clock()
        self._rate.note(now, self._count)
        if self._bar is not None:
            self._bar.update(count)
        elif now >= self._next_s:
            self._show_waiting()

    def _show_waiting(self) -> None:
        with self._lock:
            now = self._clock()
            if self._line_is_due(now):
                self._write(
                    tqdm.tqdm.format_meter(
                        self._count,
                        self._total,
                        now - self._started_s,
                        prefix=self._what,
                        bar_format=_WITHOUT_TOTAL if self._total is None else _WITHOUT_BAR,
                        **_texts(self._count, self._total, self._unit, self._rate.rate()),
                    )
                )
