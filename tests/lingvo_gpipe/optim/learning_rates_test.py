"""Learning rates against their closed forms and hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import optim

# The command-line defaults of the reference at batch 256: 5,004 updates are an epoch.
EPOCH = 1_281_167 // 256
PUBLISHED: dict[str, Any] = {
    "peak": 0.64,
    "warmup_steps": 3 * EPOCH,
    "decay": 0.9,
    "decay_steps": float(EPOCH),
    "floor": 1e-4,
}


def staircase(config: dict[str, Any], steps: list[int]) -> list[float]:
    own = optim.Optimizer.Params(learning_rate=optim.WarmupStaircase.Params(**config)).instantiate()
    rate = tf.function(own.rate, autograph=False)
    rates = [rate(tf.constant(step, tf.int64)) for step in steps]
    assert {value.dtype for value in rates} == {tf.float64}
    assert rate.experimental_get_tracing_count() == 1
    return [float(value) for value in rates]


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        # The rise ends at the peak, then the rate falls to the stair of that update.
        (
            {},
            [3 * EPOCH - 1, 3 * EPOCH],
            [0.64 * (3 * EPOCH - 1) / (3 * EPOCH), 0.64 * 0.9**3],
        ),
        # The floor holds from the first update on.
        ({}, [0, 1000 * EPOCH], [0.64e-4, 0.64e-4]),
        # Without a rise the first update has the peak.
        ({"warmup_steps": 0}, [0, EPOCH - 1, EPOCH], [0.64, 0.64, 0.576]),
        (
            {"warmup_steps": 7, "decay_steps": 2.4, "decay": 0.5, "floor": 0.01},
            list(range(40)),
            [
                max(step / 7 if step < 7 else 0.5 ** math.floor(step / 2.4), 0.01) * 0.64
                for step in range(40)
            ],
        ),
    ],
)
def test_a_staircase_is_that_of_the_closed_form(
    config: dict[str, Any], steps: list[int], expected: list[float]
) -> None:
    assert staircase(PUBLISHED | config, steps) == pytest.approx(expected, rel=1e-6)


def inverse_root(step: int, **fields: Any) -> float:
    learning_rate = optim.InverseSquareRoot.Params(**fields).instantiate()
    return float(learning_rate.at(tf.constant(step, tf.int64)))


def test_the_paper_s_rate_by_hand() -> None:
    # 3 / 32 · s / 8,000,000 up to s = 40,000, then 3 / 32 / √s.
    assert inverse_root(0) == pytest.approx(1.171875e-8)
    assert inverse_root(9_999) == pytest.approx(1.171875e-4)
    assert inverse_root(39_999) == pytest.approx(4.6875e-4)
    assert inverse_root(40_000) < inverse_root(39_999)
    assert inverse_root(159_999) == pytest.approx(2.34375e-4)
    assert inverse_root(2**40 - 1) == pytest.approx(3 / 32 / 2**20)


def test_other_sizes_by_hand() -> None:
    found = [inverse_root(step, factor=2.0, units=16, warmup_steps=4) for step in (0, 1, 3, 15, 35)]
    assert found == pytest.approx([0.0625, 0.125, 0.25, 0.125, 1 / 12])


def test_an_optimizer_has_its_rate() -> None:
    params = optim.Optimizer.Params(learning_rate=optim.InverseSquareRoot.Params(warmup_steps=100))
    rate = params.instantiate().rate(tf.constant(99, tf.int64))
    assert rate.dtype == tf.float64
    assert float(rate) == pytest.approx(3 / 320)
