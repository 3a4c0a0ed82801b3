"""How a run ends at a stall: an operation that does not return cannot be interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable

from lingvo_gpipe.execution.executor import Executor
from lingvo_gpipe.execution.monitoring import watchdog

EXIT_CODE = 75
"""EX_TEMPFAIL, for which services start a program again.

So does the supervisor of a chief, whose code for it is the same.
"""
# Over workers, where TensorFlow waits forever for a tensor that two workers cannot exchange, a step
# or an evaluation's mini-batch may take this long in any case, though those before it were shorter.
_SHORTEST_S = 60.0


def watchdog_of(
    executor: Executor,
    stall_after_s: float,
    folder: str,
    report: Callable[[str], None],
    *,
    ends: bool,
    over_workers: bool,
) -> watchdog.Watchdog:
    """Return a watchdog that ends the process at a stall, over workers or where it is asked to.

    Args:
        executor: runs the passes; none is traced yet.
        stall_after_s: as in `watchdog.Watchdog`.
        folder: of the run's checkpoints.
        report: as in `watchdog.Watchdog`.
        ends: whether it ends the process without workers, too (`train.end_at_stall`).
        over_workers: whether the cells are on workers, so that a supervisor starts the run again.
    """

    def end() -> None:
        if over_workers:
            report(f"the chief ends, to be started again from {folder}")
        else:
            report(
                f"the run is ended (train.end_at_stall); the same command continues it from "
                f"{folder}"
            )
        os._exit(EXIT_CODE)

    return watchdog.of_executor(
        executor,
        stall_after_s,
        report,
        end if over_workers or ends else None,
        _SHORTEST_S if over_workers else None,
    )
