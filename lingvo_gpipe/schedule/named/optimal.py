"""The best table of a few cells and micro-batches, by search."""

from __future__ import annotations

import dataclasses

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import search
from lingvo_gpipe.schedule.named import weight_slots
from lingvo_gpipe.schedule.table import Table, check_sizes

MAX_STATES = 200_000
"""About a second of search, and the same table on every machine."""


def optimal(num_devices: int, num_micro_batches: int, cells_per_device: int = 1) -> Table:
    """Return a table that no other one beats: the shortest, and of those one with fewest live.

    F, I and W are equally long. A device's live micro-batches are counted for each of its cells.
    Cell k is on device k mod K; there and back, no better table was found for K·M·V ≤ 48.

    Raises:
        ScheduleError: a number is less than 1, or the search is too long for these numbers.

    >>> print(optimal(num_devices=2, num_micro_batches=3).grid())
    cell 0: F0 F1 .  B0 F2 B1 .  .  B2
    cell 1: .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    check_sizes("optimal", num_devices, num_micro_batches, cells_per_device, wanted=None)
    devices = tuple(range(num_devices)) * cells_per_device
    try:
        best = _best(search.Problem(devices, num_micro_batches, split=True))
    except search.SearchLimitError:
        raise ScheduleError(
            f"optimal for num_devices={num_devices}, num_micro_batches={num_micro_batches}, "
            f"cells_per_device={cells_per_device}: the search is too long. Use fewer, or zb_h1, "
            "or zb_v for two cells per device"
        ) from None
    rows = [[slot for slot in row if slot is not None] for row in best.devices]
    return Table.on_grid(weight_slots.joined(rows))


def _best(problem: search.Problem) -> Table:
    """Return the shortest table, and of those one with the fewest live micro-batches.

    Raises:
        SearchLimitError: it was not found, or not proved, within `MAX_STATES`.
    """
    left, ticks, table = MAX_STATES, problem.lower_bound() - 1, None
    while table is None:
        ticks += 1
        table, seen = search.table_within(problem, ticks, left)
        left -= seen
    while True:
        most = max(weight_slots.most_live([slot for slot in row if slot]) for row in table.devices)
        fewer = dataclasses.replace(problem, most_live=most - 1)
        better, seen = search.table_within(fewer, ticks, left)
        if better is None:
            return table
        table = better
        left -= seen
