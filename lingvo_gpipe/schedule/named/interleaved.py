"""Interleaved 1F1B: V cells per device, for a bubble V times smaller."""

from __future__ import annotations

from lingvo_gpipe.schedule.named import rounds
from lingvo_gpipe.schedule.table import Table, check_sizes


def interleaved(num_devices: int, num_micro_batches: int, cells_per_device: int = 2) -> Table:
    """Return the interleaved 1F1B table; with V=1 it is 1F1B.

    The bubble is (K-1)/(V·M+K-1) with equal cells and M ≥ K, and every backward of the last cell
    directly follows its forward. On device k at most (V-1)·G + K-k of the cells' micro-batches
    are live, with rounds of G micro-batches: K, or more where M is not divisible by K. It is the
    least lead with which no device waits; the source runs K-1-k forwards more ahead.

    Raises:
        ScheduleError: a number is less than 1.

    Source: Narayanan et al. 2021, figure 4; any M as in rounds of equal sizes.

    >>> print(interleaved(num_devices=2, num_micro_batches=4).grid())
    device 0: 0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 .   2B3 0B2 0B3
    device 1: .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    check_sizes("interleaved", num_devices, num_micro_batches, cells_per_device, wanted=None)
    return Table.on_grid(rounds.orders(num_devices, num_micro_batches, cells_per_device, "B"))
