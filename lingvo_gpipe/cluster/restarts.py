"""When a run is started again after a loss, and when it is given up."""

from __future__ import annotations

import time
from collections.abc import Callable

from lingvo_gpipe import errors

SAME_STEP = 3
"""Losses in a row at one step after which the run is given up."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_WINDOW_S = 600.0
# A start that lasted longer than this, and came further than all before it, has made progress.
_PROGRESS_S = 60.0


class Restarts:
    """Counts the losses of a run.

    Attributes:
        count: restarts so far.

    >>> restarts = Restarts(10)
    >>> [restarts.wait_s("worker 1 was killed", step) for step in (7, 9, 7, 9)]
    [0.0, 1.0, 2.0, 4.0]
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Count none yet.

        Args:
            max_restarts: how often the run may be started again.
            clock: returns seconds.
        """
        self.count = 0
        self._max_restarts = max_restarts
        self._clock = clock
        self._step: int | None = None
        self._furthest = -1
        self._in_a_row = 0
        self._recent: list[float] = []
        self._started_s = clock()

    def wait_s(self, fault: str, step: int | None) -> float:
        """Return how many seconds to wait before the next start.

        The first loss is not waited for. Each further one within ten minutes doubles the time,
        whatever its step, until a start makes progress.

        Args:
            fault: what was lost.
            step: the step that was being done; None: the run had not begun.

        Raises:
            DeviceError: the run is given up.
        """
        self._in_a_row = self._in_a_row + 1 if self.count and step == self._step else 1
        self._step = step
        where = "before its first step" if step is None else f"at step {step}"
        if self.count >= self._max_restarts:
            allowed = f"--max_restarts={self._max_restarts}"
            raise errors.DeviceError(
                f"{fault}, {where}, and {allowed} allows no further restart. The same command "
                "continues the run"
            )
        if self._in_a_row >= SAME_STEP:
            raise errors.DeviceError(
                f"{fault}, {where}, the {self._in_a_row}rd time in a row at the same place: "
                "another restart would not help. Look at the lines above; the same command "
                "continues the run"
            )
        self.count += 1
        return self._back_off_s(-1 if step is None else step)

    def _back_off_s(self, step: int) -> float:
        now = self._clock()
        lasted_s = now - self._started_s
        self._recent = [time_s for time_s in self._recent if now - time_s < _WINDOW_S]
        if step > self._furthest and lasted_s >= _PROGRESS_S:
            self._recent = []
        self._furthest = max(self._furthest, step)
        self._recent.append(now)
        earlier = len(self._recent) - 1
        doubled_s = _FIRST_WAIT_S * 2.0 ** (earlier - 1)
        wait_s = min(_LONGEST_WAIT_S, doubled_s) if earlier else 0.0
        self._started_s = now + wait_s
        return wait_s
