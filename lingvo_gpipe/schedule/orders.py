"""The order of a device's slots: what several named schedules share.

Micro-batches in rounds over the cells of a device; a chain of cells that goes there and back over
the devices; weight gradients where a device would wait, and whole backwards where nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.table import Phase, Slot, Table

Order = Sequence[Slot]


def round_sizes(num_devices: int, num_micro_batches: int) -> list[int]:
    """Return the number of micro-batches in each round, larger rounds first.

    A round has K or more, as few as they can be, so that a device's second cell finds its first
    input there when the first cell has done the round. If M < K, all are one round.

    >>> round_sizes(num_devices=4, num_micro_batches=8), round_sizes(4, 11), round_sizes(4, 3)
    ([4, 4], [6, 5], [3])
    """
    count = max(1, num_micro_batches // num_devices)
    size, larger = divmod(num_micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def in_rounds(
    num_devices: int, num_micro_batches: int, cells_per_device: int, *, backward: Phase
) -> list[list[Slot]]:
    """Return each device's forwards and backwards in order, cell k on device k mod K.

    A device takes the micro-batches of a round through its first cell, then all of them through its
    second, and so on; then the next round. Backwards take the cells in the opposite order. Before
    its first backward, device k runs the forwards of all cells but its last one for a round, and
    K-k more; then backwards and forwards alternate. In the last cell every backward directly
    follows its forward. With equal cells no device waits between its first forward and its last
    one if M ≥ K.

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
    for size in round_sizes(num_devices, num_micro_batches):
        for which in range(cells_per_device):
            for m in range(first, first + size):
                forwards.append((which, m))
                backwards.append((last - which, m))
                ahead.append(last * size)
        first += size
    # Where a smaller round follows, the last backwards of the larger one are without a forward
    # between them, so that each forward of the last cell still meets its backward.
    ahead = ahead[last:] + ahead[len(ahead) - last :]
    rows = []
    for device in range(num_devices):
        cells = range(device, num_devices * cells_per_device, num_devices)
        row: list[Slot] = []
        done = 0
        for place, (which, m) in enumerate(backwards):
            until = min(place + ahead[place] + num_devices - device, len(forwards))
            row += [Slot(cells[cell], "F", number) for cell, number in forwards[done:until]]
            done = max(done, until)
            row.append(Slot(cells[which], backward, m))
        rows.append(row)
    return rows


class ThereAndBack:
    """The slots of device k, which has cells k and 2K-1-k, written down as steps.

    >>> order = ThereAndBack(device=0, num_devices=1)
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


def later_cell_first(num_devices: int, num_micro_batches: int) -> list[list[Slot]]:
    """Return each device's slots there and back for M < K, where all M may be live at once.

    Whenever a device is free it takes a slot whose input is there, of its second cell before its
    first one. W comes last.

    >>> [" ".join(map(str, order)) for order in later_cell_first(2, 1)]
    ['0F0 3F0 3I0 0I0 3W0 0W0', '1F0 2F0 2I0 1I0 2W0 1W0']
    """
    last = 2 * num_devices - 1
    # Before the first cell all forwards are done, and after the last cell all gradients are there.
    forwards = dict.fromkeys(range(last + 1), 0) | {-1: num_micro_batches}
    gradients = dict.fromkeys(range(last + 1), 0) | {last + 1: num_micro_batches}
    rows: list[list[Slot]] = [[] for _ in range(num_devices)]
    while gradients[0] < num_micro_batches:
        started = []
        for k, row in enumerate(rows):
            for cell in (last - k, k):
                if gradients[cell] < min(forwards[cell], gradients[cell + 1]):
                    started.append((row, Slot(cell, "I", gradients[cell])))
                elif forwards[cell] < forwards[cell - 1]:
                    started.append((row, Slot(cell, "F", forwards[cell])))
                else:
                    continue
                break
        for row, slot in started:
            row.append(slot)
            (gradients if slot.phase == "I" else forwards)[slot.cell] += 1
    for row in rows:
        row += [Slot(s.cell, "W", s.micro_batch) for s in row if s.phase == "I"]
    return rows


def most_live(order: Order) -> int:
    """Return the most micro-batches that are live at once where a device runs `order`."""
    live = most = 0
    for slot in order:
        live += {"F": 1, "I": 0, "W": -1, "B": -1}[slot.phase]
        most = max(most, live)
    return most


def with_weights_in_gaps(orders: Sequence[Order]) -> list[list[Slot]]:
    """Return legal orders with W moved to where the device would wait, or to the end.

    F and I stay in their order. On no device are more micro-batches live than before: where one
    more would be, the oldest W comes first. F, I and W are taken as equally long, so a W fits any
    gap and delays nothing.

    >>> orders = [[Slot(0, phase, m) for m in range(2) for phase in "FIW"]]
    >>> [list(map(str, row)) for row in with_weights_in_gaps(orders)]
    [['0F0', '0I0', '0W0', '0F1', '0I1', '0W1']]
    """
    num_cells = 1 + max(slot.cell for order in orders for slot in order)
    devices = [_GapFiller(order) for order in orders]
    done: set[Slot] = set()
    while any(device.queue for device in devices):
        started = [device.tick(num_cells, done) for device in devices]
        if not any(started):
            break  # an illegal order: the table says why
        done.update(slot for slot in started if slot is not None)
    return [device.row + device.weights for device in devices]


class _GapFiller:
    """A device that runs F and I in a given order and fills gaps with W.

    Attributes:
        queue: F and I that have not run.
        row: the slots that have run.
        weights: W of micro-batches whose I has run.
    """

    def __init__(self, order: Order) -> None:
        self.queue = [slot for slot in order if slot.phase != "W"]
        self.row: list[Slot] = []
        self.weights: list[Slot] = []
        self._live = 0
        self._most_live = most_live(order)

    def tick(self, num_cells: int, done: set[Slot]) -> Slot | None:
        """Return the slot that begins at this tick of a clock whose every tick is a slot."""
        if self.queue and self._may_run(self.queue[0], num_cells, done):
            slot = self.queue.pop(0)
        elif self.weights:
            slot = self.weights.pop(0)
        else:
            return None
        self.row.append(slot)
        self._live += {"F": 1, "I": 0, "W": -1}[slot.phase]
        if slot.phase == "I":
            self.weights.append(Slot(slot.cell, "W", slot.micro_batch))
        return slot

    def _may_run(self, slot: Slot, num_cells: int, done: set[Slot]) -> bool:
        if slot.phase == "F" and self._live == self._most_live:
            return False
        return all(need in done for need in slot.needs(num_cells) if need.phase not in "BR")


def with_whole_backwards(orders: Sequence[Order]) -> list[list[Slot]]:
    """Return legal orders with B in place of I and W wherever that keeps no slot waiting.

    I and W must follow each other, and the previous cell must need the gradient only after W,
    whether forwards are kept or computed again. One B costs a program less, and nothing lies in
    memory between I and W.

    >>> order = [Slot(0, phase, 0) for phase in "FIW"]
    >>> [list(map(str, row)) for row in with_whole_backwards([order])]
    [['0F0', '0B0']]
    """
    table = Table(tuple(map(tuple, orders)))
    timelines = [
        {span.slot: span for span in simulate.simulate(table, seconds).spans}
        for seconds in (simulate.EQUAL_SLOTS, simulate.EQUAL_SLOTS_RECOMPUTING)
    ]

    def is_awaited(weights: Slot) -> bool:
        """Whether the previous cell needs the gradient before this W ends."""
        reader = Slot(weights.cell - 1, "I", weights.micro_batch) if weights.cell else None
        return reader is not None and any(
            spans[reader].start_s < spans[weights].end_s for spans in timelines
        )

    rows = []
    for order in orders:
        row: list[Slot] = []
        for slot in order:
            follows_its_i = row and row[-1] == Slot(slot.cell, "I", slot.micro_batch)
            if slot.phase == "W" and follows_its_i and not is_awaited(slot):
                row[-1] = Slot(slot.cell, "B", slot.micro_batch)
            else:
                row.append(slot)
        rows.append(row)
    return rows
