"""Which forwards a backward keeps, fuses or computes again."""

from __future__ import annotations

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import recompute, simulate, table

SPLIT = table.Table.from_text("0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1B1")


def test_what_a_policy_keeps_is_never_computed_again() -> None:
    table = schedule.make("1f1b", 3, 4)
    found = recompute.reuse(table, ("full", "except_last", "never"), fuse=False)
    assert [cell.kept for cell in found] == [frozenset(), frozenset({3}), frozenset(range(4))]
    assert not any(cell.fused for cell in found)
    assert [cell.recomputations for cell in found] == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "fused"), [("1f1b", 4, 4), ("gpipe", 1, 1), ("gpipe", 4, 0)]
)
def test_a_last_cell_that_keeps_everything_is_fused_if_all_its_micro_batches_meet(
    name: str, num_micro_batches: int, fused: int
) -> None:
    """Otherwise all are kept, by one pair of programs."""
    table = schedule.make(name, 2, num_micro_batches)
    last = recompute.reuse(table, ("never", "never"), fuse=True)[-1]
    assert (len(last.fused), len(last.kept)) == (fused, num_micro_batches - fused)
    assert last.recomputations == 0.0


@pytest.mark.parametrize(("name", "fused"), [("gpipe", {3}), ("1f1b", {0, 1, 2, 3})])
def test_the_last_cell_computes_nothing_again_where_it_is_fused(name: str, fused: set[int]) -> None:
    table = schedule.make(name, 2, 4)
    found = recompute.reuse(table, ("full", "full"), fuse=True)
    assert [cell.fused for cell in found] == [frozenset(), fused]
    assert [cell.recomputations for cell in found] == [1.0, 1.0 - len(fused) / 4]
    alone = recompute.reuse(table, ("full", "full"), fuse=False)
    assert alone == (recompute.CellReuse(recomputations=1.0),) * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_is_fused_is_not_kept(name: str) -> None:
    table = schedule.make(name, 2, 4)
    full, last = (
        recompute.reuse(table, ("full", policy), fuse=True) for policy in ("full", "except_last")
    )
    assert last == full


def test_a_split_backward_computes_its_forward_again_once() -> None:
    def recomputations(*by_cell: str, fuse: bool = False) -> tuple[float, ...]:
        return tuple(cell.recomputations for cell in recompute.reuse(SPLIT, by_cell, fuse=fuse))

    assert recomputations("full", "full") == (1.0, 1.0)
    assert recomputations("never", "never") == (0.0, 0.0)
    # One micro-batch is fused; the forward of the other is kept until its I, which comes next.
    assert recomputations("full", "full", fuse=True) == (1.0, 0.0)
    assert recomputations("full", "except_last", fuse=True) == (1.0, 0.0)
    assert recomputations("full", "never", fuse=True) == (1.0, 0.0)
    assert recomputations("full", "except_last") == (1.0, 0.5)


def test_early_recomputations_are_slots_before_their_backwards() -> None:
    found = recompute.with_slots(schedule.make("gpipe", 2, 2), ("early", "full"), fuse=True)
    assert found.grid().splitlines() == [
        "cell 0: F0 F1 R1 .  B1 R0 B0",
        "cell 1: .  F0 F1 B1 B0",
    ]
    reuses = recompute.reuse(found, ("early", "full"), fuse=True)
    assert reuses[0].early == {0, 1}
    assert reuses[0].recomputations == 1.0
    # What is fused needs none, nor what has one already.
    again = recompute.with_slots(found, ("early", "early"), fuse=True)
    assert again.recomputed() == (frozenset({0, 1}), frozenset({0}))
    split = recompute.with_slots(SPLIT, ("early", "full"), fuse=True)
    assert [str(slot) for slot in split.devices[0] if slot][2:5] == ["0R0", "0I0", "0W0"]


@pytest.mark.parametrize("policy", ["full", "never"])
def test_slots_are_added_for_early_cells_alone(policy: str) -> None:
    table = schedule.make("1f1b", 3, 4)
    assert recompute.with_slots(table, (policy,) * 3, fuse=True) is table


@pytest.mark.parametrize(("K", "M"), [(2, 2), (4, 8), (8, 32)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_early_recomputation_runs_while_the_gradient_is_awaited(name: str, K: int, M: int) -> None:
    table = schedule.make(name, K, M)
    late = simulate.simulate(table, {"F": 1.0, "B": 3.0}).makespan_s
    early = recompute.with_slots(table, ("early",) * K, fuse=False)
    found = simulate.simulate(early, {"F": 1.0, "B": 2.0, "R": 1.0}).makespan_s
    # Of every hop back from the last cell to the first, one recomputation.
    assert late - found == K - 1
