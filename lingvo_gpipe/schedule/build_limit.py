"""The time to build the graph of a mini-batch, which grows with cells × micro-batches.

Measured from `build` to the end of the first step, on two cores, for K=2 and 4, L=6 and 30, M=64
to 1,024: 4.3 to 7.1 ms for each of the 2·K·M calls.
"""

from __future__ import annotations

from lingvo_gpipe.errors import ScheduleError

CALL_S = 0.005
"""Seconds to build one call."""

MANY = 300
"""Micro-batches of a mini-batch above which the user reads how long the graph takes to build."""


def expected_s(num_cells: int, num_micro_batches: int) -> float:
    """Return the seconds in which a step of training is expected to be built.

    >>> expected_s(num_cells=4, num_micro_batches=100)
    4.0
    """
    return 2 * num_cells * num_micro_batches * CALL_S


def check(num_cells: int, num_micro_batches: int, limit_s: float) -> None:
    """Refuse more micro-batches than can be built in `limit_s`.

    Raises:
        ScheduleError: the text has the largest number that can, and the way out.
    """
    wanted_s = expected_s(num_cells, num_micro_batches)
    if num_micro_batches > MANY and wanted_s > limit_s:
        most = max(MANY, int(limit_s / expected_s(num_cells, 1)))
        raise ScheduleError(
            f"{num_micro_batches} micro-batches in a mini-batch: its graph would take about "
            f"{_duration(wanted_s)} to build. Use at most {most}, or smaller mini-batches with "
            f"train.accumulate, or allow it by model.max_build_s={wanted_s:.0f}"
        )


def warning(num_cells: int, num_micro_batches: int) -> str | None:
    """Return what a user should know before the graph of M micro-batches is built."""
    if num_micro_batches <= MANY:
        return None
    return (
        f"{num_micro_batches} micro-batches in a mini-batch: its graph takes about "
        f"{_duration(expected_s(num_cells, num_micro_batches))} to build"
    )


def _duration(seconds: float) -> str:
    """Return seconds as text for a reader.

    >>> _duration(90), _duration(90_000), _duration(10_000_000)
    ('90 s', '25 hours', '116 days')
    """
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
