"""Planned mini-batches: shares, epochs, resumption, shapes, packing; no TensorFlow."""

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

from lingvo_gpipe import errors
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


def plan_of(
    packing: bool, temperature: float = 1.0, seed: int = 7, **fields: Any
) -> batches.BatchPlan:
    return batches.BatchPlan(units_of(packing), temperature=temperature, seed=seed, **fields)


def sentences(plan: batches.BatchPlan, planned: batches.PlannedBatch) -> list[int]:
    """Return the numbers of a mini-batch's examples in their order."""
    return [int(n) for unit in planned.units for n in plan.units.of(int(unit))]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("epoch", [0, 1, 70])
def test_at_temperature_one_an_epoch_has_every_sentence_once(packing: bool, epoch: int) -> None:
    plan = plan_of(packing)
    seen = [n for batch in plan.epoch(epoch) for n in sentences(plan, batch)]
    assert sorted(seen) == list(range(1000, 1000 + sum(SIZES)))


@pytest.mark.parametrize("packing", [False, True])
def test_epochs_and_seeds_have_orders_of_their_own(packing: bool) -> None:
    orders = {
        tuple(n for batch in plan_of(packing, seed=seed).epoch(epoch) for n in batch.units)
        for seed, epoch in ((7, 0), (7, 1), (8, 0))
    }
    assert len(orders) == 3


@pytest.mark.parametrize("packing", [False, True])
def test_languages_stand_elsewhere_in_each_epoch(packing: bool) -> None:
    plan = plan_of(packing)
    layouts = set()
    for epoch in range(3):
        languages = (plan.units.languages[batch.units] for batch in plan.epoch(epoch))
        layouts.add(tuple(sorted(tuple(row.tolist()) for row in languages)))
    assert len(layouts) == 3


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


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0])
def test_packed_sentences_are_drawn_as_the_formula_says(temperature: float) -> None:
    plan = plan_of(True, temperature)
    epochs = 40
    drawn = np.zeros(len(SIZES))
    for batch in itertools.chain.from_iterable(map(plan.epoch, range(epochs))):
        for unit in batch.units:
            drawn[plan.units.languages[unit]] += len(plan.units.of(int(unit)))
    wanted = mixture.probabilities(SIZES, temperature)
    np.testing.assert_allclose(drawn / drawn.sum(), wanted, atol=0.003)


def test_a_stratum_drawn_less_than_once_an_epoch_is_not_left_behind() -> None:
    plan = plan_of(False, 100.0, epoch_examples=20)
    seen = {n for e in range(400) for batch in plan.epoch(e) for n in sentences(plan, batch)}
    assert seen == set(range(1000, 1000 + sum(SIZES)))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_resumed_is_uninterrupted(packing: bool, temperature: float) -> None:
    whole = plan_of(packing, temperature)
    count = int(whole.epoch_sizes(0, 3).sum()) + 5
    wanted = [(b.shape, sentences(whole, b)) for b in map(whole.batch, range(count))]
    for start in (1, count // 2, count - 1):
        plan = plan_of(packing, temperature)
        found = [plan.batch(position) for position in range(start, count)]
        assert [(b.shape, sentences(plan, b)) for b in found] == wanted[start:]


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


def test_both_sides_of_an_epochs_edge_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, planned = plan_of(False), list[int]()
    made = batches.BatchPlan._plan

    def noted(own: batches.BatchPlan, epoch: int) -> Any:
        planned.append(epoch)
        return made(own, epoch)

    monkeypatch.setattr(batches.BatchPlan, "_plan", noted)
    for epoch in (0, 1, 0, 1, 2, 1, 2):
        plan.epoch(epoch)
    assert planned == [0, 1, 2]


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


def test_rows_are_a_multiple_and_at_least_one() -> None:
    assert batches.rows_of(100, 30) == 3
    assert batches.rows_of(100, 30, multiple_of=2) == 2
    assert batches.rows_of(10, 30) == 1
    assert batches.rows_of(10, 30, multiple_of=4) == 4


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
    assert batches.fill(lengths, units, batches.once(units)) > 0.97
    # Two fill a row to its end.
    few = batches.packed(of_one_language(np.full((6, 2), 50)), **made)
    assert few.ends.tolist() == [2, 4, 6]


def first_fit(lengths: list[list[int]], capacity: int) -> list[int]:
    """Return the row of each example: the first open one that takes it; the fullest is closed."""
    free: dict[int, tuple[int, list[int]]] = {place: (-1, [0, 0]) for place in range(64)}
    found = []
    begun = 0
    for sides in lengths:
        fits = [p for p, (_, left) in free.items() if left[0] >= sides[0] and left[1] >= sides[1]]
        if not fits:
            fits = [min(free, key=lambda p: sum(free[p][1]))]
            free[fits[0]] = (begun, [capacity, capacity])
            begun += 1
        row, left = free[fits[0]]
        left[0] -= sides[0]
        left[1] -= sides[1]
        found.append(row)
    return found


@pytest.mark.parametrize(("longest", "capacity"), [(30, 40), (60, 256), (12, 128), (40, 40)])
def test_packing_is_first_fit_over_few_open_rows(longest: int, capacity: int) -> None:
    lengths = lengths_of((3000,), longest)
    made = {"tokens": 1000, "length": capacity, "seed": 5}
    units = batches.packed(of_one_language(lengths), **made)
    order = mixture.permutation(3000, 5, batches._PACK, 0)
    rows = np.array(first_fit(lengths[order].tolist(), capacity))
    for unit in range(len(units.ends)):
        assert units.of(unit).tolist() == order[rows == unit].tolist()
    assert len(units.ends) == rows.max() + 1


def test_an_evaluation_has_every_sentence_once() -> None:
    units = units_of(False)
    planned = batches.once(units)
    assert sorted(u for batch in planned for u in batch.units) == list(range(sum(SIZES)))
    assert {batch.shape for batch in planned} <= set(units.shapes)


def test_fill_counts_tokens_and_padding() -> None:
    lengths = np.array([[2, 4], [3, 1]])
    units = batches.by_length(of_one_language(lengths), tokens=12, num_shapes=1)
    assert units.shapes == (batches.Shape(3, 4),)
    assert batches.fill(lengths, units, batches.once(units)) == 10 / 24
    # Of an example that is drawn twice, the tokens count twice; of packed rows, all members'.
    whole = units_of(True)
    planned = [batches.PlannedBatch(whole.shapes[0], np.array(units), 0) for units in ([7, 3], [3])]
    members = np.concatenate([whole.of(unit) for unit in (7, 3, 3)]) - 1000
    every = np.zeros((1000 + sum(SIZES), 2), int)
    every[1000:] = lengths_of()
    places = 2 * 2 * whole.shapes[0].rows * 40
    assert batches.fill(every, whole, planned) == lengths_of()[members].sum() / places
    assert batches.fill(lengths, units, []) == 1  # an epoch of so few that none is drawn


def test_an_epoch_that_draws_nothing_is_refused() -> None:
    with pytest.raises(errors.InputError, match="an epoch of 0 examples draws none"):
        plan_of(False, epoch_examples=0)
