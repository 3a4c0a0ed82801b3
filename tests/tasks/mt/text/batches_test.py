"""Planned mini-batches: shares, epochs, shapes, packing; `input_test` reads them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gpipe.tasks.mt.text import batches, mixture

SIZES = (700, 150, 40, 3)
TOKENS = 160


def lengths_of(sizes: tuple[int, ...] = SIZES, longest: int = 30) -> np.ndarray[Any, Any]:
    """Return made lengths [N, 2], 2 to `longest`."""
    return np.random.RandomState(0).randint(2, longest + 1, (sum(sizes), 2))


def units_of(packing: bool, sizes: tuple[int, ...] = SIZES, **fields: Any) -> batches.Units:
    lengths = lengths_of(sizes)
    languages = np.repeat(np.arange(len(sizes)), sizes)
    examples = batches.Examples(np.arange(sum(sizes)) + 1000, lengths, languages, len(sizes))
    if packing:
        made = {"tokens": TOKENS, "length": 40, "seed": 5} | fields
        return batches.packed(examples, **made)
    made = {"tokens": TOKENS, "num_shapes": 4} | fields
    return batches.by_length(examples, **made)


def of_one_language(lengths: np.ndarray[Any, Any]) -> batches.Examples:
    count = len(lengths)
    return batches.Examples(np.arange(count), lengths, np.zeros(count, int), 1)


def plan_of(packing: bool, temperature: float = 1.0, seed: int = 7) -> batches.BatchPlan:
    return batches.BatchPlan(units_of(packing), temperature=temperature, seed=seed)


def sentences(plan: batches.BatchPlan, planned: batches.PlannedBatch) -> list[int]:
    """Return the numbers of a mini-batch's examples in their order."""
    return [int(n) for unit in planned.units for n in plan.units.of(int(unit))]


@pytest.mark.parametrize("packing", [False, True])
def test_epochs_and_seeds_have_orders_of_their_own(packing: bool) -> None:
    orders = {
        tuple(n for batch in plan_of(packing, seed=seed).epoch(epoch) for n in batch.units)
        for seed, epoch in ((7, 0), (7, 1), (8, 0))
    }
    assert len(orders) == 3


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0])
def test_sentences_are_drawn_as_the_formula_says(temperature: float) -> None:
    plan = plan_of(False, temperature)
    epochs = 40
    drawn = np.zeros(len(SIZES))
    for epoch in range(epochs):
        for batch in plan.epoch(epoch):
            drawn += np.bincount(plan.units.languages[batch.units], minlength=len(SIZES))
    wanted = epochs * sum(SIZES) * mixture.probabilities(SIZES, temperature)
    # A stratum's sum is rounded once, not once an epoch.
    assert (np.abs(drawn - wanted) <= 0.5 * len(plan.units.shapes) + 1e-6).all()


def test_position_is_found_far_ahead_without_planning_what_lies_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(False, 5.0)
    monkeypatch.delattr(batches.BatchPlan, "epoch")
    sizes = plan.epoch_sizes(0, 1000)
    assert plan.locate(int(sizes.sum()) - 1) == (999, int(sizes[-1]) - 1)
    assert plan.locate(int(sizes[:500].sum())) == (500, 0)
    assert plan.locate(0) == (0, 0)


def test_threads_may_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of several replicas do: each finds what one alone finds."""
    wanted, plan = plan_of(False, 5.0), plan_of(False, 5.0)
    both = threading.Barrier(2)
    sizes = batches.BatchPlan.epoch_sizes

    def met(own: batches.BatchPlan, first: int, last: int) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)
        return sizes(own, first, last)

    monkeypatch.setattr(batches.BatchPlan, "epoch_sizes", met)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(plan.locate, (0, 0)))
    monkeypatch.undo()
    wanted.locate(0)
    assert plan._before.tolist() == wanted._before.tolist()


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_the_predicted_number_of_batches(packing: bool, temperature: float) -> None:
    plan = plan_of(packing, temperature)
    assert plan.epoch_sizes(0, 9).tolist() == [len(plan.epoch(epoch)) for epoch in range(9)]


def test_shapes_are_bounded_and_hold_their_sentences() -> None:
    plan = plan_of(False)
    length = dict(zip(range(1000, 1000 + sum(SIZES)), lengths_of().max(1), strict=True))
    assert len(plan.units.shapes) == 4
    for batch in plan.epoch(0):
        assert batch.shape in plan.units.shapes
        assert 0 < len(batch.units) <= batch.shape.rows
        assert batch.shape.rows * batch.shape.length <= TOKENS
        assert all(length[n] <= batch.shape.length for n in sentences(plan, batch))
    full = [batch for batch in plan.epoch(0) if len(batch.units) == batch.shape.rows]
    assert len(full) >= len(plan.epoch(0)) - len(plan.units.shapes)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=25), st.integers(1, 4))
@settings(max_examples=60)
def test_bounds_pad_least(lengths: list[int], count: int) -> None:
    def padded(limits: tuple[int, ...]) -> int:
        return sum(min(limit for limit in limits if limit >= length) for length in lengths)

    found = batches.bounds(np.array(lengths), count)
    assert len(found) <= count
    assert found[-1] == max(lengths)
    below = sorted(set(lengths) - {max(lengths)})
    others = (
        (*chosen, max(lengths))
        for size in range(count)
        for chosen in itertools.combinations(below, size)
    )
    assert padded(found) == min(map(padded, others))


def test_packed_rows_hold_one_language_and_no_more_than_fits() -> None:
    units = units_of(True)
    lengths = lengths_of()
    languages = np.repeat(np.arange(len(SIZES)), SIZES)
    packed = [units.of(unit) - 1000 for unit in range(len(units.ends))]
    assert sorted(itertools.chain.from_iterable(packed)) == list(range(sum(SIZES)))
    for unit, members in enumerate(packed):
        assert (languages[members] == units.languages[unit]).all()
        assert (lengths[members].sum(0) <= 40).all()


def test_packed_rows_are_full_and_end_where_nothing_fits() -> None:
    lengths = np.random.RandomState(1).randint(2, 30, (5000, 1)) + np.zeros((1, 2), int)
    made = {"tokens": 1000, "length": 100, "seed": 5}
    units = batches.packed(of_one_language(lengths), **made)
    assert lengths.sum() > 0.97 * 2 * 100 * len(units.ends)
    # Two fill a row to its end.
    few = batches.packed(of_one_language(np.full((6, 2), 50)), **made)
    assert few.ends.tolist() == [2, 4, 6]
