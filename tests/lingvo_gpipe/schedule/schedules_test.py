"""A schedule by name, as text, or in a file."""

from __future__ import annotations

import pathlib
import re

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule.table import Slot, Table

NAMES = ", ".join(map(repr, sorted(schedule.SCHEDULES)))


def test_cells_of_a_text_are_those_asked_for() -> None:
    text = "0F0,1F0,1B0,0B0"
    assert schedule.make(text, 1, 1, 2) == schedule.make(text, 1, 1)
    refused = (
        "the schedule's text has 2 cells on 1 device, but cells_per_device=1. Leave that unset: "
        "the text says which cells a device has"
    )
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(refused)}$"):
        schedule.make(text, 1, 1, 1)


def test_make_reads_a_text() -> None:
    assert schedule.make("0F0,0B0", 1, 1) == Table.from_text("0F0,0B0")
    assert schedule.make("0F0\n1F0", 2, 1).is_forward_only
    assert schedule.make("0F0", 1, 1) == Table(((Slot(0, "F", 0),),))


def test_make_reads_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"0F0,0F1,,,0B1,0B0\r\n,1F0,1F1,1B1,1B0\r\n")
    assert schedule.make(f"@{path}", 2, 2) == schedule.make("gpipe", 2, 2)


MISFITS = {
    "1f1": (
        "unknown schedule '1f1'; nearest '1f1b'. Use a name, a table's text such "
        "as '0F0,0B0', or @FILE with one"
    ),
    "zigzag": (
        f"unknown schedule 'zigzag'; there are {NAMES}. Use a name, a table's text such "
        "as '0F0,0B0', or @FILE with one"
    ),
    "0F0,0B0": (
        "the schedule's text has 1 device, but num_partitions=2. Set num_partitions=1, "
        "or write a line per partition"
    ),
    "0F0,0B0\n1F0,1B0": (
        "the schedule's text has 1 micro-batch, but this mini-batch is cut into 3. Cut it "
        "into as many (num_micro_batches), or write slots for each"
    ),
}


@pytest.mark.parametrize("spec", MISFITS)
def test_make_refuses_what_does_not_fit(spec: str) -> None:
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(MISFITS[spec])}$"):
        schedule.make(spec, 2, 3)


def test_make_names_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, binary, "a\0b"):
        text = f"the schedule's file {str(path)!r} cannot be read"
        with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}"):
            schedule.make(f"@{path}", 1, 1)
