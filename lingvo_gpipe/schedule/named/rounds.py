"""Micro-batches in rounds: the order of forwards and backwards where a device has several cells.

A device takes the micro-batches of a round through its first cell, then all of them through its
second, and so on; then the next round. Backwards take the cells in the opposite order.
"""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Phase, Slot


def sizes(num_devices: int, num_micro_batches: int) -> list[int]:
    """Return the number of micro-batches in each round, larger rounds first.

    A round has K or more, as few as they can be, so that a device's second cell finds its first
    input there when the first cell has done the round. If M < K, all are one round.

    >>> sizes(num_devices=4, num_micro_batches=8), sizes(4, 11), sizes(4, 3)
    ([4, 4], [6, 5], [3])
    """
    count = max(1, num_micro_batches // num_devices)
    size, larger = divmod(num_micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def orders(
    num_devices: int, num_micro_batches: int, cells_per_device: int, backward: Phase
) -> list[list[Slot]]:
    """Return each device's forwards and backwards in order, cell k on device k mod K.

    Before its first backward, device k runs the forwards of all cells but its last one for a
    round, and K-k more; then backwards and forwards alternate. In the last cell every backward
    directly follows its forward. With equal cells no device waits between its first forward and
    its last one if M ≥ K.

    Args:
        num_devices: K.
        num_micro_batches: M.
        cells_per_device: V.
        backward: phase of the backwards: B or I.
    """
    last = cells_per_device - 1
    forwards: list[tuple[int, int]] = []  # (which of the device's cells, micro-batch)
    backwards: list[tuple[int, int]] = []
    ahead: list[int] = []  # per backward: forwards of the device's earlier cells in its round
    first = 0
    for size in sizes(num_devices, num_micro_batches):
        for which in range(cells_per_device):
            for m in range(first, first + size):
                forwards.append((which, m))
                backwards.append((last - which, m))
                ahead.append(last * size)
        first += size
    # Where a smaller round follows, the last backwards of the larger one are without a forward
    # between them, so that each forward of the last cell still meets its backward.
    ahead = ahead[last:] + ahead[len(ahead) - last :]
    found = []
    for device in range(num_devices):
        cells = range(device, num_devices * cells_per_device, num_devices)
        order: list[Slot] = []
        done = 0
        for place, (which, m) in enumerate(backwards):
            until = min(place + ahead[place] + num_devices - device, len(forwards))
            order += [Slot(cells[cell], "F", number) for cell, number in forwards[done:until]]
            done = max(done, until)
            order.append(Slot(cells[which], backward, m))
        found.append(order)
    return found
