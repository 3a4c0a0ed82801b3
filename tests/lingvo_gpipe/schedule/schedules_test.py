from __future__ import annotations

import doctest
import itertools
import os
import pathlib
import re

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import gpipe, one_f_one_b
from lingvo_gpipe.schedule.table import Slot, Table

SIZES = list(itertools.product(range(1, 9), range(1, 9)))


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize(("num_devices", "num_micro_batches"), SIZES)
def test_schedule_is_legal_and_whole(name: str, num_devices: int, num_micro_batches: int) -> None:
    table = schedule.make(name, num_devices, num_micro_batches)
    table.validate()
    assert sorted(map(str, table)) == sorted(
        f"{cell}{phase}{m}"
        for cell in range(num_devices)
        for phase in "FB"
        for m in range(num_micro_batches)
    )
    assert [table.device_of(cell) for cell in range(num_devices)] == list(range(num_devices))
    assert table.num_micro_batches == num_micro_batches
    assert Table.from_text(table.to_text()) == table


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize(("num_devices", "num_micro_batches"), SIZES)
def test_waiting_is_drawn_as_equal_slots_would_wait(
    name: str, num_devices: int, num_micro_batches: int
) -> None:
    table = schedule.make(name, num_devices, num_micro_batches)
    column = {
        entry: tick for row in table.devices for tick, entry in enumerate(row) if entry is not None
    }
    for entry, tick in column.items():
        row = table.devices[table.device_of(entry.cell)]
        held_back_by_data = [column[need] for need in entry.needs(num_devices) if need in column]
        assert all(before < tick for before in held_back_by_data)
        if tick and row[tick - 1] is None:
            assert tick - 1 in held_back_by_data
    assert max(column.values()) + 1 == 2 * (num_micro_batches + num_devices - 1)


@pytest.mark.parametrize(("num_devices", "num_micro_batches"), SIZES)
def test_last_cell_is_fused_as_the_schedule_allows(
    num_devices: int, num_micro_batches: int
) -> None:
    def fused(name: str) -> frozenset[int]:
        return schedule.make(name, num_devices, num_micro_batches).fused()

    assert fused("gpipe") == {num_micro_batches - 1}
    assert fused("1f1b") == set(range(num_micro_batches))


def test_gpipe_text_is_the_known_one() -> None:
    assert gpipe.gpipe(2, 2).to_text() == "0F0,0F1,,,0B1,0B0\n,1F0,1F1,1B1,1B0"


def test_1f1b_picture_is_the_known_one() -> None:
    assert one_f_one_b.one_f_one_b(4, 8).grid().splitlines() == [
        "cell 0: F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7",
        "cell 1: .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7",
        "cell 2: .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7",
        "cell 3: .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_devices() -> None:
    assert one_f_one_b.one_f_one_b(3, 1).grid().splitlines() == [
        "cell 0: F0 .  .  .  .  B0",
        "cell 1: .  F0 .  .  B0",
        "cell 2: .  .  F0 B0",
    ]


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize(("num_devices", "num_micro_batches"), [(0, 1), (1, 0), (-1, 2)])
def test_schedule_of_nothing_is_refused(
    name: str, num_devices: int, num_micro_batches: int
) -> None:
    text = (
        f"{name} for num_devices={num_devices}, num_micro_batches={num_micro_batches}. "
        "Use 1 or more of each"
    )
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.make(name, num_devices, num_micro_batches)


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_schedule_of_one_cell_per_device_refuses_more(name: str) -> None:
    text = f"{name} has one cell per device, but cells_per_device=2. Use 1"
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.SCHEDULES[name](2, 2, 2)


def test_make_reads_a_text() -> None:
    assert schedule.make("0F0,0B0", 1, 1) == Table.from_text("0F0,0B0")
    assert schedule.make("0F0\n1F0", 2, 1).is_forward_only
    assert schedule.make("0F0", 1, 1) == Table(((Slot(0, "F", 0),),))


def test_make_reads_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"0F0,0F1,,,0B1,0B0\r\n,1F0,1F1,1B1,1B0\r\n")
    assert schedule.make(f"@{path}", 2, 2) == gpipe.gpipe(2, 2)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "1f1",
            "unknown schedule '1f1'; nearest '1f1b'. Use gpipe, 1f1b, a "
            "table's text such as '0F0,0B0', or @FILE with one",
        ),
        (
            "zigzag",
            "unknown schedule 'zigzag'. Use gpipe, 1f1b, a "
            "table's text such as '0F0,0B0', or @FILE with one",
        ),
        (
            "0F0,0B0",
            "the schedule's text has 1 device, but num_partitions=2. Set num_partitions=1, "
            "or write a line per partition",
        ),
        (
            "0F0,0B0\n1F0,1B0",
            "the schedule's text has 1 micro-batch, but this mini-batch is cut into 3. Cut it "
            "into as many (num_micro_batches, micro_batch_size), or write slots for each",
        ),
    ],
)
def test_make_refuses_what_does_not_fit(spec: str, text: str) -> None:
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.make(spec, 2, 3)


def test_make_names_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, binary, "a\0b"):
        text = f"the schedule's file {str(path)!r} cannot be read"
        with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}"):
            schedule.make(f"@{path}", 1, 1)


def test_make_reads_only_regular_files_of_a_limited_size(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_text("0F0," * 2**18)
    for name, reason in {
        "pipe": "it is a pipe, not a regular file",
        "link": "it is a device, not a regular file",
        "large": "it has more than 524,288 bytes",
    }.items():
        path = str(tmp_path / name)
        text = (
            f"the schedule's file {path!r} cannot be read: {reason}. Give @ and the path of a text "
            "file"
        )
        with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
            schedule.make(f"@{path}", 1, 1)


@pytest.mark.parametrize("module", [schedule, gpipe, one_f_one_b])
def test_docstring_examples_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
