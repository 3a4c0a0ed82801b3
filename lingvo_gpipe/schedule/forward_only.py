"""Forward slots alone: evaluation, and the forward door."""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def forward_only(num_devices: int, num_micro_batches: int, cells_per_device: int = 1) -> Table:
    """Return the table that goes forward alone.

    Raises:
        ScheduleError: a number is less than 1, or `cells_per_device` is not 1.

    >>> print(forward_only(num_devices=2, num_micro_batches=3).grid())
    cell 0: F0 F1 F2
    cell 1: .  F0 F1 F2
    """
    check_sizes("forward_only", num_devices, num_micro_batches, cells_per_device)
    return Table.on_grid(
        [[Slot(cell, "F", m) for m in range(num_micro_batches)] for cell in range(num_devices)]
    )
