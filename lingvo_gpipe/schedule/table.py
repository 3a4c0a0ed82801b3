"""The schedule as data: for each device, its slots in order.

Simulator, plan, picture and executor read the same table, and nothing else decides an order. A
`Table` is checked when it is made: every `Table` is legal, and the executor cannot meet a slot
that waits forever. PyTorch's pipelining reads and writes the same text form.

Empty fields mean waiting; with them printed tables look like the well-known figures. They imply
no order: a device starts its next slot as soon as the slot's inputs are there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, get_args

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import legality
from lingvo_gpipe.schedule.slot import Phase, Slot

__all__ = ["Phase", "Row", "Slot", "Table", "forward_table"]

Row: TypeAlias = tuple[Slot | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    r"""A whole schedule: for each device its slots in order, None where it waits.

    A table is legal if every cell lives on one device and has every micro-batch's F once and its B
    once (or I and W once each instead of B; a forward-only table has only F), perhaps an R before
    the B or I, and if the orders of the devices agree with the data:
    F(k, m) needs F(k-1, m); R(k, m) needs F(k, m); B(k, m) and I(k, m) need F(k, m), R(k, m) if
    there is one, and B or I of (k+1, m); W(k, m) needs I(k, m).

    Raises:
        ScheduleError: the table is illegal. The text ends with the grid, the faulty slot marked.

    >>> table = Table.from_text("0F0,0F1,,,0B1,0B0\n,1F0,1F1,1B1,1B0")
    >>> print(table.grid())
    cell 0: F0 F1 .  .  B1 B0
    cell 1: .  F0 F1 B1 B0
    >>> table.num_cells, table.num_micro_batches, table.fused()
    (2, 2, frozenset({1}))
    """

    devices: tuple[Row, ...]
    _ticks: legality.Ticks = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(tuple(row) for row in self.devices))
        object.__setattr__(self, "_ticks", legality.check(self.devices))

    @classmethod
    def on_grid(cls, orders: Sequence[Sequence[Slot]]) -> Table:
        r"""Make a table from each device's order; waiting is drawn as if all slots were equal.

        >>> Table.on_grid([[Slot(0, "F", 0), Slot(0, "F", 1)], [Slot(1, "F", 0), Slot(1, "F", 1)]])
        Table.from_text('0F0,0F1\n,1F0,1F1')
        """
        packed = cls(tuple(tuple(order) for order in orders))
        rows: list[list[Slot | None]] = [[] for _ in packed.devices]
        for tick, ready in enumerate(packed._ticks):
            for device, slot in ready:
                rows[device] += [None] * (tick - len(rows[device]))
                rows[device].append(slot)
        return cls(tuple(tuple(row) for row in rows))

    @classmethod
    def from_text(cls, text: str) -> Table:
        """Read a table from its text: a line per device, its slots between commas.

        PyTorch's pipelining writes such a text with `_dump_csv(path, format="compute_only")`.

        Raises:
            ScheduleError: the text is not a table, or the table is illegal.
        """
        lines = text.strip("\r\n").splitlines()
        rows: list[Row] = []
        for device, line in enumerate(lines):
            row: list[Slot | None] = []
            for column, entry in enumerate(line.split(",")):
                try:
                    row.append(Slot.parse(entry.strip()) if entry.strip() else None)
                except ScheduleError as error:
                    raise ScheduleError(f"device {device}, slot {column}: {error}") from None
            rows.append(tuple(row))
        return cls(tuple(rows))

    def to_text(self) -> str:
        """Return the text form, which `from_text` and PyTorch's pipelining read."""
        return "\n".join(
            ",".join("" if slot is None else str(slot) for slot in row) for row in self.devices
        )

    def __repr__(self) -> str:
        return f"Table.from_text({self.to_text()!r})"

    def grid(self) -> str:
        """Return the table as text: a line per device, a column per slot, dots for waiting."""
        return legality.grid(self.devices)

    @property
    def num_devices(self) -> int:
        """Rows of the table."""
        return len(self.devices)

    @property
    def num_cells(self) -> int:
        """Cells, of all devices together."""
        return len(self._homes)

    @functools.cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches per mini-batch."""
        return 1 + max(slot.micro_batch for slot in self)

    @functools.cached_property
    def is_forward_only(self) -> bool:
        """Whether the table has only forward slots, as evaluation needs."""
        return all(slot.phase == "F" for slot in self)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether device k has only cell k, so that pictures need not name cells."""
        return legality.is_plain(self.devices)

    def __iter__(self) -> Iterator[Slot]:
        """Yield all slots, device after device."""
        return (slot for row in self.devices for slot in row if slot is not None)

    def device_of(self, cell: int) -> int:
        """Return the number of the device on which `cell` lives."""
        return self._homes[cell]

    def order(self) -> list[tuple[int, Slot]]:
        """Return every (device, slot) in one order that devices and data allow.

        The order is that of a clock with equal slots, devices in turn within a tick; the same
        table always has the same order.
        """
        return [entry for tick in self._ticks for entry in tick]

    def fused(self) -> frozenset[int]:
        """Return the micro-batches whose B directly follows their own F in the last cell.

        One program computes both and need not recompute: the backward waits for nothing else.
        Empty fields between the two do not count.
        """
        return self._met("B")

    def fused_with_input_gradient(self) -> frozenset[int]:
        """Return the micro-batches whose I directly follows their own F in the last cell.

        No other slot lies between the two, so what F keeps for I is there only for one micro-batch
        at a time.
        """
        return self._met("I")

    def _met(self, phase: Phase) -> frozenset[int]:
        """Return the micro-batches whose slot of a phase directly follows F in the last cell."""
        last = self.num_cells - 1
        row = [slot for slot in self.devices[self.device_of(last)] if slot is not None]
        return frozenset(
            forward.micro_batch
            for forward, backward in itertools.pairwise(row)
            if forward == Slot(last, "F", forward.micro_batch)
            and backward == Slot(last, phase, forward.micro_batch)
        )

    def recomputed(self) -> tuple[frozenset[int], ...]:
        """Return per cell the micro-batches whose recomputation is a slot of its own."""
        return self._micro_batches["R"]

    def split(self) -> tuple[frozenset[int], ...]:
        """Return per cell the micro-batches whose backward is split into I and W."""
        return self._micro_batches["I"]

    @functools.cached_property
    def _micro_batches(self) -> dict[Phase, tuple[frozenset[int], ...]]:
        """Phase → per cell the micro-batches that have a slot of it."""
        numbers: dict[Phase, list[set[int]]] = {
            phase: [set() for _ in range(self.num_cells)] for phase in get_args(Phase)
        }
        for slot in self:
            numbers[slot.phase][slot.cell].add(slot.micro_batch)
        return {phase: tuple(map(frozenset, of_cell)) for phase, of_cell in numbers.items()}

    @functools.cached_property
    def _homes(self) -> dict[int, int]:
        return {
            slot.cell: device for device, row in enumerate(self.devices) for slot in row if slot
        }


def forward_table(table: Table, num_micro_batches: int) -> Table:
    r"""Return the table with which evaluation runs the cells of `table`, M forwards for each.

    Whenever a device is free it takes one of its cells whose input is there: the last such cell, so
    that few micro-batches are under way, or the first one if that ends sooner with equal slots.

    >>> there_and_back = Table.from_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    >>> print(forward_table(there_and_back, num_micro_batches=4).grid())
    device 0: 0F0 0F1 0F2 3F0 0F3 3F1 .   3F2 .   3F3
    device 1: .   1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3
    """
    devices = [table.device_of(cell) for cell in range(table.num_cells)]
    tables = [_forwards(devices, num_micro_batches, which) for which in (max, min)]
    return min(tables, key=lambda each: max(map(len, each.devices)))


def _forwards(
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
