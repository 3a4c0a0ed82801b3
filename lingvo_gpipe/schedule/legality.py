"""What makes a table legal, and the errors for one that is not.

Every error names the slot and the way out, and prints the grid with that slot marked by `<`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from lingvo_gpipe.errors import ScheduleError
from lingvo_gpipe.schedule.slot import Slot

Rows: TypeAlias = Sequence[Sequence[Slot | None]]
Ticks: TypeAlias = list[list[tuple[int, Slot]]]
Places: TypeAlias = dict[Slot, tuple[int, int]]
"""Slot → its row and column."""

_SHOWN_ROWS, _SHOWN_COLUMNS = 16, 24
"""How much of a grid an error shows around the faulty slot."""


def check(rows: Rows) -> Ticks:
    """Return the `ticks` of `rows` if they are a legal schedule; `Table` says what that means.

    Raises:
        ScheduleError: they are not.
    """
    if not rows:
        raise ScheduleError("the table is empty. Write a line per device, such as 0F0,0B0")
    for device, row in enumerate(rows):
        if not any(row):
            raise ScheduleError(
                f"device {device} has no slots. Assign it a cell, or remove its line"
            )
    places = _places(rows)
    _check_numbers(rows, places)
    _check_phases(rows, places)
    _check_order_in_cell(rows, places)
    return ticks(rows)


def ticks(rows: Rows) -> Ticks:
    """Return what starts at each tick of a clock if every slot took one tick.

    Raises:
        ScheduleError: some slots wait for each other.
    """
    queues = [[slot for slot in row if slot] for row in rows]
    num_cells = 1 + max(slot.cell for queue in queues for slot in queue)
    slots = {slot for queue in queues for slot in queue}
    heads = [0] * len(queues)
    done: set[Slot] = set()
    result: Ticks = []
    waiting: dict[Slot, list[int]] = {}  # slot → devices that it keeps from their next slot
    moved = list(range(len(queues)))
    while moved:
        ready = []
        for device in sorted(moved):
            if heads[device] == len(queues[device]):
                continue
            slot = queues[device][heads[device]]
            needs = (need for need in slot.needs(num_cells) if need in slots and need not in done)
            missing = next(needs, None)
            if missing is None:
                ready.append((device, slot))
            else:
                waiting.setdefault(missing, []).append(device)
        moved = []
        for device, slot in ready:
            heads[device] += 1
            done.add(slot)
            moved += [device, *waiting.pop(slot, ())]
        if ready:
            result.append(ready)
    if waiting:
        _refuse_deadlock(rows, [queue[head:] for queue, head in zip(queues, heads, strict=True)])
    return result


def grid(rows: Rows, mark: tuple[int, int] | None = None) -> str:
    """Return `rows` as a text grid; with a `mark` (row, column), the part around that slot.

    The marked slot ends in `<`. Slots name their cell only where a device has other cells than
    the one of its own number.
    """
    plain = is_plain(rows)
    texts = [["." if slot is None else _name(slot, plain) for slot in row] for row in rows]
    lines, columns = range(len(texts)), range(max(len(row) for row in texts))
    if mark is not None:
        texts[mark[0]][mark[1]] += "<"
        lines = _window(mark[0], len(lines), _SHOWN_ROWS)
        columns = _window(mark[1], len(columns), _SHOWN_COLUMNS)
    widths = [max(len(row[c]) for row in texts if c < len(row)) for c in columns]
    digits = len(str(lines[-1]))
    result = []
    for line in lines:
        row = texts[line]
        fields = [f"{'cell' if plain else 'device'} {line:>{digits}}:"]
        fields += ["..."] if columns.start > 0 else []
        fields += [text.ljust(w) for text, w in zip(row[columns.start :], widths, strict=False)]
        fields += ["..."] if columns.stop < len(row) else []
        result.append(" ".join(fields).rstrip())
    return "\n".join(result)


def _places(rows: Rows) -> Places:
    places: Places = {}
    for device, row in enumerate(rows):
        for column, slot in enumerate(row):
            if slot is None:
                continue
            if slot in places:
                first_device, first_column = places[slot]
                where = "" if first_device == device else f" of device {first_device}"
                _refuse(
                    rows,
                    (device, column),
                    f"is repeated; first in slot {first_column}{where}. Remove one",
                )
            places[slot] = (device, column)
    return places


def _check_numbers(rows: Rows, places: Places) -> None:
    """Cells and micro-batches are numbered without gaps, and a cell has one device."""
    for what, numbers in (
        ("cell", {slot.cell for slot in places}),
        ("micro-batch", {slot.micro_batch for slot in places}),
    ):
        if max(numbers) >= len(numbers):
            missing = next(number for number in range(len(numbers)) if number not in numbers)
            slot = next(slot for slot in places if _number(slot, what) > missing)
            _refuse(
                rows,
                places[slot],
                f"is of {what} {_number(slot, what)}, but there is no {what} {missing}. "
                "Number them from 0 without gaps",
            )
    homes: dict[int, int] = {}
    for slot, (device, column) in places.items():
        home = homes.setdefault(slot.cell, device)
        if home != device:
            _refuse(
                rows,
                (device, column),
                f"is not on the device of its cell, which is device {home}. Move it there",
            )


def _check_phases(rows: Rows, places: Places) -> None:
    """Every cell runs every micro-batch exactly once, backward included, unless forward-only."""
    forward_only = all(slot.phase == "F" for slot in places)
    present = {(slot.cell, slot.micro_batch, slot.phase) for slot in places}
    for slot, place in places.items():
        number = slot.micro_batch
        has = {phase: (slot.cell, number, phase) in present for phase in ("F", "B", "I", "W")}
        if not has["F"]:
            _refuse(rows, place, f"has no F{number} of its cell. Put F{number} before it")
        if slot.phase == "F" and not forward_only and not (has["B"] or has["I"] or has["W"]):
            _refuse(
                rows,
                place,
                f"has no B{number}. Add it, or remove all backwards for a forward-only table",
            )
        if slot.phase in ("I", "W") and has["B"]:
            _refuse(rows, place, f"repeats part of B{number}. Remove one of them")
        if slot.phase == "I" and not has["W"]:
            _refuse(
                rows, place, f"has no W{number}. Add it after that, or write B{number} for both"
            )
        if slot.phase == "W" and not has["I"]:
            _refuse(rows, place, f"has no I{number}. Put it before, or write B{number} for both")
    num_micro_batches = 1 + max(slot.micro_batch for slot in places)
    for cell in sorted({slot.cell for slot in places}):
        for number in range(num_micro_batches):
            if (cell, number, "F") not in present:
                place = next(place for slot, place in places.items() if slot.micro_batch == number)
                _refuse(
                    rows, place, f"has no counterpart in cell {cell}. Every cell needs F{number}"
                )


def _check_order_in_cell(rows: Rows, places: Places) -> None:
    """Within its cell a backward follows its forward; a deadlock otherwise, with its own text."""
    for slot, (device, column) in places.items():
        for need in slot.needs(num_cells=slot.cell + 1):
            if need in places and need.cell == slot.cell and places[need][1] > column:
                name = f"{need.phase}{need.micro_batch}"
                _refuse(
                    rows,
                    (device, column),
                    f"comes before its own {name}. Move it after slot {places[need][1]}",
                )


def _refuse_deadlock(rows: Rows, queues: list[list[Slot]]) -> NoReturn:
    """Name one slot of a cycle of slots that wait for each other, and where it would not wait."""
    places = {
        slot: (device, column)
        for device, row in enumerate(rows)
        for column, slot in enumerate(row)
        if slot
    }
    num_cells = 1 + max(slot.cell for slot in places)
    pending = {slot: device for device, queue in enumerate(queues) for slot in queue}
    cycle: list[tuple[Slot, Slot]] = []
    seen: dict[int, int] = {}
    device = next(device for device, queue in enumerate(queues) if queue)
    while device not in seen:
        seen[device] = len(cycle)
        head = queues[device][0]
        need = next(need for need in head.needs(num_cells) if need in pending)
        cycle.append((head, need))
        device = pending[need]
    cycle = cycle[seen[device] :]
    # Each head blocks, on its own device, the slot that the one before it in the cycle needs. The
    # data alone has no cycle, so some head can be placed after the slot that it blocks.
    blocked, head, need = next(
        (blocked, head, need)
        for (_, blocked), (head, need) in zip([cycle[-1], *cycle], cycle, strict=False)
        if not _follows(blocked, head)
    )
    plain = is_plain(rows)
    where = f" of cell {need.cell}" if plain else ""
    _refuse(
        rows,
        places[head],
        f"waits for {_name(need, plain)}{where}, which waits for slots after this one: deadlock. "
        f"Move it after slot {places[blocked][1]}",
    )


def _follows(later: Slot, earlier: Slot) -> bool:
    """Whether the data alone orders `later` after `earlier`, or both are the same slot."""
    if later.micro_batch != earlier.micro_batch:
        return False
    if earlier.phase == "F":
        return later.phase not in "FR" or later.cell >= earlier.cell
    return later.phase not in "FR" and later.cell <= earlier.cell


def _refuse(rows: Rows, place: tuple[int, int], what: str) -> NoReturn:
    device, column = place
    slot = rows[device][column]
    plain = is_plain(rows)
    picture = grid(rows, mark=place).replace("\n", "\n    ")
    subject = "" if slot is None else _name(slot, plain)
    raise ScheduleError(
        f"{'cell' if plain else 'device'} {device}, slot {column}: {subject} {what}\n    {picture}"
    )


def is_plain(rows: Rows) -> bool:
    """Whether device k holds cell k and nothing else, so that slots need not name their cell."""
    return all(
        slot is None or slot.cell == device for device, row in enumerate(rows) for slot in row
    )


def _name(slot: Slot, plain: bool) -> str:
    return f"{slot.phase}{slot.micro_batch}" if plain else str(slot)


def _number(slot: Slot, what: str) -> int:
    return slot.cell if what == "cell" else slot.micro_batch


def _window(centre: int, size: int, shown: int) -> range:
    start = max(0, min(centre - shown // 2, size - shown))
    return range(start, min(size, start + shown))
