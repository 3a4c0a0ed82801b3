from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe import errors
from lingvo_gpipe.network import partition


def all_cuts(num_layers: int, num_partitions: int) -> list[tuple[int, ...]]:
    """Every cut without an empty cell, in lexicographic order."""
    borders = itertools.combinations(range(1, num_layers), num_partitions - 1)
    return sorted(
        tuple(b - a for a, b in itertools.pairwise([0, *inner, num_layers])) for inner in borders
    )


def brute_force(
    costs: Sequence[Sequence[float]],
    *,
    reach: Callable[[int, int], int] | None = None,
    speeds: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The best of all cuts by definition, or None if no cut fits."""
    best: tuple[Fraction, Fraction, tuple[int, ...]] | None = None
    for cuts in all_cuts(len(costs[0]), len(costs)):
        loads = []
        fits = True
        end = 0
        for cell, count in enumerate(cuts):
            start, end = end, end + count
            load = sum(map(Fraction, costs[cell][start:end]), Fraction(0))
            loads.append(load / Fraction(speeds[cell] if speeds else 1))
            if reach is not None:
                fits = fits and end <= reach(cell, start)
        candidate = (max(loads), sum((load * load for load in loads), Fraction(0)), cuts)
        if fits and (best is None or candidate < best):
            best = candidate
    return None if best is None else best[2]


small = st.integers(0, 4)
large = st.floats(0, 1e18)
any_cost = st.one_of(small, small, large, st.sampled_from([1e-30, 0.1, 0.2, 0.3, 1e18]))


@st.composite
def problems(draw: st.DrawFn) -> list[list[float]]:
    """Return the costs of layers in each cell; in most cells they are the same."""
    num_layers = draw(st.integers(1, 9))
    row = st.lists(any_cost, min_size=num_layers, max_size=num_layers)
    same, num_partitions = draw(row), draw(st.integers(1, num_layers))
    others = draw(st.dictionaries(st.integers(0, num_partitions - 1), row))
    return [others.get(cell, same) for cell in range(num_partitions)]


@hypothesis.settings(max_examples=400)
@hypothesis.given(problems(), st.data())
def test_partition_equals_brute_force_with_any_options(
    costs: list[list[float]], data: st.DataObject
) -> None:
    num_partitions, num_layers = len(costs), len(costs[0])
    speed = st.sampled_from([0.5, 1.0, 1.1, 3.0])
    speeds = data.draw(
        st.just([]) | st.lists(speed, min_size=num_partitions, max_size=num_partitions)
    )
    reaches = data.draw(
        st.none()
        | st.lists(
            st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers),
            min_size=num_partitions,
            max_size=num_partitions,
        )
    )

    def reach(cell: int, start: int) -> int:
        assert reaches is not None
        return min(num_layers, start + reaches[cell][start])

    options: dict[str, Any] = {"reach": None if reaches is None else reach, "speeds": speeds}
    expected = brute_force(costs, **options)
    if expected is None:
        with pytest.raises(partition.NoCutFitsError, match="memory"):
            partition.partition(costs, **options)
    else:
        assert partition.partition(costs, **options) == expected


@pytest.mark.parametrize("scale", [1e-18, 3.0, 2.0**60])
def test_partition_is_the_same_at_any_scale(scale: float) -> None:
    costs = [7, 1, 3, 3, 9, 2, 2, 8, 1, 1, 5, 4]
    scaled = [cost * scale for cost in costs]
    assert partition.partition([scaled] * 4) == partition.partition([costs] * 4)


def test_partition_distinguishes_costs_that_floats_do_not_sum_exactly() -> None:
    # In floats 1e16 + 1 == 1e16: the single 1 would seem to cost nothing in either cell.
    assert partition.partition([[1e16, 1, 1e16]] * 2) == (1, 2)
    assert partition.partition([[1e16, 1, 1e16 - 2]] * 2) == (1, 2)
    assert partition.partition([[1e16 - 2, 1, 1e16]] * 2) == (2, 1)


def test_partition_of_2000_layers_on_128_devices_is_balanced() -> None:
    costs = [1 + (layer * 7919) % 1000 for layer in range(2000)]
    cuts = partition.partition([costs] * 128)
    assert sum(cuts) == 2000
    rest = iter(costs)
    heaviest = max(sum(itertools.islice(rest, count)) for count in cuts)
    assert heaviest < 1.1 * sum(costs) / 128


@pytest.mark.parametrize(
    ("num_layers", "num_partitions", "text"),
    [
        (11, 99, "num_partitions=99, but there are 11 layers. Use 1 to 11"),
        (11, 0, "num_partitions=0, but there are 11 layers. Use 1 to 11"),
        (1, 2, "num_partitions=2, but there is 1 layer. Use 1"),
    ],
)
def test_impossible_numbers_say_the_way_out(
    num_layers: int, num_partitions: int, text: str
) -> None:
    with pytest.raises(errors.PartitionError, match=f"^{re.escape(text)}$"):
        partition.check_number(num_partitions, num_layers)


def test_too_little_memory_says_the_way_out() -> None:
    text = "no cut of 3 layers into 2 cells fits the devices' memory. Use more partitions, or "
    with pytest.raises(partition.NoCutFitsError, match=text):
        partition.partition([[1.0] * 3] * 2, reach=lambda _, start: start + 1)
