"""Schedule tables: which slot runs when on which device; by name, by text, or from a file.

Plain Python. What a slot computes, and on which device, belongs to `lingvo_gpipe.execution`.

A schedule is a function (num_devices K, num_micro_batches M) → `Table` in a file of its own, named
here. Both place one cell on each device, and refuse another `cells_per_device`; a table as text may
place several.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gpipe import regular_files
from lingvo_gpipe.errors import ScheduleError, nearest
from lingvo_gpipe.schedule import gpipe, one_f_one_b
from lingvo_gpipe.schedule.table import Slot, Table

__all__ = ["SCHEDULES", "Slot", "Table", "make"]

SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe.gpipe,
    "1f1b": one_f_one_b.one_f_one_b,
}
_MAX_FILE_BYTES = 2**19  # about 75,000 slots, which are checked in two seconds


def make(spec: str, num_devices: int, num_micro_batches: int) -> Table:
    """Return the table that `spec` describes.

    Args:
        spec: a name from `SCHEDULES`; or the text of a table; or `@` and the path of a regular
            file with such a text, of 512 KiB at most.
        num_devices: K, which a text must fit.
        num_micro_batches: M, which a text must fit.

    Raises:
        ScheduleError: the name is unknown, the file cannot be read, the table is illegal, or it
            is made for another K or M.

    >>> make("1f1b", 1, 2).to_text()
    '0F0,0B0,0F1,0B1'
    >>> make("0F0,0F1,0B0,0B1", 1, 2).fused()
    frozenset()
    """
    if spec in SCHEDULES:
        return SCHEDULES[spec](num_devices, num_micro_batches)
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
    return table


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
