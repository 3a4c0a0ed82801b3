"""GPipe's fill-drain: all forwards, then all backwards."""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def gpipe(num_devices: int, num_micro_batches: int, cells_per_device: int = 1) -> Table:
    """Return the fill-drain table; its bubble is (K-1)/(M+K-1) with equal cells.

    Backwards run from the last micro-batch to the first, so that the last cell's first backward
    meets its last forward and is fused with it.

    Raises:
        ScheduleError: a number is less than 1, or `cells_per_device` is not 1.

    Source: Huang et al. 2019, figure 2.

    >>> print(gpipe(num_devices=3, num_micro_batches=3).grid())
    cell 0: F0 F1 F2 .  .  .  .  B2 B1 B0
    cell 1: .  F0 F1 F2 .  .  B2 B1 B0
    cell 2: .  .  F0 F1 F2 B2 B1 B0
    """
    check_sizes("gpipe", num_devices, num_micro_batches, cells_per_device)
    forward = range(num_micro_batches)
    return Table.on_grid(
        [
            [Slot(cell, "F", m) for m in forward] + [Slot(cell, "B", m) for m in reversed(forward)]
            for cell in range(num_devices)
        ]
    )
