"""ZB-V: two cells per device, there and back, and no bubble but fill and drain."""

from __future__ import annotations

from lingvo_gpipe.schedule.named import there_and_back
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def zb_v(num_devices: int, num_micro_batches: int, cells_per_device: int = 2) -> Table:
    """Return the ZB-V table: device k has cells k and 2K-1-k.

    With F, I and W equally long and M ≥ K each device waits for K-1 slots, while it fills and
    drains: a sixth of 1F1B's bubble, as cells have half the size. At most 2K of the cells'
    micro-batches are live on a device, which is as much as on 1F1B's first one.

    Raises:
        ScheduleError: a number is less than 1, or `cells_per_device` is not 2.

    Source: Qi et al. 2023, section 6. With M < 2K-1, the first M micro-batches of its table for
    2K-1, with W where devices would wait; with M < K, a device's second cell comes first.

    >>> print(zb_v(num_devices=2, num_micro_batches=3).grid())
    device 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 0B0 .   3F2 3I2 0I1 3W2 0I2 0W1 0W2
    device 1: .   1F0 2F0 1F1 2F1 2B0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    check_sizes("zb_v", num_devices, num_micro_batches, cells_per_device, wanted=2)
    return there_and_back.table(num_devices, num_micro_batches, _order)


def _order(k: int, K: int, M: int) -> list[Slot]:
    """Return the order of device k; with few micro-batches, that of 2K-1 without the others."""
    order = there_and_back.Order(k, K)
    order.repeat("F0", 2 * (K - k) - 1)
    order.repeat("F1 F0", k)
    order.repeat("F1 I1 W1", K - k)
    order.repeat("F0 I0 W0 F1 I1 W1", max(M, 2 * K - 1) - (2 * K - 1 - k))
    order.repeat("I0 W0 F1 I1 W1", K - 1 - k)
    order.repeat("I0 I1", k)
    order.repeat("I0 W0", K - k)
    order.repeat("W1", k)
    order.repeat("W0", k)
    return order.of_micro_batches(M)
