"""Adafactor against NumPy code with the whole second moment, and the bytes of its state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import network, optim, pipelining
from lingvo_gpipe.tasks.mt.model import transformer

Array = np.ndarray[Any, Any]


class Plain:
    """Algorithms 4 and 5 of the paper, on one weight, in its sums over rows and columns."""

    def __init__(self, weight: Array, axes: tuple[int, int] | None, momentum: float) -> None:
        self.weight, self.axes, self.momentum = weight.copy(), axes, momentum
        self.moment = np.zeros_like(weight)
        self.average = np.zeros_like(weight)  # of g² + ε, all of it
        self.time = 0

    def update(self, gradient: Array, rate: float, d: float = 1.0) -> Array:
        self.time += 1
        beta = 1.0 - float(self.time) ** -0.8
        # Sums of averages are averages of sums, so row and column follow from the whole moment.
        self.average = beta * self.average + (1.0 - beta) * (gradient**2 + 1e-30)
        v = self.average
        if self.axes is not None:
            row, column = self.axes
            in_rows = v.sum(column, keepdims=True)
            in_columns = v.sum(row, keepdims=True)
            v = in_rows * in_columns / v.sum((row, column), keepdims=True)
        change = gradient / np.sqrt(v)
        change = change / max(1.0, np.sqrt((change**2).mean()) / d)
        step = rate * change
        if self.momentum:
            step = self.moment = self.momentum * self.moment + (1.0 - self.momentum) * step
        self.weight = self.weight - step
        return self.weight


def begin(rule: optim.Rule, shape: tuple[int, ...], dtype: tf.DType) -> dict[str, tf.Tensor]:
    return {
        slot.slot: tf.fill(slot.shape, tf.cast(slot.initial, slot.dtype))
        for slot in rule.slots("layer/kernel", shape, dtype)
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), None),
        ((5,), None),
        ((4, 3), None),
        ((6, 4), (0, 1)),
        ((4, 7), (0, 1)),
        ((5, 2, 6), (0, 2)),
        ((2, 5, 3, 4), (1, 3)),
    ],
    ids=str,
)
def test_updates_are_those_of_the_paper(shape: Any, axes: Any, momentum: float) -> None:
    """Gradients of very different sizes, so that only some are clipped."""
    random = np.random.default_rng(0)
    start = random.normal(size=shape)
    rule = optim.Adafactor.Params(min_factored=4, momentum=momentum).instantiate()
    plain = Plain(np.asarray(start), axes, momentum)
    weight, slots = tf.constant(start), begin(rule, shape, tf.float64)
    assert ("row" in slots) == (axes is not None)
    program = tf.function(
        lambda *values: rule.update(optim.RuleInputs("layer/kernel", *values)), autograph=False
    )
    for step, (size, rate) in enumerate(((1.0, 0.1), (0.1, 0.2), (30.0, 0.1), (2.0, 0.05))):
        gradient = random.normal(size=shape) * size * np.exp(random.normal(size=shape))
        weight, slots = program(
            weight,
            tf.constant(gradient),
            slots,
            tf.constant(rate, tf.float64),
            tf.constant(step, tf.int64),
        )
        expected = plain.update(np.asarray(gradient), rate)
        np.testing.assert_allclose(weight, expected, rtol=1e-10, atol=1e-12)


def test_clipping_bounds_the_step_and_is_off_where_there_is_none() -> None:
    gradient = tf.concat([tf.fill([99], 1e-3), [10.0]], 0)
    slots = {"second_moment": tf.fill([100], 1e-6)}
    found = []
    for threshold in (None, 1.0, 0.5):
        rule = optim.Adafactor.Params(clip_threshold=threshold).instantiate()
        inputs = optim.RuleInputs(
            "w", tf.zeros([100]), gradient, slots, tf.constant(1.0), tf.constant(9, tf.int64)
        )
        weight, _ = rule.update(inputs)
        found.append(float(tf.sqrt(tf.reduce_mean(weight**2))))
    assert found[0] > 1.0
    assert found[1:] == pytest.approx([1.0, 0.5], rel=1e-5)


def test_a_gradient_of_zero_moves_nothing() -> None:
    rule = optim.Adafactor.Params(min_factored=2).instantiate()
    for shape in ((3,), (3, 4)):
        slots = begin(rule, shape, tf.float32)
        inputs = optim.RuleInputs(
            "w", tf.ones(shape), tf.zeros(shape), slots, tf.constant(1.0), tf.constant(0, tf.int64)
        )
        weight, slots = rule.update(inputs)
        np.testing.assert_array_equal(weight, np.ones(shape))
        assert all(np.isfinite(value).all() for value in slots.values())


def test_a_row_without_a_gradient_stays_however_large_the_others_are() -> None:
    rule = optim.Adafactor.Params(min_factored=2).instantiate()
    gradient = np.random.RandomState(0).normal(0.0, 1e6, (8, 4)).astype(np.float32)
    gradient[3] = 0.0
    slots = begin(rule, (8, 4), tf.float32)
    step = tf.constant(0, tf.int64)
    inputs = optim.RuleInputs(
        "w", tf.ones([8, 4]), tf.constant(gradient), slots, tf.constant(1.0), step
    )
    weight, _ = rule.update(inputs)
    np.testing.assert_array_equal(weight[3], np.ones(4))
    assert np.isfinite(weight).all()
    assert np.all(weight[:3] != 1.0)


def test_the_two_largest_dimensions_of_128_and_more_are_factored() -> None:
    rule = optim.Adafactor.Params().instantiate()
    for shape, expected in (
        ((128, 128), [(128,), (128,)]),
        ((127, 4096), [(127, 4096)]),
        ((4096,), [(4096,)]),
        ((3, 3, 256, 512), [(3, 3, 256), (3, 3, 512)]),
        ((256, 3, 128), [(256, 3), (3, 128)]),
    ):
        assert [slot.shape for slot in rule.slots("w", shape, tf.float32)] == expected


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_a_model_is_small(momentum: float) -> None:
    """n + m for a matrix, n for a vector; with momentum one more value per parameter."""
    size, ids = 1024, tf.TensorSpec((8, 16), tf.int32)
    params = pipelining.PipeliningLayer.Params(
        layers=transformer.translation_transformer(
            transformer.TranslationTransformer(
                num_layers=6, hidden=8192, heads=16, vocabulary=64_000
            )
        )
    )
    fields = {"source": ids, "target": ids, "label": ids, "weight": tf.TensorSpec((8, 16))}
    specs = network.analyze(params, fields).variables.values()
    own = optim.Optimizer.Params(
        rule=optim.Adafactor.Params(momentum=momentum), learning_rate=1e-3
    ).instantiate()
    total = sum(slot.size_bytes for slot in own.slots(specs).values())
    attention = 8 * size + 4 * size
    feed_forward = 2 * (size + 8192) + 8192 + size
    vectors = 64_000 + 2 * 2 * size
    layers = 6 * (3 * attention + 2 * feed_forward + 5 * 2 * size)
    expected = 4 * (layers + 3 * (64_000 + size) + vectors)
    assert total == expected + (4 * 473_745_920 if momentum else 0)
