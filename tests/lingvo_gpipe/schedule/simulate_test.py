from __future__ import annotations

import itertools
import math
import re
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.schedule.simulate import Links
from lingvo_gpipe.schedule.table import Slot, Table

SIZES = list(itertools.product(range(1, 9), range(1, 9)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_equal_cells_is_the_closed_form(name: str) -> None:
    for K, M in SIZES:
        timeline = simulate.simulate(schedule.make(name, K, M), {"F": 1.0, "B": 2.5})
        assert timeline.bubble_share == pytest.approx((K - 1) / (M + K - 1), abs=1e-12)
        assert timeline.makespan_s == pytest.approx((M + K - 1) * 3.5)
        assert timeline.busy_s == pytest.approx([M * 3.5] * K)
        live = (M,) * K if name == "gpipe" else tuple(min(K - k, M) for k in range(K))
        assert timeline.peak_live == live, (K, M)


def test_a_forward_alone_lives_for_one_slot() -> None:
    table = schedule.make("\n".join(f"{k}F0,{k}F1,{k}F2" for k in range(4)), 4, 3)
    assert simulate.simulate(table, {"F": 1.0, "B": 2.0}).peak_live == (1,) * 4


def test_unequal_cells_wait_for_their_neighbours() -> None:
    timeline = simulate.simulate(schedule.make("gpipe", 2, 2), {"F": [1.0, 3.0], "B": [10.0, 2.0]})
    assert [(str(span.slot), span.device, span.start_s, span.end_s) for span in timeline.spans] == [
        ("0F0", 0, 0, 1),
        ("0F1", 0, 1, 2),
        ("1F0", 1, 1, 4),
        ("1F1", 1, 4, 7),
        ("1B1", 1, 7, 9),
        ("0B1", 0, 9, 19),
        ("1B0", 1, 9, 11),
        ("0B0", 0, 19, 29),
    ]
    assert timeline.makespan_s == 29
    assert timeline.busy_s == (22, 10)
    assert timeline.bubble_share == pytest.approx(1 - 32 / 58)


@pytest.mark.parametrize(
    ("K", "seconds", "links", "expected"),
    [
        # Activations and gradients take the time of their link.
        (
            3,
            {"F": 1.0, "B": 1.0},
            Links({(0, 1): 10.0, (1, 2): 100.0}),
            {"0F0": 1, "1F0": 12, "2F0": 113, "2B0": 114, "1B0": 215, "0B0": 226},
        ),
        # A skip connection delays both its ends.
        (
            3,
            {"F": 1.0, "B": 1.0},
            Links({(0, 1): 0.0, (1, 2): 0.0, (0, 2): 50.0}),
            {"0F0": 1, "1F0": 2, "2F0": 52, "2B0": 53, "1B0": 54, "0B0": 104},
        ),
        # A cell waits for no other than it reads.
        (
            3,
            {"F": 1.0, "B": 1.0},
            Links({(0, 2): 0.0, (1, 2): 5.0}),
            {"0F0": 1, "1F0": 1, "2F0": 7, "2B0": 8, "1B0": 14, "0B0": 9},
        ),
        # A cell whose exports have no gradient does not wait for one.
        (
            2,
            {"F": [1.0, 4.0], "B": [0.0, 4.0]},
            Links({(0, 1): 0.0}, no_gradient=[(0, 1)]),
            {"0F0": 1, "0B0": 1, "1F0": 5, "1B0": 9},
        ),
    ],
)
def test_links(K: int, seconds: Any, links: Links, expected: dict[str, float]) -> None:
    timeline = simulate.simulate(schedule.make("1f1b", K, 1), seconds, links=links)
    assert {str(span.slot): span.end_s for span in timeline.spans} == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fused_last_cell_takes_its_own_time_once_per_fused_pair(name: str) -> None:
    for K, M in SIZES:
        table = schedule.make(name, K, M)
        timeline = simulate.simulate(table, {"F": 1.0, "B": 3.0}, fused_s=3.0)
        assert timeline.busy_s[-1] == 4 * M - len(table.fused())
        assert timeline.busy_s[:-1] == (4 * M,) * (K - 1)
        spans = {span.slot: span for span in timeline.spans}
        for m in table.fused():
            forward, backward = spans[Slot(K - 1, "F", m)], spans[Slot(K - 1, "B", m)]
            assert forward.end_s == backward.start_s
            assert backward.end_s - forward.start_s == 3.0


def test_fused_shorter_than_its_forward_is_one_stretch() -> None:
    timeline = simulate.simulate(schedule.make("1f1b", 1, 2), {"F": 2.0, "B": 2.0}, fused_s=1.0)
    assert timeline.makespan_s == 2.0


def test_split_backwards_send_their_gradient_early() -> None:
    table = Table.from_text("0F0,0I0,0W0\n1F0,1I0,1W0")
    timeline = simulate.simulate(table, {"F": 1.0, "I": 2.0, "W": 4.0})
    ends = {str(span.slot): span.end_s for span in timeline.spans}
    assert ends == {"0F0": 1, "1F0": 2, "1I0": 4, "1W0": 8, "0I0": 6, "0W0": 10}
    assert timeline.peak_live == (1, 1)


def test_split_micro_batch_lives_until_its_weight_gradient() -> None:
    table = Table.from_text("0F0,0I0,0F1,0I1,0W0,0W1")
    timeline = simulate.simulate(table, simulate.EQUAL_SLOTS)
    assert timeline.peak_live == (2,)


def test_device_of_two_cells_keeps_each_of_them() -> None:
    table = Table.from_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    timeline = simulate.simulate(table, {"F": 1.0, "B": 1.0})
    assert timeline.peak_live == (2, 1)
    assert timeline.busy_s == (4, 2)


@hypothesis.given(
    st.integers(1, 5), st.integers(1, 6), st.sampled_from(["gpipe", "1f1b"]), st.data()
)
def test_every_slot_starts_when_its_device_and_data_allow(
    K: int, M: int, name: str, data: st.DataObject
) -> None:
    table = schedule.make(name, K, M)
    times = st.lists(st.floats(0, 100), min_size=K, max_size=K)
    forward_s, backward_s = data.draw(times), data.draw(times)
    timeline = simulate.simulate(table, {"F": forward_s, "B": backward_s})
    spans = {span.slot: span for span in timeline.spans}
    for row in table.devices:
        previous_s = 0.0
        for slot in filter(None, row):
            needed = [spans[need].end_s for need in slot.needs(K) if need in spans]
            assert spans[slot].start_s == max([previous_s, *needed])
            length_s = (forward_s if slot.phase == "F" else backward_s)[slot.cell]
            assert math.isclose(spans[slot].end_s - spans[slot].start_s, length_s, abs_tol=1e-9)
            previous_s = spans[slot].end_s
    assert 0 <= timeline.bubble_share <= 1


def test_no_time_at_all_has_no_bubble() -> None:
    assert simulate.simulate(schedule.make("gpipe", 2, 2), {"F": 0, "B": 0}).bubble_share == 0


@pytest.mark.parametrize(
    ("seconds", "others", "text"),
    [
        ({"F": [1.0], "B": 1.0}, {}, "F has 1 times for 2 cells. Give one per cell"),
        ({"F": 1.0}, {}, "the table has B slots, but no seconds are given for them"),
        (
            {"F": [1.0, -1.0], "B": 1.0},
            {},
            "F: -1.0 is negative or not finite. Use seconds of 0 or more",
        ),
        (
            {"F": 1.0, "B": math.nan},
            {},
            "B: nan is negative or not finite. Use seconds of 0 or more",
        ),
        (
            {"F": 1.0, "B": 1.0},
            {"fused_s": math.inf},
            "fused_s: inf is negative or not finite. Use seconds of 0 or more",
        ),
        (
            {"F": 1.0, "B": 1.0},
            {"links": Links({(0, 1): -1.0})},
            "links[(0, 1)]: -1.0 is negative or not finite. Use seconds of 0 or more",
        ),
    ],
)
def test_times_that_do_not_fit_are_refused(seconds: Any, others: Any, text: str) -> None:
    with pytest.raises(errors.ScheduleError, match=f"^{re.escape(text)}$"):
        simulate.simulate(schedule.make("gpipe", 2, 2), seconds, **others)
