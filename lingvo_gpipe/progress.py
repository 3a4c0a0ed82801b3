"""How far a run is: a bar on a terminal, elsewhere a line every so often."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import tqdm


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
