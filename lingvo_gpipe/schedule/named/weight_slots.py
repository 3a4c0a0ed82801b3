"""Where weight gradients are computed: W in the bubbles, and I and W as B where nobody waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table

Order = Sequence[Slot]
_SECONDS = ((1.0, 2.0, 1.0, 1.0), (1.0, 3.0, 2.0, 1.0))
"""Lengths of F, B, I and W: from kept forwards, and with recomputation."""


def filled(orders: Sequence[Order]) -> list[list[Slot]]:
    """Return legal orders with W moved to where the device would wait, or to the end.

    F and I stay in their order. On no device are more micro-batches live than before: where one
    more would be, the oldest W comes first. F, I and W are taken as equally long, so a W fits any
    gap and delays nothing.

    >>> orders = [[Slot(0, phase, m) for m in range(2) for phase in "FIW"] for k in range(1)]
    >>> [list(map(str, row)) for row in filled(orders)]
    [['0F0', '0I0', '0W0', '0F1', '0I1', '0W1']]
    """
    num_cells = 1 + max(slot.cell for order in orders for slot in order)
    devices = [_Device(order) for order in orders]
    done: set[Slot] = set()
    while any(device.next < len(device.order) for device in devices):
        started = [device.tick(num_cells, done) for device in devices]
        if not any(started):
            break  # no legal orders: the table says why
        done.update(slot for slot in started if slot is not None)
    return [device.ran + device.waiting for device in devices]


class _Device:
    """A device that runs F and I in a given order and fills gaps with W."""

    def __init__(self, order: Order) -> None:
        self.order = [slot for slot in order if slot.phase != "W"]
        self.next = 0
        self.ran: list[Slot] = []
        self.waiting: list[Slot] = []  # W of micro-batches whose I has run
        self._live = 0
        self._most_live = most_live(order)

    def tick(self, num_cells: int, done: set[Slot]) -> Slot | None:
        """Return the slot that begins at this tick of a clock whose every tick is a slot."""
        slot = self.order[self.next] if self.next < len(self.order) else None
        if slot is not None and slot.phase == "F" and self._live == self._most_live:
            slot = None
        if slot is not None and any(
            need not in done for need in slot.needs(num_cells) if need.phase not in "BR"
        ):
            slot = None
        if slot is not None:
            self.next += 1
        elif self.waiting:
            slot = self.waiting.pop(0)
        else:
            return None
        self.ran.append(slot)
        self._live += {"F": 1, "I": 0, "W": -1}[slot.phase]
        if slot.phase == "I":
            self.waiting.append(Slot(slot.cell, "W", slot.micro_batch))
        return slot


def most_live(order: Order) -> int:
    """Return the most micro-batches that are live at once where a device runs `order`."""
    live = most = 0
    for slot in order:
        live += {"F": 1, "I": 0, "W": -1, "B": -1}[slot.phase]
        most = max(most, live)
    return most


def joined(orders: Sequence[Order]) -> list[list[Slot]]:
    """Return legal orders with B in place of I and W wherever that keeps no slot waiting.

    I and W must follow each other, and the previous cell must need the gradient only after W. One
    B costs a program less, and nothing lies in memory between I and W.

    >>> order = [Slot(0, phase, 0) for phase in "FIW"]
    >>> [list(map(str, row)) for row in joined([order])]
    [['0F0', '0B0']]
    """
    table = Table(tuple(map(tuple, orders)))
    timelines = [_spans(table, *seconds) for seconds in _SECONDS]
    found = []
    for order in orders:
        row: list[Slot] = []
        for slot in order:
            if (
                slot.phase == "W"
                and row
                and row[-1] == Slot(slot.cell, "I", slot.micro_batch)
                and not any(_is_awaited(slot, spans) for spans in timelines)
            ):
                row[-1] = Slot(slot.cell, "B", slot.micro_batch)
            else:
                row.append(slot)
        found.append(row)
    return found


def _is_awaited(slot: Slot, spans: Mapping[Slot, simulate.Span]) -> bool:
    """Whether the previous cell needs the gradient before this W ends."""
    if slot.cell == 0:
        return False
    reader = Slot(slot.cell - 1, "I", slot.micro_batch)
    return spans[reader].start_s < spans[slot].end_s


def _spans(
    table: Table, forward_s: float, backward_s: float, input_s: float, weight_s: float
) -> dict[Slot, simulate.Span]:
    cells = table.num_cells
    timeline = simulate.simulate(
        table,
        [forward_s] * cells,
        [backward_s] * cells,
        input_gradient_s=[input_s] * cells,
        weight_gradient_s=[weight_s] * cells,
    )
    return {span.slot: span for span in timeline.spans}
