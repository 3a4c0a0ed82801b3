"""Schedule tables: which slot runs when on which device; by name, by text, or from a file.

Plain Python. What a slot computes, and on which device, belongs to `lingvo_gpipe.execution`. A new
schedule is a function of `schedule.named`; a table as text may place any cell on any device.

- What is a schedule? `slot`, `table`; what makes one illegal, `legality`
- Which are there? `named`; what several share is in `orders`, a search for the shortest in `search`
- How long does it take? `simulate`, drawn by `drawing`; where measured time went, `breakdown`
- Which forwards are computed again? `recompute`
- How many layers has each of a device's cells? `shared_devices`
"""

from __future__ import annotations

import functools

from lingvo_gpipe import text_file
from lingvo_gpipe.errors import ScheduleError, suggestion
from lingvo_gpipe.schedule.named import SCHEDULES
from lingvo_gpipe.schedule.table import Slot, Table

__all__ = ["AUTO", "SCHEDULES", "Slot", "Table", "make"]

AUTO = "auto"
"""What `model.schedule` is until `plan.auto` has chosen one."""


def make(
    spec: str, num_devices: int, num_micro_batches: int, cells_per_device: int | None = None
) -> Table:
    """Return the table that `spec` describes.

    Args:
        spec: a name from `SCHEDULES`; or the text of a table; or `@` and the path of a regular
            file with such a text, of 512 KiB at most.
        num_devices: K, which a text must fit.
        num_micro_batches: M, which a text must fit.
        cells_per_device: V, which a text must fit; None: the schedule's own number.

    Raises:
        ScheduleError: the name is unknown, the file cannot be read, the table is illegal, it is
            made for another K or M, or the schedule does not have this V.

    >>> make("1f1b", 1, 2).to_text()
    '0F0,0B0,0F1,0B1'
    >>> make("0F0,0F1,0B0,0B1", 1, 2).fused()
    frozenset()
    """
    if spec == AUTO:
        raise ScheduleError(
            "the schedule 'auto' is not chosen yet: plan.auto.resolved(task) chooses it, as the "
            f"trainer does for training and --mode=plan. Or use {', '.join(SCHEDULES)}"
        )
    if spec in SCHEDULES:
        V = SCHEDULES[spec].cells_per_device if cells_per_device is None else cells_per_device
        return _named_table(spec, num_devices, num_micro_batches, V)
    if spec.startswith("@"):
        table, source = Table.from_text(_read(spec[1:])), spec[1:]
    elif "," in spec or "\n" in spec or _looks_like_slot(spec):
        table, source = Table.from_text(spec), "the schedule's text"
    else:
        raise ScheduleError(
            f"unknown schedule {spec[:40]!r}; {suggestion(spec, SCHEDULES)}. Use a name, a table's "
            "text such as '0F0,0B0', or @FILE with one"
        )
    if table.num_devices != num_devices:
        raise ScheduleError(
            f"{source} has {_count(table.num_devices, 'device')}, but "
            f"num_partitions={num_devices}. Set num_partitions={table.num_devices}, or write a "
            "line per partition"
        )
    if table.num_micro_batches != num_micro_batches:
        raise ScheduleError(
            f"{source} has {_count(table.num_micro_batches, 'micro-batch', 'es')}, but this "
            f"mini-batch is cut into {num_micro_batches}. Cut it into as many "
            "(num_micro_batches), or write slots for each"
        )
    if cells_per_device is not None and table.num_cells != num_devices * cells_per_device:
        raise ScheduleError(
            f"{source} has {_count(table.num_cells, 'cell')} on {_count(num_devices, 'device')}, "
            f"but cells_per_device={cells_per_device}. Leave that unset: the text says which "
            "cells a device has"
        )
    return table


@functools.lru_cache(maxsize=16)
def _named_table(name: str, K: int, M: int, V: int) -> Table:
    """Make a table once for all plans that compare policies, cuts or devices' speeds with it."""
    if K < 1 or M < 1:
        raise ScheduleError(
            f"{name} for num_devices={K}, num_micro_batches={M}. Use 1 or more of each"
        )
    named = SCHEDULES[name]
    if not named.any_v and named.cells_per_device != V:
        number = "one cell" if named.cells_per_device == 1 else f"{named.cells_per_device} cells"
        raise ScheduleError(
            f"{name} has {number} per device, but cells_per_device={V}. "
            f"Use {named.cells_per_device}"
        )
    if V < 1:
        raise ScheduleError(f"{name} for cells_per_device={V}. Use 1 or more")
    return named.make(K, M, V) if named.any_v else named.make(K, M)


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _looks_like_slot(text: str) -> bool:
    try:
        Slot.parse(text.strip())
    except ScheduleError:
        return False
    return True


def _read(path: str) -> str:
    try:
        return text_file.read(path)
    except OSError as error:
        raise ScheduleError(
            f"the schedule's file {path!r} cannot be read: {error.strerror}. "
            "Give @ and the path of a text file"
        ) from error
