"""How many layers a cell can hold: running sums, compared with sums over the layers."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import schedule
from lingvo_gpipe.network import capacity
from lingvo_gpipe.schedule import Table

sizes = st.integers(0, 9)


@st.composite
def networks(
    draw: st.DrawFn,
) -> tuple[list[capacity.LayerBytes], list[capacity.ValueBytes]]:
    count = draw(st.integers(1, 6))
    own = st.builds(capacity.LayerBytes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 60))
    layers = draw(st.lists(own, min_size=count, max_size=count))
    values = [
        capacity.ValueBytes(
            draw(sizes),
            producer,
            tuple(sorted(draw(st.sets(st.integers(producer + 1, count - 1)))))
            if producer < count - 1
            else (),
        )
        for producer in range(-1, count)
        for _ in range(2)
    ]
    return layers, values


@hypothesis.given(
    networks(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200)
)
def test_need_and_reach_are_those_of_the_definition(
    network: tuple[list[capacity.LayerBytes], list[capacity.ValueBytes]],
    near: int,
    far: int,
    inside: int,
    limit: int,
) -> None:
    layers, values = network
    holding = capacity.Holding(near, far, frozenset({(inside, 0), (1, 2)}), 1.0)
    within = capacity.Capacity(layers, values, [holding], limit)
    for start in range(len(layers)):
        needs = []
        for end in range(start + 1, len(layers) + 1):
            own = layers[start:end]
            imports = sum(
                value.size
                * (1 if value.producer < 0 else near if value.producer == start - 1 else far)
                for value in values
                if value.producer < start and any(start <= c < end for c in value.consumers)
            )
            step = (
                sum(layer.gradients for layer in own)
                + imports
                + max(
                    inside * sum(layer.kept for layer in own),
                    sum(layer.kept + 2 * layer.left for layer in own),
                )
                + max(layer.widest for layer in own)
            )
            update = max(layer.update for layer in own)
            needs.append(sum(layer.fixed for layer in own) + max(step, update))
            assert within.need_bytes(0, start, end) == needs[-1]
        assert needs == sorted(needs)
        fitting = len(list(itertools.takewhile(lambda need: need <= limit, needs)))
        assert within.reach(0, start) == start + fitting


def test_a_schedule_decides_what_is_held() -> None:
    def waiting(name: str) -> list[tuple[int, int]]:
        table = schedule.make(name, 3, 8)
        return [
            (held.from_previous, held.from_earlier)
            for held in capacity.holdings(table, ("full",) * 3)
        ]

    assert waiting("gpipe") == [(0, 0), (8, 8), (8, 8)]
    # As many as have run forward in the cell that makes the value.
    assert waiting("1f1b") == [(0, 0), (3, 3), (2, 3)]
    kept = capacity.holdings(schedule.make("1f1b", 3, 8), ("never", "except_last", "full"))
    # While the last micro-batch is kept, the one before it is computed again.
    assert [max(held.in_cell) for held in kept] == [(3, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize("policy", ["full", "never", "except_last"])
def test_a_late_gradient_of_weights_holds_what_it_reads(policy: str) -> None:
    split = "0F0,,0B0,0F1,,0B1,0F2,,0B2\n,1F0,1I0,,1F1,1I1,,1F2,1I2,1W0,1W1,1W2"
    _, held = capacity.holdings(Table.from_text(split), ("full", policy))
    assert held.from_previous == held.from_earlier == 3


@pytest.mark.parametrize(
    ("text", "policy", "inside"),
    [
        ("0F0,0F1,0B1,0B0", "full", 1),
        ("0F0,0F1,0B1,0B0", "except_last", 1),
        ("0F0,0F1,0B0,0B1", "except_last", 2),
        ("0F0,0F1,0B0,0B1", "never", 2),
        # A first cell's I computes nothing.
        ("0F0,0I0,0F1,0I1,0W0,0W1", "full", 1),
        ("0F0,0I0,0F1,0I1,0W0,0W1", "never", 2),
        ("0F0,0I0,0F1,0W0,0I1,0W1", "except_last", 2),
    ],
)
def test_order_and_policy_decide_what_is_kept(text: str, policy: str, inside: int) -> None:
    (held,) = capacity.holdings(Table.from_text(text), (policy,))
    assert max(held.in_cell) == (inside, 0)


@pytest.mark.parametrize("policy", ["full", "never"])
def test_what_i_leaves_for_a_late_w_is_kept(policy: str) -> None:
    late = "0F0,0F1,0B0,0B1\n,1F0,1I0,1F1,1I1,1W0,1W1"
    early = "0F0,0F1,0B0,0B1\n,1F0,1I0,1W0,1F1,1I1,1W1"
    inside = [
        max(capacity.holdings(Table.from_text(text), (policy,) * 2)[1].in_cell)
        for text in (late, early)
    ]
    assert inside == [(1, 2), (1, 1)]


def test_cells_of_one_device_share_its_memory() -> None:
    table = Table.from_text("0F0,1F0,1B0,0B0")
    assert [held.share for held in capacity.holdings(table, ("full", "full"))] == [0.5, 0.5]


def test_a_layer_is_too_large_by_the_cell_that_holds_it_most_easily() -> None:
    # Cells 2 and 3 layers deep hold fewer copies of the value that the last layer reads.
    layers = [capacity.LayerBytes(fixed, 0, 0, 0, 0, 0) for fixed in (11, 1, 1)]
    values = [capacity.ValueBytes(4, 1, (2,))]
    table = schedule.make("1f1b", 3, 8)
    within = capacity.Capacity(layers, values, capacity.holdings(table, ("full",) * 3), 10)
    assert "but layer a alone needs 11 B. " in capacity.no_cut_fits("10", within, 3, "abc", {})


def test_a_layer_is_too_large_for_its_share_of_a_device() -> None:
    layers = [capacity.LayerBytes(fixed, 0, 0, 0, 0, 0) for fixed in (6, 2)]
    table = Table.from_text("0F0,1F0,1B0,0B0")
    within = capacity.Capacity(layers, [], capacity.holdings(table, ("full",) * 2), 10)
    text = capacity.no_cut_fits("10", within, 2, "ab", {})
    assert "alone needs a device of 12 B, which cells share" in text
