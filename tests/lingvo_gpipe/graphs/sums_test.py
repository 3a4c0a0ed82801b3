"""Sums are made in the order of their terms, whichever memory can be reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.graphs import sums


def total(add: Callable[[Sequence[tf.Tensor]], tf.Tensor], *, held: bool) -> float:
    """Add three terms, the first two of which others hold or not, as timing decides elsewhere."""

    def added(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        fresh = [term * factor for term in (a, b, c)]
        return add([a, b, fresh[2]] if held else fresh)

    terms = [tf.constant([value]) for value in (1.0, 1e8, -1e8, 1.0)]
    return float(outer_function.OuterFunction(added)(*terms)[0])


@pytest.mark.parametrize("held", [False, True])
def test_the_order_of_a_sum_is_that_of_its_terms(held: bool) -> None:
    assert total(sums.in_order, held=held) == 0.0  # 1.0 is lost in 1e8


@pytest.mark.parametrize("held", [False, True])
def test_many_small_terms(held: bool) -> None:
    def add(terms: Sequence[tf.Tensor]) -> tf.Tensor:
        return sums.in_order([*terms, *[tf.constant([1.0])] * 5])

    assert total(add, held=held) == total(add, held=not held)


def test_one_term_and_integers() -> None:
    one = tf.constant(2)
    assert sums.in_order([one]) is one
    assert int(sums.in_order([one, one, one, one])) == 8
