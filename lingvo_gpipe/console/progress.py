"""How far a run is: a bar on a terminal, elsewhere a line every so often."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self, TextIO, TypeVar

import tqdm

_Item = TypeVar("_Item")
_WITHOUT_BAR = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


class Progress:
    """Shows steps, rate, loss and time left on the standard error.

    A terminal gets a bar; anything else (a file, a scheduler's log) gets a line after the first
    step, which traces the graphs and counts in no rate, and then one every `interval_s` seconds.
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
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._interval_s = interval_s
        self._clock = clock
        self._started_s = clock()
        self._begun: tuple[int, float] | None = None
        self._told = (start, self._started_s)
        self._next_s = 0.0
        self._bar: tqdm.tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total, initial=start, file=self._stream, unit="step", dynamic_ncols=True
            )

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Tell that `step` steps are done, and what came of the last one (its loss)."""
        if self._bar is not None:
            shown = {name: f"{value:.4g}" for name, value in values.items()}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = self._clock()
        if now < self._next_s and step < self._total:
            return
        self._next_s = now + self._interval_s
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        line = f"step {step}/{self._total}  {numbers}  {self._pace(step, now)}\n"
        # A log whose reader is gone, or whose disk is full, stops no run.
        with contextlib.suppress(OSError):
            self._stream.write(line)
            self._stream.flush()

    def _pace(self, step: int, now: float) -> str:
        """Tell the rate since the last line, and how long the rest takes at the overall rate."""
        if self._begun is None:
            self._begun = self._told = (step, now)
            return f"first step after {now - self._started_s:.1f} s"
        rate = (step - self._told[0]) / max(now - self._told[1], 1e-9)
        overall = (step - self._begun[0]) / max(now - self._begun[1], 1e-9)
        self._told = (step, now)
        left_s = (self._total - step) / overall if overall > 0 else 0.0
        return f"{rate:.3g} steps/s  left {tqdm.tqdm.format_interval(round(left_s))}"

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


class Count:
    """Shows how many things are done of some work, on the standard error.

    A terminal gets a bar; anything else gets a line every `interval_s` seconds, and none where the
    work is done before.

    >>> with Count("reading", "pair", total=2) as count:
    ...     found = [item for item in count.over("ab")]
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
        """Begin with none.

        Args:
            what: name of the work.
            unit: of what is counted.
            total: how many there will be; None: not known.
            interval_s: seconds between two lines where there is no terminal.
            stream: where to write; None: the standard error.
            clock: seconds, rising.
        """
        self._stream = sys.stderr if stream is None else stream
        self._what, self._unit, self._total = what, unit, total
        self._interval_s = interval_s
        self._clock = clock
        self._started_s = clock()
        self._next_s = self._started_s + interval_s
        self._count = 0
        self._bar: tqdm.tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                desc=what,
                unit=unit,
                total=total,
                file=self._stream,
                unit_scale=True,
                dynamic_ncols=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, each of which is done when the next is asked for."""
        for item in items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        """Tell that so many more are done."""
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + self._interval_s
        line = tqdm.tqdm.format_meter(
            self._count,
            self._total,
            now - self._started_s,
            prefix=self._what,
            unit=self._unit,
            unit_scale=True,
            bar_format=None if self._total is None else _WITHOUT_BAR,
        )
        # A log whose reader is gone, or whose disk is full, stops no work.
        with contextlib.suppress(OSError):
            self._stream.write(f"{line}\n")
            self._stream.flush()
