"""Orders of a device with two cells, of a chain that goes there and back over the devices."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gpipe.schedule.named import weight_slots
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table


class Order:
    """The slots of device k, which has cells k and 2K-1-k, written down as steps.

    >>> order = Order(device=0, num_devices=1)
    >>> order.repeat("F0 F1 I1 W I0 W", times=2)
    >>> [str(slot) for slot in order.of_micro_batches(1)]
    ['0F0', '1F0', '1I0', '1W0', '0I0', '0W0']
    """

    def __init__(self, device: int, num_devices: int) -> None:
        """Begin with no slots."""
        self._cells = (device, 2 * num_devices - 1 - device)
        self._slots: list[Slot] = []
        self._counts = {"F0": 0, "F1": 0, "I0": 0, "I1": 0}
        self._waiting: list[Slot] = []  # W of micro-batches whose I is there

    def repeat(self, steps: str, times: int = 1) -> None:
        """Append steps.

        Args:
            steps: F0 and I0 are slots of the first cell, F1 and I1 of the second one, each of its
                next micro-batch. W is the oldest that is missing; W0 or W1, that of a cell.
            times: how often.
        """
        for step in steps.split() * times:
            if step[0] == "W":
                cells = self._cells if step == "W" else (self._cells[int(step[1])],)
                weights = next(slot for slot in self._waiting if slot.cell in cells)
                self._waiting.remove(weights)
                self._slots.append(weights)
                continue
            number = self._counts[step]
            self._counts[step] += 1
            cell = self._cells[int(step[1])]
            if step[0] == "F":
                self._slots.append(Slot(cell, "F", number))
            else:
                self._slots.append(Slot(cell, "I", number))
                self._waiting.append(Slot(cell, "W", number))

    def of_micro_batches(self, count: int) -> list[Slot]:
        """Return the slots of the first `count` micro-batches."""
        return [slot for slot in self._slots if slot.micro_batch < count]


def table(
    num_devices: int, num_micro_batches: int, order: Callable[[int, int, int], list[Slot]]
) -> Table:
    """Return a table of K devices and M micro-batches, with W where devices would wait.

    Args:
        num_devices: K.
        num_micro_batches: M; with M < K, a device's second cell comes first.
        order: (k, K, M) → slots of device k, for M ≥ K.
    """
    if num_micro_batches < num_devices:
        orders = later_cell_first(num_devices, num_micro_batches)
    else:
        orders = [order(k, num_devices, num_micro_batches) for k in range(num_devices)]
    return Table.on_grid(weight_slots.joined(weight_slots.filled(orders)))


def later_cell_first(num_devices: int, num_micro_batches: int) -> list[list[Slot]]:
    """Return each device's slots for M < K, where all micro-batches may be live at once.

    Whenever a device is free it takes a slot whose input is there, of its second cell before its
    first one. W comes last.

    >>> [" ".join(map(str, order)) for order in later_cell_first(2, 1)]
    ['0F0 3F0 3I0 0I0 3W0 0W0', '1F0 2F0 2I0 1I0 2W0 1W0']
    """
    last = 2 * num_devices - 1
    # Before the first cell all forwards are done, and after the last cell all gradients are there.
    forwards = dict.fromkeys(range(last + 1), 0) | {-1: num_micro_batches}
    gradients = dict.fromkeys(range(last + 1), 0) | {last + 1: num_micro_batches}
    orders: list[list[Slot]] = [[] for _ in range(num_devices)]
    while gradients[0] < num_micro_batches:
        started = []
        for order, k in zip(orders, range(num_devices), strict=True):
            for cell in (last - k, k):
                if gradients[cell] < min(forwards[cell], gradients[cell + 1]):
                    started.append((order, Slot(cell, "I", gradients[cell])))
                elif forwards[cell] < forwards[cell - 1]:
                    started.append((order, Slot(cell, "F", forwards[cell])))
                else:
                    continue
                break
        for order, slot in started:
            order.append(slot)
            (gradients if slot.phase == "I" else forwards)[slot.cell] += 1
    for order in orders:
        order += [Slot(s.cell, "W", s.micro_batch) for s in order if s.phase == "I"]
    return orders
