"""DualPipeV: two cells per device, there and back; a forward beside each backward."""

from __future__ import annotations

from lingvo_gpipe.schedule.named import there_and_back
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table, check_sizes


def dualpipe_v(num_devices: int, num_micro_batches: int, cells_per_device: int = 2) -> Table:
    """Return the DualPipeV table: device k has cells k and 2K-1-k.

    In its main part a forward of one of the device's cells is followed by a backward of the other
    one, of another micro-batch. They do not need each other, so what one sends can travel while the
    other computes. With F, I and W equally long and M ≥ 2K devices wait as under `zb_v`; one more
    is live, 2K+1.

    Raises:
        ScheduleError: a number is less than 1, or `cells_per_device` is not 2.

    Source: DeepSeek-AI 2024, section 3.2.1, and its DualPipeV. With M < 2K, the first M
    micro-batches of its table for 2K, with W where devices would wait; with M < K, `zb_v`.

    >>> print(dualpipe_v(num_devices=2, num_micro_batches=2).grid())
    device 0: 0F0 0F1 .   3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1
    device 1: .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 2W1 1W1
    """
    check_sizes("dualpipe_v", num_devices, num_micro_batches, cells_per_device, wanted=2)
    return there_and_back.table(num_devices, num_micro_batches, _order)


def _order(k: int, K: int, M: int) -> list[Slot]:
    """Return the order of device k; with few micro-batches, that of 2K without the others."""
    order = there_and_back.Order(k, K)
    order.repeat("F0", 2 * (K - 1 - k))
    order.repeat("F0 F1", k + 1)
    order.repeat("I1 W F1", K - 1 - k)
    order.repeat("F0 I1 W F1 I0 W", max(M, 2 * K) - 2 * K + k + 1)
    order.repeat("I1 W F1 I0 W", K - 1 - k)
    # While it drains, W comes first after each I, and from the middle on only at the end.
    whole = k + 1
    order.repeat("I1 W I0 W", whole // 2)
    if whole % 2:
        order.repeat("I1 W I0")
    order.repeat("I1 I0", whole // 2)
    order.repeat("W I0", K - 1 - k)
    order.repeat("W", whole)
    return order.of_micro_batches(M)
