"""Tables of evaluation: forwards alone, of a table's cells on their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table


def forward_table(table: Table, num_micro_batches: int) -> Table:
    r"""Return the forward-only table of the same cells on the same devices, for M micro-batches.

    Whenever a device is free it takes one of its cells whose input is there: the last such cell, so
    that few micro-batches are under way, or the first one if that ends sooner with equal slots.

    >>> there_and_back = Table.from_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    >>> print(forward_table(there_and_back, num_micro_batches=4).grid())
    device 0: 0F0 0F1 0F2 3F0 0F3 3F1 .   3F2 .   3F3
    device 1: .   1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3
    """
    devices = [table.device_of(cell) for cell in range(table.num_cells)]
    tables = [_greedy(devices, num_micro_batches, which) for which in (max, min)]
    return min(tables, key=lambda each: max(map(len, each.devices)))


def _greedy(
    devices: Sequence[int], num_micro_batches: int, which: Callable[[list[int]], int]
) -> Table:
    """Return a table by a clock whose every tick is a slot; `which` chooses among ready cells."""
    orders: list[list[Slot]] = [[] for _ in range(1 + max(devices))]
    done = [num_micro_batches] + [0] * len(devices)  # forwards before each cell, and of the last
    while done[-1] < num_micro_batches:
        ready: dict[int, list[int]] = {}
        for cell, device in enumerate(devices):
            if done[cell] > done[cell + 1]:
                ready.setdefault(device, []).append(cell)
        for device, cells in ready.items():
            cell = which(cells)
            orders[device].append(Slot(cell, "F", done[cell + 1]))
            done[cell + 1] += 1
    return Table.on_grid(orders)
