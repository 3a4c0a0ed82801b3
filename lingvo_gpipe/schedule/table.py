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
from collections.abc import Iterator, Sequence
from typing import TypeAlias, get_args

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule import legality
from lingvo_gpipe.schedule.slot import Phase, Slot

__all__ = ["Phase", "Row", "Slot", "Table", "check_sizes"]

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

    def validate(self) -> None:
        """Raise `ScheduleError` if the table is illegal; the constructor has done so before."""
        legality.check(self.devices)

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
        found: dict[Phase, list[set[int]]] = {
            phase: [set() for _ in range(self.num_cells)] for phase in get_args(Phase)
        }
        for slot in self:
            found[slot.phase][slot.cell].add(slot.micro_batch)
        return {phase: tuple(map(frozenset, of_cell)) for phase, of_cell in found.items()}

    @functools.cached_property
    def _homes(self) -> dict[int, int]:
        return {
            slot.cell: device for device, row in enumerate(self.devices) for slot in row if slot
        }


def check_sizes(
    name: str,
    num_devices: int,
    num_micro_batches: int,
    cells_per_device: int,
    *,
    wanted: int | None = 1,
) -> None:
    """Refuse numbers for which schedule `name` cannot be made.

    Args:
        name: name of the schedule.
        num_devices: K.
        num_micro_batches: M.
        cells_per_device: V.
        wanted: the only V that the schedule has; None: any.
    """
    if num_devices < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} for num_devices={num_devices}, num_micro_batches={num_micro_batches}. "
            "Use 1 or more of each"
        )
    if wanted is None and cells_per_device < 1:
        raise ScheduleError(f"{name} for cells_per_device={cells_per_device}. Use 1 or more")
    if wanted is not None and cells_per_device != wanted:
        number = "one cell" if wanted == 1 else f"{wanted} cells"
        raise ScheduleError(
            f"{name} has {number} per device, but cells_per_device={cells_per_device}. Use {wanted}"
        )
