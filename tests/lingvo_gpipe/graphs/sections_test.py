"""A traced graph in sections computes what it computed whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from lingvo_gpipe.graphs import sections

VECTOR = tf.TensorSpec([6], tf.float64)


def traced(function: Callable[..., Sequence[tf.Tensor]], count: int) -> list[list[tf.Tensor]]:
    """Return arguments and results of a function of `count` vectors, in its graph."""
    found: list[list[tf.Tensor]] = []

    def remembered(*arguments: tf.Tensor) -> list[tf.Tensor]:
        results = list(function(*arguments))
        found[:] = [list(arguments), results]
        return []

    tf.function(remembered, autograph=False).get_concrete_function(*[VECTOR] * count)
    return found


def run(
    cut: sections.Sections, section: sections.Section, values: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
        names = [tensor.name for tensor in section.reads]
        return cut.compute(section, dict(zip(names, flat, strict=True)))

    given = [values[tensor.name] for tensor in section.reads]
    return list(tf.function(compute, autograph=False)(*given))


def test_a_later_section_continues_from_what_an_earlier_one_returned() -> None:
    arguments, (total,) = traced(lambda x, y: [tf.sin(tf.exp(x)) * tf.cos(y)], 2)
    cut = sections.Sections(total.graph)
    early = cut.all() - cut.after(arguments[1:])
    late = cut.section([total], early)
    assert late.operations == {"Cos", "mul"}
    waiting = [tensor for tensor in late.reads if tensor.op.type != "Placeholder"]
    assert [tensor.name for tensor in waiting] == ["Sin:0"]
    x, y = tf.linspace(0.0, 1.0, 6), tf.linspace(1.0, 2.0, 6)
    x, y = tf.cast(x, tf.float64), tf.cast(y, tf.float64)
    values = dict(zip((t.name for t in arguments), (x, y), strict=True))
    (values["Sin:0"],) = run(cut, cut.section(waiting), values)
    (found,) = run(cut, late, values)
    np.testing.assert_array_equal(found, tf.sin(tf.exp(x)) * tf.cos(y))


def test_views_and_casts_are_computed_again_rather_than_held() -> None:
    def compute(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        half = tf.cast(tf.exp(x), tf.float32)
        return [tf.cast(tf.reshape(half, [2, 3]), tf.float64) * tf.reshape(y, [2, 3]), half]

    arguments, results = traced(compute, 2)
    cut = sections.Sections(results[0].graph)
    early = cut.all() - cut.after(arguments[1:])
    held = cut.section(results[:1], early, early).reads
    assert [t.op.type for t in held if t.op.type != "Placeholder"] == ["Cast"]
    assert min(t.dtype.size for t in held) == 4
    all_held = cut.section(results[:1], early).reads
    assert max(t.dtype.size for t in all_held if t.op.type != "Placeholder") == 8


def test_what_nothing_else_needs_moves_unless_more_would_be_read() -> None:
    def compute(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        out = tf.exp(x)
        return [y * tf.sin(out) + y * tf.cumsum(tf.cos(out)), out]

    arguments, (total, out) = traced(compute, 2)
    cut = sections.Sections(total.graph)
    early = cut.all() - cut.after(arguments[1:])
    movable = early - cut.section([out]).operations
    held = cut.section([total], early, (), movable).reads
    # All of it follows from the output.
    assert [t.op.type for t in held if t.op.type != "Placeholder"] == ["Exp"]
    assert len([t for t in cut.section([total], early).reads if t.op.type != "Placeholder"]) == 2


def test_a_pooling_is_computed_where_its_gradient_is() -> None:
    def compute(x: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            image = tf.reshape(tf.sin(x), [1, 2, 3, 1])
            y = tf.nn.max_pool2d(image, 2, 1, "SAME")
        return [tape.gradient(y, x, tf.reshape(upstream, [1, 2, 3, 1])), y]

    arguments, (gradient, y) = traced(compute, 2)
    cut = sections.Sections(gradient.graph)
    early = cut.all() - cut.after(arguments[1:])
    late = cut.section([gradient], early, early)
    assert {"MaxPool", "MaxPoolGrad"} <= {
        op.type for op in gradient.graph.get_operations() if op.name in late.operations
    }
    assert "MaxPool" not in {tensor.op.type for tensor in late.reads}
    # Without its gradient, its result is held.
    assert y.op.name not in cut.section([y], early, early).operations


def test_a_loop_is_cut_from_its_gradient() -> None:
    def compute(x: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1]
        return [tape.gradient(y, x, upstream)]

    arguments, (gradient,) = traced(compute, 2)
    cut = sections.Sections(gradient.graph)
    early = cut.all() - cut.after(arguments[1:])
    late = cut.section([gradient], early)
    waiting = [tensor for tensor in late.reads if tensor.op.type != "Placeholder"]
    assert tf.variant in [tensor.dtype for tensor in waiting]
    x, upstream = tf.constant([0.1, 0.5, 1.0, 1.5, 2.0, 3.0], tf.float64), tf.ones([6], tf.float64)
    values = dict(zip((t.name for t in arguments), (x, upstream), strict=True))
    results = run(cut, cut.section(waiting), values)
    values |= dict(zip((t.name for t in waiting), results, strict=True))
    (found,) = run(cut, late, values)
    (wanted,) = tf.function(compute, autograph=False)(x, upstream)
    np.testing.assert_array_equal(found, wanted)
