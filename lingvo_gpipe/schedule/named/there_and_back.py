"""Orders of a device with two cells, of a chain that goes there and back over the devices."""

from __future__ import annotations

from lingvo_gpipe.schedule.slot import Slot


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
