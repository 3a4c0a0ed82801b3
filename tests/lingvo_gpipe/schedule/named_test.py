"""Figures of the named schedules: closed forms, PyTorch's tables, and what no table can beat."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import search, simulate
from lingvo_gpipe.schedule.named import dualpipe_v, rounds, weight_slots, zb_v
from lingvo_gpipe.schedule.table import Slot, Table

PYTORCH = json.loads(Path(__file__).with_name("pytorch.json").read_text())
KEYS = [key for key in PYTORCH if key != "torch"]
LENGTHS = {"kept": (1, 2, 1, 1), "recomputed": (1, 3, 2, 1)}
# Every K with M < K, M not divisible by K, and a few rounds.
SIZES = [
    (K, M) for K in range(1, 9) for M in sorted({1, 2, K - 1, K, K + 1, 2 * K - 1, 2 * K + 3}) if M
]


@functools.cache
def simulated(name: str, K: int, M: int, V: int, lengths: str = "kept") -> simulate.Timeline:
    return simulate_table(schedule.make(name, K, M, V), lengths)


def simulate_table(table: Table, lengths: str = "kept") -> simulate.Timeline:
    f, b, i, w = ([length] * table.num_cells for length in LENGTHS[lengths])
    return simulate.simulate(table, f, b, input_gradient_s=i, weight_gradient_s=w)


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
        size = rounds.sizes(K, M)[0]
        found = simulated("interleaved", K, M, V).peak_live
        assert found == tuple(min(V * M, (V - 1) * size + K - k) for k in range(K)), (K, M)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_every_backward_of_the_last_interleaved_cell_is_fused(V: int) -> None:
    for K, M in SIZES:
        assert schedule.make("interleaved", K, M, V).fused() == set(range(M)), (K, M)


def test_rounds_have_k_micro_batches_or_more_and_differ_by_one() -> None:
    for K in range(1, 9):
        for M in range(1, 40):
            sizes = rounds.sizes(K, M)
            assert sum(sizes) == M
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            assert M < K or K <= sizes[-1] <= sizes[0] < 2 * K


@pytest.mark.parametrize("V", [1, 2, 3])
def test_zb_h1_waits_a_third_as_long_as_1f1b(V: int) -> None:
    for K, M in SIZES:
        found = simulated("zb_h1", K, M, V)
        if M >= K or V == 1:
            ticks = 3 * V * M + K - 1 if M >= K else 2 * K + 2 * M - 1
            assert found.makespan_s == ticks, (K, M)
        size = rounds.sizes(K, M)[0]
        assert found.peak_live == (min(V * M, (V - 1) * size + K),) * K, (K, M)


@pytest.mark.parametrize(("name", "more"), [("zb_v", 0), ("dualpipe_v", 1)])
def test_there_and_back_waits_for_fill_and_drain_alone(name: str, more: int) -> None:
    for K, M in SIZES:
        found = simulated(name, K, M, 2)
        assert max(found.peak_live) <= min(2 * M, 2 * K + more)
        if M >= K:
            assert found.makespan_s == 6 * M + K - 1, (K, M)


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
def test_weight_gradients_in_the_bubbles_make_no_table_longer(name: str) -> None:
    module = {"zb_v": zb_v, "dualpipe_v": dualpipe_v}[name]
    for K, M in SIZES:
        orders = [module._order(k, K, M) for k in range(K)]
        moved = weight_slots.filled(orders)
        for before, after in zip(orders, moved, strict=True):
            assert sorted(map(str, before)) == sorted(map(str, after))
            assert weight_slots.most_live(after) <= weight_slots.most_live(before)
        ticks = [
            simulate_table(Table(tuple(map(tuple, each)))).makespan_s for each in (orders, moved)
        ]
        assert ticks[1] <= ticks[0], (K, M)


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
        for lengths in LENGTHS:
            joined = simulate_table(table, lengths)
            split = simulate_table(Table(tuple(map(tuple, apart))), lengths)
            starts = {str(span.slot).replace("B", "I"): span.start_s for span in joined.spans}
            assert starts == {str(s.slot): s.start_s for s in split.spans if str(s.slot) in starts}
            assert joined.makespan_s == split.makespan_s


@pytest.mark.parametrize(
    ("name", "V"),
    [
        ("interleaved", 2),
        ("looped_bfs", 2),
        ("zb_h1", 1),
        ("zb_h1", 2),
        ("zb_v", 2),
        ("dualpipe_v", 2),
    ],
)
def test_no_table_of_the_same_cells_and_memory_is_shorter(name: str, V: int) -> None:
    longer = {}
    for K, M in ((K, M) for K in range(1, 5) for M in range(1, 7)):
        timeline = simulated(name, K, M, V)
        problem = search.Problem(
            tuple(timeline.table.device_of(k) for k in range(K * V)),
            M,
            split=name in ("zb_h1", "zb_v", "dualpipe_v"),
            most_live=max(timeline.peak_live),
        )
        least = search.least_ticks(problem, int(timeline.makespan_s), max_states=20_000)
        assert least is not None
        if least < timeline.makespan_s:
            longer[K, M] = timeline.makespan_s - least
    assert longer == {}
