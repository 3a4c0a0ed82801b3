"""Progress of a run: a bar on a terminal, elsewhere a line at intervals."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TextIO, TypeVar

import tqdm

_Item = TypeVar("_Item")
_WITHOUT_BAR = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


class _Display:
    """A bar on a terminal; on anything else (a file, a scheduler's log) lines at intervals."""

    def __init__(
        self,
        interval_s: float,
        stream: TextIO | None,
        clock: Callable[[], float],
        **bar: Any,
    ) -> None:
        """Begin.

        Args:
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
            bar: arguments of the bar.
        """
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._started_s = clock()
        self._next_s = 0.0
        self._bar: tqdm.tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(file=self._stream, dynamic_ncols=True, **bar)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

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

    Without a terminal, a line comes after the first step, which traces the graphs and counts in no
    rate, and then one every `interval_s` seconds.
    """

    def __init__(
        self,
        *,
        total: int,
        start: int,
        interval_s: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin at step `start` of `total`.

        Args:
            total: step at which the run ends.
            start: step at which it begins (a resumed run's is not 0).
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
        """
        super().__init__(interval_s, stream, clock, total=total, initial=start, unit="step")
        self._total = total
        self._begun: tuple[int, float] | None = None
        self._last_line = (start, self._started_s)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step` steps are done, and values of the last one (its loss)."""
        if self._bar is not None:
            shown = {name: f"{value:.4g}" for name, value in values.items()}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = self._clock()
        if self._line_is_due(now, last=step >= self._total):
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._write(f"step {step}/{self._total}  {numbers}  {self._pace(step, now)}")

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

    Without a terminal, a line comes every `interval_s` seconds, and none where the work is done
    before.

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
    ) -> None:
        """Begin with 0.

        Args:
            what: name of the work.
            unit: name of the things that are counted.
            total: how many there will be; None: not known.
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
        """
        super().__init__(
            interval_s, stream, clock, desc=what, unit=unit, total=total, unit_scale=True
        )
        self._what, self._unit, self._total = what, unit, total
        self._next_s = self._started_s + interval_s
        self._count = 0

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
        if self._bar is not None:
            self._bar.update(count)
            return
        now = self._clock()
        if self._line_is_due(now):
            self._write(
                tqdm.tqdm.format_meter(
                    self._count,
                    self._total,
                    now - self._started_s,
                    prefix=self._what,
                    unit=self._unit,
                    unit_scale=True,
                    bar_format=None if self._total is None else _WITHOUT_BAR,
                )
            )
