"""Schedule tables: which slot runs when on which device; by name, by text, or from a file.

Plain Python. What a slot computes, and on which device, belongs to `lingvo_gpipe.execution`.

A schedule is a function (num_devices K, num_micro_batches M, cells_per_device V) → `Table` in a
file of `schedule.named`, with its name here. It refuses a V that it does not have. A table as text
may place any cell on any device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from lingvo_gpipe import regular_files
from lingvo_gpipe.errors import ScheduleError, nearest
from lingvo_gpipe.schedule.named import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    optimal,
    zb_h1,
    zb_v,
)
from lingvo_gpipe.schedule.table import Slot, Table

__all__ = ["AUTO", "SCHEDULES", "Named", "Slot", "Table", "make", "num_cells"]


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A schedule that has a name.

    Attributes:
        make: (K, M, V) → table.
        cells_per_device: V where the user sets none.
    """

    make: Callable[[int, int, int], Table]
    cells_per_device: int


SCHEDULES: dict[str, Named] = {
    "gpipe": Named(gpipe.gpipe, 1),
    "1f1b": Named(one_f_one_b.one_f_one_b, 1),
    "interleaved": Named(interleaved.interleaved, 2),
    "looped_bfs": Named(looped_bfs.looped_bfs, 2),
    "zb_h1": Named(zb_h1.zb_h1, 1),
    "zb_v": Named(zb_v.zb_v, 2),
    "dualpipe_v": Named(dualpipe_v.dualpipe_v, 2),
    "optimal": Named(optimal.optimal, 1),
}
AUTO = "auto"
"""What `model.schedule` is until `plan.auto` has chosen one."""

_MAX_FILE_BYTES = 2**19  # about 75,000 slots, which are checked in two seconds


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
        named = SCHEDULES[spec]
        V = named.cells_per_device if cells_per_device is None else cells_per_device
        return _made(named.make, num_devices, num_micro_batches, V)
    if spec.startswith("@"):
        table, source = Table.from_text(_read(spec[1:])), spec[1:]
    elif "," in spec or "\n" in spec or _looks_like_slot(spec):
        table, source = Table.from_text(spec), "the schedule's text"
    else:
        near = nearest(spec, SCHEDULES, count=1)
        hint = f"; nearest {near[0]!r}" if near else ""
        raise ScheduleError(
            f"unknown schedule {spec[:40]!r}{hint}. Use {', '.join(SCHEDULES)}, a table's text "
            "such as '0F0,0B0', or @FILE with one"
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
            f"mini-batch is cut into {num_micro_batches}. Cut it into as many (num_micro_batches, "
            "micro_batch_size), or write slots for each"
        )
    if cells_per_device is not None and table.num_cells != num_devices * cells_per_device:
        raise ScheduleError(
            f"{source} has {_count(table.num_cells, 'cell')} on {_count(num_devices, 'device')}, "
            f"but cells_per_device={cells_per_device}. Leave that unset: the text says which "
            "cells a device has"
        )
    return table


def num_cells(spec: str, num_devices: int, cells_per_device: int | None) -> int:
    """Return the number of cells of a schedule before its table is made; K for a text.

    >>> num_cells("1f1b", 4, None), num_cells("interleaved", 4, 3)
    (4, 12)
    """
    named = SCHEDULES.get(spec)
    if cells_per_device is None:
        cells_per_device = 1 if named is None else named.cells_per_device
    return num_devices * cells_per_device


@functools.lru_cache(maxsize=16)
def _made(make: Callable[[int, int, int], Table], *sizes: int) -> Table:
    """Make a table once for all plans that compare policies, cuts or devices' speeds with it."""
    return make(*sizes)


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
        return regular_files.read_text(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise ScheduleError(
            f"the schedule's file {path!r} cannot be read: {error.strerror}. "
            "Give @ and the path of a text file"
        ) from error
