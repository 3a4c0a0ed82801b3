from __future__ import annotations

import dataclasses
import doctest
import itertools
import os
import pathlib
import re

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import search
from lingvo_gpipe.schedule.named import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    optimal,
    rounds,
    there_and_back,
    weight_slots,
    zb_h1,
    zb_v,
)
from lingvo_gpipe.schedule.table import Slot, Table

SIZES = list(itertools.product(range(1, 6), (1, 2, 3, 4, 5, 7, 10)))
NAMES = ", ".join(schedule.SCHEDULES)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a schedule has.

    Attributes:
        cells_per_device: values of V that are tried.
        refused: a V that it does not have.
        turns: whether every other round of cells goes back over the devices.
        splits: whether a backward may be I and W.
    """

    cells_per_device: tuple[int, ...] = (1,)
    refused: int = 2
    turns: bool = False
    splits: bool = False


EXPECTED = {
    "gpipe": Expected(),
    "1f1b": Expected(),
    "interleaved": Expected((1, 2, 3), refused=0),
    "looped_bfs": Expected((1, 2, 3), refused=0),
    "zb_h1": Expected((1, 2, 3), refused=0, splits=True),
    "zb_v": Expected((2,), refused=1, turns=True, splits=True),
    "dualpipe_v": Expected((2,), refused=3, turns=True, splits=True),
    "optimal": Expected((1,), refused=0, splits=True),
}
CASES = [(name, V) for name, expected in EXPECTED.items() for V in expected.cells_per_device]


def test_every_schedule_is_tested() -> None:
    assert list(EXPECTED) == list(schedule.SCHEDULES)


@pytest.mark.parametrize(("name", "V"), CASES)
def test_schedule_is_legal_and_whole(name: str, V: int) -> None:
    for K, M in SIZES:
        table = schedule.make(name, K, M, V)
        table.validate()
        found = [
            f"{slot.cell}{phase}{slot.micro_batch}"
            for slot in table
            for phase in ("IW" if slot.phase == "B" else slot.phase)
        ]
        cells = range(K * V)
        assert sorted(found) == sorted(f"{k}{p}{m}" for k in cells for p in "FIW" for m in range(M))
        assert EXPECTED[name].splits or not any(slot.phase in "IW" for slot in table)
        there, back = list(range(K)), list(range(K - 1, -1, -1))
        homes = [back if EXPECTED[name].turns and v % 2 else there for v in range(V)]
        assert [table.device_of(cell) for cell in cells] == list(itertools.chain(*homes))
        assert (table.num_devices, table.num_micro_batches) == (K, M)
        assert Table.from_text(table.to_text()) == table


@pytest.mark.parametrize(("name", "V"), CASES)
def test_waiting_is_drawn_as_equal_slots_would_wait(name: str, V: int) -> None:
    for K, M in SIZES:
        table = schedule.make(name, K, M, V)
        column = {
            slot: tick for row in table.devices for tick, slot in enumerate(row) if slot is not None
        }
        for slot, tick in column.items():
            row = table.devices[table.device_of(slot.cell)]
            held_back_by_data = [column[need] for need in slot.needs(K * V) if need in column]
            assert all(before < tick for before in held_back_by_data)
            if tick and row[tick - 1] is None:
                assert tick - 1 in held_back_by_data


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_table_of_one_cell_per_device_waits_for_fill_and_drain_alone(name: str) -> None:
    for K, M in SIZES:
        assert max(map(len, schedule.make(name, K, M).devices)) == 2 * (M + K - 1)


@pytest.mark.parametrize(("K", "M"), SIZES)
def test_last_cell_is_fused_as_the_schedule_allows(K: int, M: int) -> None:
    def fused(name: str) -> frozenset[int]:
        return schedule.make(name, K, M).fused()

    assert fused("gpipe") == fused("looped_bfs") == {M - 1}
    assert fused("1f1b") == fused("interleaved") == set(range(M))


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
def test_another_number_of_cells_per_device_is_refused(name: str) -> None:
    V = EXPECTED[name].refused
    own = schedule.SCHEDULES[name].cells_per_device
    number = "one cell" if own == 1 else f"{own} cells"
    text = f"{name} has {number} per device, but cells_per_device={V}. Use {own}"
    if V == 0:
        text = f"{name} for cells_per_device=0. Use 1 or more"
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.make(name, 2, 2, V)


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
    assert schedule.make(f"@{path}", 2, 2) == gpipe.gpipe(2, 2)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "1f1",
            f"unknown schedule '1f1'; nearest '1f1b'. Use {NAMES}, a "
            "table's text such as '0F0,0B0', or @FILE with one",
        ),
        (
            "zigzag",
            f"unknown schedule 'zigzag'. Use {NAMES}, a "
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
        "pipe": "it is not a regular file",
        "link": "it is not a regular file",
        "large": "it has more than 524,288 bytes",
    }.items():
        path = str(tmp_path / name)
        text = (
            f"the schedule's file {path!r} cannot be read: {reason}. Give @ and the path of a text "
            "file"
        )
        with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
            schedule.make(f"@{path}", 1, 1)


@pytest.mark.parametrize(
    "module",
    [
        schedule,
        dualpipe_v,
        gpipe,
        interleaved,
        looped_bfs,
        one_f_one_b,
        optimal,
        rounds,
        search,
        there_and_back,
        weight_slots,
        zb_h1,
        zb_v,
    ],
)
def test_docstring_examples_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
