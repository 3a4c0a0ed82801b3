"""A step is compared with its table, and what made it longer is named."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.run.profiles import prediction
from lingvo_gpipe.schedule import breakdown, simulate

STEP_S = 0.054
"""Of 2 cells and 8 micro-batches: 9 slots of 2 ms, then 9 of 4 ms."""


def timeline(longer: dict[int, float] | None = None) -> simulate.Timeline:
    """Return a step; some micro-batches' backwards in cell 0 take longer."""
    table = schedule.make("gpipe", 2, 8)
    usual = simulate.simulate(table, [0.002] * 2, [0.004] * 2)
    late_s, spans = 0.0, []
    for span in sorted(usual.spans, key=lambda span: span.start_s):
        start_s = span.start_s
        if span.slot.phase == "B" and span.device == 0:
            start_s += late_s
            late_s += (longer or {}).get(span.slot.micro_batch, 0.0)
            span = dataclasses.replace(span, start_s=start_s, end_s=span.end_s + late_s)
        spans.append(span)
    return simulate.Timeline(table, tuple(spans))


def line(
    ran: simulate.Timeline, *, start_s: float = 0.0, end_s: float = 0.0, input_s: float = 0.0
) -> str:
    around = breakdown.Around(-start_s, ran.makespan_s + end_s, input_s)
    return prediction.line([ran], breakdown.of_step(ran, around))


@pytest.mark.parametrize(("more_s", "ratio"), [(0.0, "1.00"), (0.0027, "1.05")])
def test_a_step_that_is_near_its_table_has_a_ratio(more_s: float, ratio: str) -> None:
    assert line(timeline(), end_s=more_s) == (
        f"it took {1e3 * (STEP_S + more_s):.1f} ms, {ratio} of the 54.0 ms that its table needs "
        "with the median time of each slot"
    )


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"input_s": 0.027, "end_s": 0.01}, "27.0 ms waiting for the mini-batch"),
        ({"start_s": 0.027}, "27.0 ms what precedes the slots"),
        ({"end_s": 0.027}, "27.0 ms its update"),
    ],
)
def test_a_longer_step_names_what_took_most(parts: dict[str, float], cause: str) -> None:
    found = line(timeline(), **parts)
    assert "% more than the 54.0 ms" in found
    assert cause in found


def test_a_step_that_builds_graphs_says_so() -> None:
    ran = timeline()
    rows = breakdown.of_step(ran, breakdown.Around(-0.5, ran.makespan_s))
    assert prediction.line([ran], rows, builds=True).endswith("500.0 ms building its graphs")


def test_a_few_slow_slots_do_not_change_the_prediction() -> None:
    found = line(timeline({3: 0.02, 5: 0.007}))
    assert found.startswith("it took 81.0 ms, 50% more than the 54.0 ms")
    assert "27.0 ms slots that took longer than others of their kind" in found


def test_a_step_is_compared_with_its_plan() -> None:
    ran = timeline()
    rows = breakdown.of_step(ran, breakdown.Around(-0.01, ran.makespan_s, 0.0))

    def beside(slots_s: float) -> str:
        return prediction.beside_plan([ran], rows, prediction.Planned(slots_s, 0.01))

    assert beside(0.054) == (
        "that is 1.00 of the 64.0 ms that --profile planned for slots and update"
    )
    assert beside(0.04) == (
        "that is 28% more than the 50.0 ms that --profile planned for slots and update; "
        "slots took 54.0 ms"
    )
    assert beside(0.07).startswith("that is 20% less than the 80.0 ms")


def test_a_step_of_several_groups_is_compared_with_all_of_their_tables() -> None:
    """Two groups of 54 ms, of which the second one is late in two slots, and 10 ms of update."""
    groups = [timeline(), timeline({3: 0.02, 5: 0.007})]
    rows = [{"forward": 0.054 + 0.081, "update": 0.01}] * 2
    rows = [dict.fromkeys(breakdown.PARTS, 0.0) | row for row in rows]
    found = prediction.line(groups, rows)
    assert found.startswith("it took 145.0 ms, 34% more than the 108.0 ms that its table needs")
    assert "27.0 ms slots that took longer than others of their kind" in found
    planned = prediction.Planned(slots_s=0.054, update_s=0.01)
    assert prediction.beside_plan(groups, rows, planned) == (
        "that is 23% more than the 118.0 ms that --profile planned for slots and update; "
        "slots took 135.0 ms"
    )
