"""Breadth-first: V cells per device, all micro-batches through one after the other."""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def looped_bfs(num_devices: int, num_micro_batches: int, cells_per_device: int = 2) -> Table:
    """Return the breadth-first table; with V=1 it is fill-drain.

    The bubble is (K-1)/(V·M+K-1) with equal cells and M ≥ K, as that of `interleaved`. All V·M
    are live. Each device runs one cell for all micro-batches in a row, so replicas could add that
    cell's gradients while the next one runs.

    Raises:
        ScheduleError: a number is less than 1.

    Source: Lamy-Poirier 2022, section 4.1.

    >>> print(looped_bfs(num_devices=2, num_micro_batches=3).grid())
    device 0: 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    device 1: .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
    """
    check_sizes("looped_bfs", num_devices, num_micro_batches, cells_per_device, wanted=None)
    forward = range(num_micro_batches)
    found = []
    for device in range(num_devices):
        cells = range(device, num_devices * cells_per_device, num_devices)
        found.append(
            [Slot(cell, "F", m) for cell in cells for m in forward]
            + [Slot(cell, "B", m) for cell in reversed(cells) for m in reversed(forward)]
        )
    return Table.on_grid(found)
