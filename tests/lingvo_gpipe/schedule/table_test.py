from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import slot
from lingvo_gpipe.schedule.table import Slot, Table, forward_table


def runs_to_the_end(rows: list[list[str]], num_cells: int) -> bool:
    """Whether a machine that knows only data dependencies can run `rows`, device by device."""
    rows = [list(row) for row in rows]
    done: set[str] = set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and data_is_there(row[0], done, num_cells):
                done.add(row.pop(0))
                moved = True
    return not any(rows)


def data_is_there(text: str, done: set[str], num_cells: int) -> bool:
    cell, phase, m = int(text[0]), text[1], text[2:]
    if phase == "F":
        return cell == 0 or f"{cell - 1}F{m}" in done
    if phase == "W":
        return f"{cell}I{m}" in done
    behind = cell + 1 == num_cells or not done.isdisjoint({f"{cell + 1}B{m}", f"{cell + 1}I{m}"})
    return behind and f"{cell}F{m}" in done


@st.composite
def orders(draw: st.DrawFn) -> list[list[str]]:
    """Complete rows in any order: cells assigned to devices, backwards whole or split."""
    num_cells, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_devices = draw(st.integers(1, num_cells))
    homes = list(range(num_devices))
    homes += draw(
        st.lists(
            st.integers(0, num_devices - 1),
            min_size=num_cells - num_devices,
            max_size=num_cells - num_devices,
        )
    )
    rows: list[list[str]] = [[] for _ in range(num_devices)]
    for cell, home in enumerate(draw(st.permutations(homes))):
        phases = draw(st.sampled_from(["FB", "FIW"]))
        rows[home] += [f"{cell}{p}{m}" for m in range(num_micro_batches) for p in phases]
    # A random order is hardly ever legal, so move a few slots of a legal one.
    for row in rows:
        row.sort(key=lambda text: (text[1] != "F", int(text[0]) * (1 if text[1] == "F" else -1)))
        for _ in range(draw(st.integers(0, 2))):
            row.insert(
                draw(st.integers(0, len(row) - 1)), row.pop(draw(st.integers(0, len(row) - 1)))
            )
    return rows


@hypothesis.settings(max_examples=400)
@hypothesis.given(orders())
def test_table_is_legal_exactly_when_it_can_be_run(rows: list[list[str]]) -> None:
    num_cells = 1 + max(int(text[0]) for row in rows for text in row)
    text = "\n".join(",".join(row) for row in rows)
    if runs_to_the_end(rows, num_cells):
        order = Table.from_text(text).order()
        done: set[str] = set()
        for _, entry in order:
            assert data_is_there(str(entry), done, num_cells)
            done.add(str(entry))
        for device, row in enumerate(rows):
            assert [str(entry) for home, entry in order if home == device] == row
    else:
        with pytest.raises(errors.ScheduleError, match="Move it after slot"):
            Table.from_text(text)


@hypothesis.given(orders())
def test_following_the_advice_leads_to_a_legal_table(rows: list[list[str]]) -> None:
    for _ in range(200):
        try:
            Table.from_text("\n".join(",".join(row) for row in rows))
        except errors.ScheduleError as error:
            device, here, there = advice(error)
            rows[device].insert(there, rows[device].pop(here))
        else:
            return
    pytest.fail("the advice goes round in circles")


def advice(error: errors.ScheduleError) -> tuple[int, int, int]:
    found = re.match(r"\w+ (\d+), slot (\d+): .*Move it after slot (\d+)\n", str(error))
    assert found is not None, str(error)
    device, here, there = map(int, found.groups())
    return device, here, there


@hypothesis.given(orders(), st.data())
def test_text_round_trips_with_waiting_anywhere(rows: list[list[str]], data: st.DataObject) -> None:
    num_cells = 1 + max(int(text[0]) for row in rows for text in row)
    hypothesis.assume(runs_to_the_end(rows, num_cells))
    packed = Table.from_text("\n".join(",".join(row) for row in rows))
    for row in rows:
        for _ in range(data.draw(st.integers(0, 3))):
            row.insert(data.draw(st.integers(0, len(row))), "")
    text = "\n".join(",".join(row) for row in rows)
    spaced = Table.from_text(text)
    assert spaced.to_text() == text
    assert Table.from_text(spaced.to_text()) == spaced
    assert Table.from_text(text.replace("\n", "\r\n") + "\r\n") == spaced
    assert spaced.order() == packed.order()
    assert spaced.fused() == packed.fused()


slot_like = st.from_regex(r"\A[0-3]?(F|B|I|W|SEND_F|UNSHARD|f|)[0-3]?\Z")


@hypothesis.settings(max_examples=400)
@hypothesis.given(
    st.one_of(
        st.text(),
        st.text(alphabet="0123FBIW,\n\r \t-()"),
        st.lists(st.lists(slot_like, max_size=6).map(",".join), max_size=4).map("\n".join),
    )
)
def test_hostile_text_is_a_table_or_a_schedule_error(text: str) -> None:
    try:
        read = Table.from_text(text)
    except errors.ScheduleError:
        return
    assert Table.from_text(read.to_text()) == read


@pytest.mark.parametrize(
    "text",
    [
        "0F" + "9" * 5000,
        "9" * 5000 + "F0",
        "0F999999999",
        "999999999F0,999999999B0",
        "__import__('os').system('true'),0B0",
        "0F0,0B٣",
        "-1F0,-1B0",
        "(" * 10_000,
    ],
)
def test_hostile_text_is_refused_briefly(text: str) -> None:
    with pytest.raises(errors.ScheduleError) as caught:
        Table.from_text(text)
    assert len(str(caught.value)) < 400


ILLEGAL = {
    "": "the table is empty. Write a line per device, such as 0F0,0B0",
    "0F0,0B0\n\n1F0,1B0": "device 1 has no slots. Assign it a cell, or remove its line",
    "0F0,0X0": (
        "device 0, slot 1: '0X0' is not a slot: phases are F, R, B, I and W. "
        "Leave out sends and receives; they follow from these"
    ),
    "0F0,0 B0": (
        "device 0, slot 1: '0 B0' is not a slot. Write cell, phase and micro-batch, such as 0F3"
    ),
    "0F0,0F1,,,0B1,0B0\n1B0,1F0,1F1,,1B1": """\
cell 1, slot 0: B0 comes before its own F0. Move it after slot 1
    cell 0: F0  F1 .  . B1 B0
    cell 1: B0< F0 F1 . B1""",
    "0F0,0W0,0I0": """\
cell 0, slot 1: W0 comes before its own I0. Move it after slot 2
    cell 0: F0 W0< I0""",
    "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0": """\
cell 0, slot 1: B0 waits for B0 of cell 1, which waits for slots after this one: \
deadlock. Move it after slot 2
    cell 0: F0 B0< F1 B1
    cell 1: F1 B1  F0 B0""",
    "0F0,0B0,1F0,1B0\n2F0,2B0": """\
device 0, slot 1: 0B0 waits for 1B0, which waits for slots after this one: \
deadlock. Move it after slot 3
    device 0: 0F0 0B0< 1F0 1B0
    device 1: 2F0 2B0""",
    "1F0,1B0\n2F0,0F0,2B0,0B0": """\
device 1, slot 0: 2F0 waits for 1F0, which waits for slots after this one: \
deadlock. Move it after slot 1
    device 0: 1F0  1B0
    device 1: 2F0< 0F0 2B0 0B0""",
    "0F0,0F0,0B0": """\
cell 0, slot 1: F0 is repeated; first in slot 0. Remove one
    cell 0: F0 F0< B0""",
    "0F0,0B0\n1F0,1B0,0B0": """\
device 1, slot 2: 0B0 is repeated; first in slot 1 of device 0. Remove one
    device 0: 0F0 0B0
    device 1: 1F0 1B0 0B0<""",
    "0F0,0F2,0B0,0B2": """\
cell 0, slot 1: F2 is of micro-batch 2, but there is no micro-batch 1. \
Number them from 0 without gaps
    cell 0: F0 F2< B0 B2""",
    "0F0,0B0\n2F0,2B0": """\
device 1, slot 0: 2F0 is of cell 2, but there is no cell 1. Number them from 0 without gaps
    device 0: 0F0  0B0
    device 1: 2F0< 2B0""",
    "0F0,0B0\n0F1,0B1": """\
device 1, slot 0: 0F1 is not on the device of its cell, which is device 0. Move it there
    device 0: 0F0  0B0
    device 1: 0F1< 0B1""",
    "0B0": """\
cell 0, slot 0: B0 has no F0 of its cell. Put F0 before it
    cell 0: B0<""",
    "0F0,0B0,0F1": """\
cell 0, slot 2: F1 has no B1. Add it, or remove all backwards for a forward-only table
    cell 0: F0 B0 F1<""",
    "0F0,0B0,0W0": """\
cell 0, slot 2: W0 repeats part of B0. Remove one of them
    cell 0: F0 B0 W0<""",
    "0F0,0I0": """\
cell 0, slot 1: I0 has no W0. Add it after that, or write B0 for both
    cell 0: F0 I0<""",
    "0F0,0W0": """\
cell 0, slot 1: W0 has no I0. Put it before, or write B0 for both
    cell 0: F0 W0<""",
    "0F0,0F1,0B0,0B1\n1F0,1B0": """\
cell 0, slot 1: F1 has no counterpart in cell 1. Every cell needs F1
    cell 0: F0 F1< B0 B1
    cell 1: F0 B0""",
}


@pytest.mark.parametrize("text", ILLEGAL)
def test_illegal_table_is_refused_with_the_faulty_slot_marked(text: str) -> None:
    with pytest.raises(errors.ScheduleError) as caught:
        Table.from_text(text)
    assert str(caught.value) == ILLEGAL[text]


def test_error_shows_a_part_of_a_large_grid() -> None:
    rows = [list(row) for row in schedule.make("gpipe", 40, 100).devices]
    rows[35][40], rows[35][75] = rows[35][75], rows[35][40]
    rows[35].reverse()
    with pytest.raises(errors.ScheduleError) as caught:
        Table(tuple(map(tuple, rows)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 17
    assert max(map(len, lines)) < 160
    assert sum(line.count("<") for line in lines) == 1


def test_error_reads_slots_after_the_window_of_short_rows() -> None:
    long_row = ",".join(["0F0", *[""] * 60, "0F0"])
    with pytest.raises(errors.ScheduleError) as caught:
        Table.from_text(f"{long_row}\n1F0")
    assert str(caught.value).splitlines() == [
        "cell 0, slot 61: F0 is repeated; first in slot 0. Remove one",
        "    cell 0: ... " + ". " * 23 + "F0<",
        "    cell 1: ...",
    ]


@pytest.mark.parametrize(
    ("cell", "phase", "micro_batch"), [(-1, "F", 0), (0, "F", -1), (0, "X", 0)]
)
def test_slot_refuses_what_is_no_slot(cell: int, phase: slot.Phase, micro_batch: int) -> None:
    with pytest.raises(errors.ScheduleError, match=r"not a slot\. Count cells"):
        Slot(cell, phase, micro_batch)


@hypothesis.given(st.integers(0, 999), st.sampled_from("FBIW"), st.integers(0, 999))
def test_slot_text_round_trips(cell: int, phase: slot.Phase, micro_batch: int) -> None:
    assert Slot.parse(str(Slot(cell, phase, micro_batch))) == Slot(cell, phase, micro_batch)


def test_properties_of_an_interleaved_table() -> None:
    interleaved = Table.from_text("0F0,2F0,,2B0,0B0\n,1F0,3F0,3B0,1B0")
    assert interleaved.num_devices == 2
    assert interleaved.num_cells == 4
    assert interleaved.num_micro_batches == 1
    assert [interleaved.device_of(cell) for cell in range(4)] == [0, 1, 0, 1]
    assert not interleaved.is_forward_only
    assert interleaved.fused() == {0}
    assert interleaved.grid() == "device 0: 0F0 2F0 .   2B0 0B0\ndevice 1: .   1F0 3F0 3B0 1B0"


@pytest.mark.parametrize(
    ("text", "fused"),
    [
        ("0F0,0I0,0W0", set()),  # a split backward is not
        ("0F0,,0B0,0F1,0F2,0B1,0B2", {0}),  # waiting between them does not count
        ("0F0,1F0,1B0,0B0,0F1,1F1,0F2,1B1,1F2,1B2,0B1,0B2", {0, 2}),  # only in the last cell
    ],
)
def test_a_backward_directly_after_its_forward_is_fused(text: str, fused: set[int]) -> None:
    assert Table.from_text(text).fused() == fused


def test_table_made_of_lists_equals_one_of_tuples() -> None:
    rows = [[Slot(0, "F", 0), None, Slot(0, "B", 0)]]
    assert Table(rows) == Table.from_text("0F0,,0B0")  # type: ignore[arg-type]


def test_order_is_that_of_a_clock() -> None:
    order = schedule.make("gpipe", 2, 2).order()
    assert [(device, str(entry)) for device, entry in order] == [
        (0, "0F0"),
        (0, "0F1"),
        (1, "1F0"),
        (1, "1F1"),
        (1, "1B1"),
        (0, "0B1"),
        (1, "1B0"),
        (0, "0B0"),
    ]


def test_a_long_chain_of_cells_is_checked_slot_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    needs = Slot.needs

    def counted(self: Slot, num_cells: int) -> Iterator[Slot]:
        asked.append(self)
        return needs(self, num_cells)

    monkeypatch.setattr(Slot, "needs", counted)
    Table.from_text("\n".join(f"{cell}F0" for cell in range(400)))
    assert len(asked) <= 3 * 400


def test_forward_table_keeps_cells_on_their_devices() -> None:
    interleaved = schedule.make("interleaved", 2, 2)
    table = forward_table(interleaved, 3)
    assert table.is_forward_only
    assert (table.num_cells, table.num_micro_batches) == (4, 3)
    assert [table.device_of(k) for k in range(4)] == [0, 1, 0, 1]


def training_table(homes: tuple[int, ...]) -> Table:
    rows = [[k for k, home in enumerate(homes) if home == d] for d in range(max(homes) + 1)]
    return Table.on_grid(
        [[Slot(k, "F", 0) for k in row] + [Slot(k, "B", 0) for k in reversed(row)] for row in rows]
    )


@pytest.mark.parametrize("K", range(1, 7))
@pytest.mark.parametrize("order", ["there", "there there", "there there there", "there back"])
def test_no_forward_table_ends_sooner(K: int, order: str) -> None:
    """A device begins after the cells before its first one and ends before those after its last."""
    steps = {"there": range(K), "back": range(K - 1, -1, -1)}
    homes = tuple(itertools.chain(*(steps[way] for way in order.split())))
    V, training = len(order.split()), training_table(homes)
    for M in (1, 2, 3, 5, 8, 13):
        table = forward_table(training, M)
        assert {str(slot) for slot in table} == {
            f"{k}F{m}" for k in range(len(homes)) for m in range(M)
        }
        cells = range(len(homes))
        of_devices = [[k for k in cells if homes[k] == device] for device in range(K)]
        least = max(
            len(homes) + M - 1, *(c[0] + M * V + len(homes) - 1 - c[-1] for c in of_devices)
        )
        assert max(map(len, table.devices)) == least


def test_blocks_of_cells_run_one_micro_batch_after_the_other() -> None:
    table = forward_table(training_table((0, 0, 1, 1)), 2)
    assert table.to_text() == "0F0,1F0,0F1,1F1\n,,2F0,3F0,2F1,3F1"
