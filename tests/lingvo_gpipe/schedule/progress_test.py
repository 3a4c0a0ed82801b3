"""What each device does, from the number of its calls that have returned."""

from __future__ import annotations

import itertools

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import progress
from lingvo_gpipe.schedule.slot import Slot
from lingvo_gpipe.schedule.table import Table

SPLIT = Table.from_text("0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1")


def computed(table: Table) -> list[list[Slot]]:
    """Return each device's slots without the backwards that are fused with their forward."""
    last = table.num_cells - 1
    fused = {Slot(last, "B", m) for m in table.fused()}
    return [[slot for slot in row if slot and slot not in fused] for row in table.devices]


@pytest.mark.parametrize(
    "table",
    [
        *(
            schedule.make(name, k, m)
            for name, k, m in itertools.product(schedule.SCHEDULES, (1, 2, 3), (1, 2, 5))
        ),
        SPLIT,
    ],
)
def test_what_runs_is_what_may_run(table: Table) -> None:
    """From any point of a step, the devices that run finish it, one slot at a time."""
    orders = computed(table)
    done = [0] * len(orders)
    for _ in range(sum(map(len, orders))):
        states = progress.states(orders, done)
        running = [state for state in states if state.is_running]
        assert running
        for state in states:
            assert (state.slot is None) == (done[state.device] == len(orders[state.device]))
            # A device that waits needs what another one has not done.
            for need in state.needs:
                other = table.device_of(need.cell)
                assert need in orders[other][done[other] :]
        done[running[-1].device] += 1
    assert all(state.slot is None for state in progress.states(orders, done))


def test_a_fused_backward_is_done_with_its_forward() -> None:
    orders = computed(schedule.make("1f1b", 2, 2))
    assert [str(slot) for slot in orders[1]] == ["1F0", "1F1"]
    before, after = (progress.states(orders, [2, n])[0] for n in (0, 1))
    assert before.line() == "2 of 4 calls returned, 0B0 waits for 1F0"
    assert after.line() == "2 of 4 calls returned, 0B0 is running"


def test_a_split_backward_waits_for_the_gradient_of_the_inputs_alone() -> None:
    orders = computed(SPLIT)
    assert progress.states(orders, [2, 1])[0].needs == (Slot(1, "I", 0),)
    assert progress.states(orders, [2, 2])[0].is_running
