"""When a run is started again after a loss, and when it is given up."""

from __future__ import annotations

from lingvo_gpipe import errors

SAME_STEP = 3
"""Losses in a row at one step after which the run is given up."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Restarts:
    """Counts the losses of a run.

    Attributes:
        count: restarts so far.

    >>> restarts = Restarts(10)
    >>> restarts.wait_s("worker 1 was killed", step=7), restarts.wait_s("again", step=7)
    (0.0, 1.0)
    """

    def __init__(self, max_restarts: int) -> None:
        self.count = 0
        self._max_restarts = max_restarts
        self._step: int | None = None
        self._in_a_row = 0

    def wait_s(self, fault: str, step: int | None) -> float:
        """Return how many seconds to wait before the next start.

        Args:
            fault: what was lost.
            step: the step that was being done; None: the run had not begun.

        Raises:
            ClusterError: the run is given up.
        """
        self._in_a_row = self._in_a_row + 1 if self.count and step == self._step else 1
        self._step = step
        where = "before its first step" if step is None else f"at step {step}"
        if self.count >= self._max_restarts:
            allowed = f"--max_restarts={self._max_restarts}"
            raise errors.ClusterError(
                f"{fault}, {where}, and {allowed} allows no further restart. The same command "
                "continues the run"
            )
        if self._in_a_row >= SAME_STEP:
            raise errors.ClusterError(
                f"{fault}, {where}, the {self._in_a_row}rd time in a row at the same place: "
                "another restart would not help. Look at the lines above; the same command "
                "continues the run"
            )
        self.count += 1
        if self._in_a_row == 1:
            return 0.0
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (self._in_a_row - 2))
