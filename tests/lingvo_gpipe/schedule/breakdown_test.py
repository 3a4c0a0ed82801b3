"""The parts of a step add up, and each is what it says."""

from __future__ import annotations

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import breakdown, recompute, simulate
from lingvo_gpipe.schedule.slot import Slot


def simulated(
    name: str, K: int, M: int, forward: list[float], back: list[float]
) -> simulate.Timeline:
    return simulate.simulate(schedule.make(name, K, M), {"F": forward, "B": back})


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_cells_wait_only_while_the_pipeline_fills_and_drains(name: str) -> None:
    timeline = simulated(name, 4, 8, [1.0] * 4, [2.0] * 4)
    rows = breakdown.of_step(timeline, breakdown.Around(0.0, timeline.makespan_s + 2.0, 1.0))
    for row in rows:
        assert sum(row.values()) == pytest.approx(timeline.makespan_s + 3.0)
        assert row["fill and drain"] == pytest.approx(9.0)
        assert [row["forward"], row["backward"]] == pytest.approx([8.0, 16.0])
        assert [row["update"], row["input"]] == pytest.approx([2.0, 1.0])
        others = [row[part] for part in ("imbalance", "transfer", "recomputation", "start", "rest")]
        assert others == pytest.approx([0.0] * 5)


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("M", [1, 4])
def test_equal_cells_of_which_not_all_split_their_backwards_wait_for_nothing_else(
    name: str, M: int
) -> None:
    table = schedule.make(name, 2, M)
    timeline = simulate.simulate(table, simulate.EQUAL_SLOTS)
    rows = breakdown.of_step(timeline, breakdown.Around(0.0, timeline.makespan_s))
    assert [row["imbalance"] for row in rows] == pytest.approx([0.0, 0.0])


def test_a_slow_cell_makes_the_others_wait() -> None:
    timeline = simulated("gpipe", 2, 4, [1.0, 3.0], [2.0, 6.0])
    fast, slow = breakdown.of_step(timeline, breakdown.Around(0.0, timeline.makespan_s))
    assert fast["imbalance"] > 0.0
    assert slow["imbalance"] == 0.0
    assert fast["backward"] == 8.0
    assert slow["backward"] == 24.0
    assert fast["rest"] == pytest.approx(0.0)


def test_links_are_transfer() -> None:
    table = schedule.make("gpipe", 2, 1)
    timeline = simulate.simulate(table, {"F": 1.0, "B": 2.0}, links=simulate.Links({(0, 1): 0.5}))
    first, last = breakdown.of_step(timeline, breakdown.Around(0.0, timeline.makespan_s))
    # The gradient to the first cell; the tensor to the second one.
    assert (first["transfer"], last["transfer"]) == (0.5, 0.5)
    assert first["fill and drain"] + first["imbalance"] == 3.5


def test_recomputation_is_a_slot_or_a_share_of_the_backward() -> None:
    table = schedule.make("1f1b", 2, 3)
    early = recompute.with_slots(table, ("early", "early"), fuse=False)
    timeline = simulate.simulate(early, {"F": 1.0, "B": 2.0, "R": 1.0})
    around = breakdown.Around(0.0, timeline.makespan_s)
    assert [row["recomputation"] for row in breakdown.of_step(timeline, around)] == [3.0, 3.0]
    timeline = simulate.simulate(table, {"F": 1.0, "B": 3.0})
    rows = breakdown.of_step(
        timeline, around, recomputed=lambda slot: 1 / 3 if slot.cell == 0 else 0.0
    )
    assert [row["recomputation"] for row in rows] == pytest.approx([3.0, 0.0])
    assert [row["backward"] for row in rows] == pytest.approx([6.0, 9.0])


def test_a_fused_slot_is_forward_and_backward() -> None:
    table = schedule.make("gpipe", 1, 2)
    spans = (
        simulate.Span(0, Slot(0, "F", 0), 1.0, 2.0),
        simulate.Span(0, Slot(0, "F", 1), 2.0, 6.0),
        simulate.Span(0, Slot(0, "B", 0), 6.0, 8.0),
    )
    timeline = breakdown.with_backwards(table, spans, 0.25)
    assert set(table) == {span.slot for span in timeline.spans}
    (row,) = breakdown.of_step(timeline, breakdown.Around(0.5, 9.0))
    assert (row["forward"], row["backward"]) == (2.0, 5.0)
    assert (row["start"], row["update"]) == (0.5, 1.0)
    assert row["rest"] == pytest.approx(0.0)


def test_the_gradient_of_a_fused_slot_is_there_when_it_ends() -> None:
    spans = (
        simulate.Span(0, Slot(0, "F", 0), 0.0, 1.0),
        simulate.Span(1, Slot(1, "F", 0), 1.0, 4.0),
        simulate.Span(0, Slot(0, "B", 0), 4.5, 6.5),
    )
    timeline = breakdown.with_backwards(schedule.make("gpipe", 2, 1), spans, 0.5)
    first, _ = breakdown.of_step(timeline, breakdown.Around(0.0, 6.5))
    assert first["transfer"] == 0.5
    assert first["fill and drain"] + first["imbalance"] == 3.0


def test_the_table_shows_parts_that_exist() -> None:
    timeline = simulated("gpipe", 2, 2, [1.0] * 2, [2.0] * 2)
    rows = breakdown.of_step(timeline, breakdown.Around(0.0, timeline.makespan_s + 1.0))
    head, *lines = breakdown.table_of(rows, ["device 0", "device 1"])
    assert head == ["", "forward", "backward", "fill and drain", "update", "step ms"]
    assert lines[0] == ["device 0", "20.0 %", "40.0 %", "30.0 %", "10.0 %", "10000.0"]
    rounded = [{**row, "rest": -1e-12, "input": 1e-9} for row in rows]
    assert breakdown.table_of(rounded, ["device 0", "device 1"]) == [head, *lines]
    rounded[0]["rest"] = -0.02
    with_rest, _, second = breakdown.table_of(rounded, ["device 0", "device 1"])
    assert second[with_rest.index("rest")] == "0.0 %"  # not -0.0 %
