"""Zero bubble H1: 1F1B whose weight gradients are computed while a device would wait."""

from __future__ import annotations

from lingvo_gpipe.schedule.named import rounds, weight_slots
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def zb_h1(num_devices: int, num_micro_batches: int, cells_per_device: int = 1) -> Table:
    """Return the ZB-H1 table: 1F1B's order with B as I, and W by k places later on device k.

    With F, I and W equally long and M ≥ K each device waits for K-1 slots, a third of 1F1B's
    bubble. On every device as many are live as on 1F1B's first one: min(K, M). With V > 1, I and
    W are those of `interleaved`: (V-1)·G + K are live.

    Raises:
        ScheduleError: a number is less than 1.

    Source: Qi et al. 2023, section 2.3, figure 2 of handcrafted schedules.

    >>> print(zb_h1(num_devices=3, num_micro_batches=4).grid())
    cell 0: F0 F1 F2 .  .  B0 F3 B1 .  .  B2 .  B3
    cell 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    cell 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    check_sizes("zb_h1", num_devices, num_micro_batches, cells_per_device, wanted=None)
    found = []
    orders = rounds.orders(num_devices, num_micro_batches, cells_per_device, "I")
    for device, order in enumerate(orders):
        waiting: list[Slot] = []
        with_weights: list[Slot] = []
        for slot in order:
            with_weights.append(slot)
            if slot.phase == "I":
                waiting.append(Slot(slot.cell, "W", slot.micro_batch))
                if len(waiting) > device:
                    with_weights.append(waiting.pop(0))
        found.append(with_weights + waiting)
    return Table.on_grid(weight_slots.joined(found))
