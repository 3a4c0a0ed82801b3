"""Peak memory of programs, for graphs whose bytes were counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe.graphs import traced_memory

KIB = tf.TensorSpec([256])


def graph_of(function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph


def peak_kib(function: Callable[..., Any], threads: int = 1) -> float:
    return traced_memory.peak_bytes(graph_of(function, KIB), threads) / 1024


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_tensor_is_held_until_its_last_reader(threads: int) -> None:
    def chain(x: tf.Tensor) -> tf.Tensor:
        return tf.cumsum(tf.cumsum(tf.cumsum(tf.cumsum(x))))

    assert peak_kib(chain, threads) == 2

    def late(x: tf.Tensor) -> tf.Tensor:
        first = tf.cumsum(x)
        second = tf.cumsum(first)
        return tf.concat([first, tf.cumsum(tf.cumsum(second))], 0)

    # At its end: first, the last sum, and their concatenation of 2 KiB.
    assert peak_kib(late, threads) == 4


def test_what_can_start_early_is_held_from_the_start() -> None:
    """As in a gradient: operations that need only the forward do not wait for the gradient."""

    def traced_last(x: tf.Tensor) -> tf.Tensor:
        end = tf.cumsum(tf.cumsum(tf.cumsum(x)))
        return end + tf.cumsum(x, reverse=True)

    # In the order of tracing it would be two: the end and the other.
    assert peak_kib(traced_last) == 3

    def bound(x: tf.Tensor) -> tf.Tensor:
        end = tf.cumsum(tf.cumsum(tf.cumsum(x)))
        with tf.control_dependencies([end]):
            return end + tf.cumsum(x, reverse=True)

    assert peak_kib(bound) == 2


def test_two_threads_hold_what_each_works_on() -> None:
    def two(x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(tf.tile(x, [100 + n])) for n in range(4)])

    assert peak_kib(two, 1) == pytest.approx(103, abs=0.1)
    assert peak_kib(two, 2) == pytest.approx(102 + 103, abs=1.1)
    assert peak_kib(two, 4) == pytest.approx(100 + 101 + 102 + 103, abs=0.1)


def test_what_no_output_needs_is_not_counted() -> None:
    def wasteful(x: tf.Tensor) -> tf.Tensor:
        tf.tile(tf.cumsum(x), [100])
        return tf.cumsum(x)

    assert peak_kib(wasteful) == 1


def test_outputs_that_nobody_reads_go_at_once() -> None:
    def values_alone(x: tf.Tensor) -> tf.Tensor:
        values, _ = tf.math.top_k(x, 256)
        return tf.tile(tf.cumsum(values), [2])

    # Values and indices exist together; then a sum of one of them, and its double.
    assert peak_kib(values_alone) == 3


def test_views_and_work_in_place_take_no_bytes() -> None:
    def views(x: tf.Tensor) -> tf.Tensor:
        y = tf.reshape(tf.identity(tf.cumsum(x)), [16, 16])
        return tf.nn.relu(y) * 2.0 + 1.0

    assert peak_kib(views) == 1

    def argument(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x)

    # The caller may need its argument again.
    assert peak_kib(argument) == 1

    def read_twice(x: tf.Tensor) -> tf.Tensor:
        y = tf.cumsum(x)
        return tf.concat([tf.nn.relu(y), y], 0)

    assert peak_kib(read_twice) == 4


def test_what_a_branch_keeps_for_its_gradient_is_not_counted() -> None:
    kept = []

    def both(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(x[0] > 0, lambda: tf.exp(tf.exp(x)), lambda: x)
            forward = graph.get_operations()
        result = tape.gradient(y, x)
        backward = graph.get_operations()[len(forward) :]
        kept.append(traced_memory.residual_bytes(forward, backward, graph))
        return result

    graph_of(both, KIB)
    assert kept == [1]


def test_bodies_of_calls_and_lists_of_tensors_are_not_reported() -> None:
    step = tf.function(tf.cumsum, autograph=False)
    assert traced_memory.is_complete(graph_of(lambda x: tf.cumsum(x) * 2.0, KIB))
    assert not traced_memory.is_complete(graph_of(lambda x: step(x) * 2.0, KIB))
    assert not traced_memory.is_complete(graph_of(lambda x: tf.unique(x)[0] * 2.0, KIB))

    def unneeded(x: tf.Tensor) -> tf.Tensor:
        step(x)
        return tf.cumsum(x)

    assert traced_memory.is_complete(graph_of(unneeded, KIB))

    def listed(x: tf.Tensor) -> tf.Tensor:
        shape = tf.constant([], tf.int32)
        rows = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=shape)
        return tf.raw_ops.TensorListStack(
            input_handle=rows, element_shape=shape, element_dtype=tf.float32, num_elements=256
        )

    assert not traced_memory.is_complete(graph_of(listed, KIB))
