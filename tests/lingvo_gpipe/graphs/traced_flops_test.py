"""FLOPs of traced functions, for operations whose FLOPs were counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe.graphs import traced_flops


def flops(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return traced_flops.flops(graph.get_operations(), graph)


def test_a_called_function_counts_as_what_it_calls() -> None:
    called = tf.function(lambda x, y: tf.matmul(x, y), autograph=False)
    assert flops(lambda x, y: called(called(x, y), y), (3, 4), (4, 4)) == 2 * 2 * 3 * 4 * 4


@pytest.mark.parametrize("equation", ["...tc,cd->...td", "...tc,...cd->...td"])
def test_broadcast_axes_of_an_einsum_count_once(equation: str) -> None:
    second = (3, 5) if equation.count("...") == 2 else (2, 7, 3, 5)
    counted = flops(lambda x, y: tf.einsum(equation, x, y), (2, 7, 4, 3), second)
    assert counted == 2 * (2 * 7 * 4 * 5) * 3


@pytest.mark.parametrize(
    "branch",
    [
        lambda first, other: tf.cond(tf.constant(True), first, other),
        lambda first, other: tf.switch_case(tf.constant(1), [other, first, other]),
    ],
)
def test_of_several_branches_the_largest_counts(branch: Callable[..., Any]) -> None:
    counted = flops(lambda x, y: branch(lambda: tf.matmul(x, y), lambda: x), (3, 4), (4, 4))
    assert counted == 2 * 3 * 4 * 4


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def seven(x: tf.Tensor) -> tf.Tensor:
        def once(y: tf.Tensor) -> list[tf.Tensor]:
            return [tf.matmul(y, tf.ones([5, 5]))]

        return tf.while_loop(lambda _: True, once, [x], maximum_iterations=7)[0]

    def with_gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = seven(x)
        return tape.gradient(y, x)

    products = 7 * 2 * 3 * 5 * 5
    assert flops(seven, (3, 5)) == products + 7  # which count the rounds
    assert 3 * products < flops(with_gradient, (3, 5)) < 3.1 * products


def test_loops_that_read_each_other_are_counted_at_once() -> None:
    """Thirty whose number of rounds the graph does not say; each reads two results of the last."""

    def chain(x: tf.Tensor) -> tf.Tensor:
        y = x
        for _ in range(30):
            x, y = tf.while_loop(lambda x, _: x[0] < 9.0, lambda x, y: (x + 1.0, y + x), [x, y])
        return x + y

    assert flops(chain, (3,)) < 1000
