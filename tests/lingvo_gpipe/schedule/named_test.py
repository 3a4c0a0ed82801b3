"""The named schedules: legal, as long as closed forms say, and never worse than PyTorch's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import pytest

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import orders, search, simulate
from lingvo_gpipe.schedule.table import Slot, Table

PYTORCH = json.loads(Path(__file__).with_name("pytorch.json").read_text())
KEYS = [key for key in PYTORCH if key != "torch"]
LENGTHS = {"kept": simulate.EQUAL_SLOTS, "recomputed": simulate.EQUAL_SLOTS_RECOMPUTING}
# Every K with M < K, M not divisible by K, and a few rounds.
SIZES = [
    (K, M) for K in range(1, 9) for M in sorted({1, 2, K - 1, K, K + 1, 2 * K - 1, 2 * K + 3}) if M
]


@functools.cache
def simulated(name: str, K: int, M: int, V: int, lengths: str = "kept") -> simulate.Timeline:
    return simulate.simulate(schedule.make(name, K, M, V), LENGTHS[lengths])


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
FEW = list(itertools.product(range(1, 6), (1, 2, 3, 4, 5, 7, 10)))  # `optimal` has these
CASES = [(name, V) for name, expected in EXPECTED.items() for V in expected.cells_per_device]


def test_every_schedule_is_tested() -> None:
    assert list(EXPECTED) == list(schedule.SCHEDULES)


@pytest.mark.parametrize(("name", "V"), CASES)
def test_schedule_is_legal_and_whole(name: str, V: int) -> None:
    for K, M in FEW:
        table = schedule.make(name, K, M, V)
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
    for K, M in FEW:
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


def test_pytorchs_tables_are_of_the_version_that_is_named() -> None:
    assert PYTORCH["torch"].startswith("2.13.")
    assert sum(len(PYTORCH[key]) for key in KEYS) == 2194


@pytest.mark.parametrize("key", KEYS)
def test_no_table_is_worse_than_pytorchs(key: str) -> None:
    """Neither longer, nor longer where cells recompute, nor with more live micro-batches."""
    name, K, V = key.split()[0], *map(int, key.split()[1:])
    for text, (ticks, recomputed, most, together) in PYTORCH[key].items():
        if (K, int(text)) not in SIZES and int(text) not in (16, 32)[: 1 + (K < 4)]:
            continue
        timeline = simulated(name, K, int(text), V)
        assert timeline.makespan_s <= ticks, text
        assert max(timeline.peak_live) <= most, text
        if name != "zb_v" or int(text) >= K:  # shorter, but not with fewer live on every device
            assert sum(timeline.peak_live) <= together, text
        assert simulated(name, K, int(text), V, "recomputed").makespan_s <= recomputed, text


@pytest.mark.parametrize("V", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_bubble_of_whole_backwards_is_that_of_fill_and_drain(name: str, V: int) -> None:
    """Where M < K, each of a device's cells waits for K-M micro-batches more."""
    for K, M in SIZES:
        first_and_last = K - 1 + (V - 1) * max(0, K - M)
        for lengths, pair in (("kept", 3), ("recomputed", 4)):
            found = simulated(name, K, M, V, lengths)
            assert found.makespan_s == pair * (V * M + first_and_last), (K, M)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_live_micro_batches_of_interleaved_cells(V: int) -> None:
    for K, M in SIZES:
        size = orders.round_sizes(K, M)[0]
        found = simulated("interleaved", K, M, V).peak_live
        assert found == tuple(min(V * M, (V - 1) * size + K - k) for k in range(K)), (K, M)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_the_last_cell_is_fused_as_the_schedule_allows(V: int) -> None:
    for K, M in SIZES:
        assert schedule.make("interleaved", K, M, V).fused() == set(range(M)), (K, M)
        assert schedule.make("looped_bfs", K, M, V).fused() == {M - 1}, (K, M)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_zb_h1_waits_a_third_as_long_as_1f1b(V: int) -> None:
    for K, M in SIZES:
        found = simulated("zb_h1", K, M, V)
        if M >= K or V == 1:
            ticks = 3 * V * M + K - 1 if M >= K else 2 * K + 2 * M - 1
            assert found.makespan_s == ticks, (K, M)
        size = orders.round_sizes(K, M)[0]
        assert found.peak_live == (min(V * M, (V - 1) * size + K),) * K, (K, M)


@pytest.mark.parametrize(("name", "more"), [("zb_v", 0), ("dualpipe_v", 1)])
def test_there_and_back_waits_for_fill_and_drain_alone(name: str, more: int) -> None:
    for K, M in SIZES:
        found = simulated(name, K, M, 2)
        assert max(found.peak_live) <= min(2 * M, 2 * K + more)
        if M >= K:
            assert found.makespan_s == 6 * M + K - 1, (K, M)


def halves(slot: Slot) -> list[Slot]:
    if slot.phase != "B":
        return [slot]
    return [Slot(slot.cell, "I", slot.micro_batch), Slot(slot.cell, "W", slot.micro_batch)]


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_whole_backwards_make_no_slot_later(name: str) -> None:
    """B in place of I and W; apart again, every slot begins when it did."""
    for K, M in SIZES[::2]:
        table = schedule.make(name, K, M)
        apart = [
            [part for slot in row if slot is not None for part in halves(slot)]
            for row in table.devices
        ]
        for lengths in LENGTHS.values():
            joined = simulate.simulate(table, lengths)
            split = simulate.simulate(Table(tuple(map(tuple, apart))), lengths)
            starts = {str(span.slot).replace("B", "I"): span.start_s for span in joined.spans}
            assert starts == {str(s.slot): s.start_s for s in split.spans if str(s.slot) in starts}
            assert joined.makespan_s == split.makespan_s


@pytest.mark.parametrize(
    ("name", "V"), [("zb_h1", 1), ("zb_h1", 2), ("zb_v", 2), ("dualpipe_v", 2)]
)
def test_no_table_of_the_same_cells_and_memory_is_shorter(name: str, V: int) -> None:
    for K, M in itertools.product(range(1, 5), range(1, 7)):
        timeline = simulated(name, K, M, V)
        devices = tuple(timeline.table.device_of(cell) for cell in range(K * V))
        problem = search.Problem(devices, M, most_live=max(timeline.peak_live))
        ticks = int(timeline.makespan_s) - 1
        assert search.orders_within(problem, ticks, max_states=20_000)[0] is None, (K, M)


def test_gpipe_text_is_the_known_one() -> None:
    assert schedule.make("gpipe", 2, 2).to_text() == "0F0,0F1,,,0B1,0B0\n,1F0,1F1,1B1,1B0"


def test_1f1b_picture_is_the_known_one() -> None:
    assert schedule.make("1f1b", 4, 8).grid().splitlines() == [
        "cell 0: F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7",
        "cell 1: .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7",
        "cell 2: .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7",
        "cell 3: .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_devices() -> None:
    assert schedule.make("1f1b", 3, 1).grid().splitlines() == [
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
