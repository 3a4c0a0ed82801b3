"""1F1B: each backward as early as it can be, so that fewer micro-batches are live."""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def one_f_one_b(num_devices: int, num_micro_batches: int, cells_per_device: int = 1) -> Table:
    """Return the 1F1B table: in cell k at most min(K-k, M) micro-batches are live, not M.

    The bubble is fill-drain's, (K-1)/(M+K-1) with equal cells. In the last cell every backward
    directly follows its forward.

    Raises:
        ScheduleError: a number is less than 1, or `cells_per_device` is not 1.

    Source: Narayanan et al. 2019 (PipeDream), with the flush at the mini-batch's end of
    Narayanan et al. 2021, figure 3.

    >>> print(one_f_one_b(num_devices=3, num_micro_batches=4).grid())
    cell 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    cell 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    cell 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    check_sizes("1f1b", num_devices, num_micro_batches, cells_per_device)
    return Table.on_grid(
        [_order(cell, num_devices, num_micro_batches) for cell in range(num_devices)]
    )


def _order(cell: int, num_devices: int, num_micro_batches: int) -> list[Slot]:
    ahead = min(num_devices - 1 - cell, num_micro_batches)
    order = [Slot(cell, "F", m) for m in range(ahead)]
    for m in range(num_micro_batches):
        if m + ahead < num_micro_batches:
            order.append(Slot(cell, "F", m + ahead))
        order.append(Slot(cell, "B", m))
    return order
