"""Progress of a run: tqdm's bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

import tqdm

_Item = TypeVar("_Item")
_LOG_INTERVAL_S = 30.0
_OF_LOG = "{desc} {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"
_OF_LOG_WITHOUT_TOTAL = "{desc} {n_fmt} [{elapsed}, {rate_fmt}]"


class _Log:
    """A file or a scheduler's log: each state of a bar is a line there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        with contextlib.suppress(OSError):  # a full disk under a log does not end the work
            self._stream.write(f"{line}\n" if line else "")
            self._stream.flush()

    def flush(self) -> None:
        """Every line is flushed as it is written."""


class Count(tqdm.tqdm):
    """Shows how many things are done of some work, on the standard error.

    >>> with Count("reading", "pair", total=2) as count:
    ...     items = [item for item in count.over("ab")]
    """

    def __init__(
        self, what: str, unit: str, total: int | None = None, *, passing: bool = False, **bar: Any
    ) -> None:
        """Begin with 0.

        Args:
            what: name of the work.
            unit: name of one of the things that are counted.
            total: how many there will be; None: not known.
            passing: the bar is removed at the end.
            bar: further arguments of tqdm's.
        """
        if not sys.stderr.isatty():
            bar = {
                "file": _Log(sys.stderr),
                "mininterval": _LOG_INTERVAL_S,
                "maxinterval": _LOG_INTERVAL_S,
                "delay": _LOG_INTERVAL_S,  # no line for short work
                "bar_format": _OF_LOG_WITHOUT_TOTAL if total is None else _OF_LOG,
                **bar,
            }
        super().__init__(
            desc=what, unit=unit, total=total, leave=not passing, dynamic_ncols=True, **bar
        )

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items; each counts as done when the next is asked for."""
        for item in items:
            yield item
            self.update()


class Progress:
    """Shows steps, their rate, losses and the time left on the standard error."""

    def __init__(self, *, total: int, start: int) -> None:
        """Begin at step `start` of `total`."""
        self._bar = Count("step", "step", total, initial=start, delay=0)
        self._start = start

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step` steps are done, and values of the last one (its loss)."""
        is_first = self._bar.n == self._start
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if is_first:
            self._bar.refresh()

    def close(self) -> None:
        """Leave the last state as it is."""
        self._bar.close()
