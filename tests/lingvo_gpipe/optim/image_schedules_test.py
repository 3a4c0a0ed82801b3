"""The published learning rate, by its closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import image_schedules, optimizer

# The command-line defaults of the reference at batch 256: 5,004 updates are an epoch.
EPOCH = 1_281_167 // 256
PUBLISHED: dict[str, Any] = {
    "peak": 0.64,
    "warmup_steps": 3 * EPOCH,
    "decay": 0.9,
    "decay_steps": float(EPOCH),
    "floor": 1e-4,
}


def rates(config: dict[str, Any], steps: list[int]) -> list[float]:
    own = optimizer.Optimizer.Params(
        learning_rate=image_schedules.WarmupStaircase.Params(**config)
    ).instantiate()
    rate = tf.function(own.rate, autograph=False)
    found = [rate(tf.constant(step, tf.int64)) for step in steps]
    assert {one.dtype for one in found} == {tf.float32}
    assert rate.experimental_get_tracing_count() == 1
    return [float(one) for one in found]


def test_the_rise_ends_at_the_peak_and_then_falls_to_the_stair_of_that_update() -> None:
    end = 3 * EPOCH
    last, after = rates(PUBLISHED, [end - 1, end])
    assert last == pytest.approx(0.64 * (end - 1) / end, rel=1e-6)
    assert after == pytest.approx(0.64 * 0.9**3, rel=1e-6)


def test_every_update_has_the_rate_of_the_closed_form() -> None:
    config = {**PUBLISHED, "warmup_steps": 7, "decay_steps": 2.4, "decay": 0.5, "floor": 0.01}
    steps = list(range(40))
    expected = [
        max(step / 7 if step < 7 else 0.5 ** math.floor(step / 2.4), 0.01) * 0.64 for step in steps
    ]
    assert rates(config, steps) == pytest.approx(expected, rel=1e-6)


def test_the_floor_holds_from_the_first_update_on() -> None:
    first, late = rates(PUBLISHED, [0, 1000 * EPOCH])
    assert [first, late] == pytest.approx([0.64e-4, 0.64e-4], rel=1e-6)


def test_without_a_rise_the_first_update_has_the_peak() -> None:
    assert rates({**PUBLISHED, "warmup_steps": 0}, [0, EPOCH - 1, EPOCH]) == pytest.approx(
        [0.64, 0.64, 0.576], rel=1e-6
    )


def test_params_go_to_text_and_back() -> None:
    params = image_schedules.WarmupStaircase.Params(**PUBLISHED)
    assert hyperparams.from_text(params.to_text()) == params


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peak": -1.0}, "WarmupStaircase: peak=-1.0 is too small. Use 0.0 or more"),
        ({"warmup_steps": -1}, "WarmupStaircase: warmup_steps=-1 is too small. Use 0 or more"),
        ({"decay_steps": 0.0}, "WarmupStaircase: decay_steps=0.0 is not possible. Use more than 0"),
    ],
)
def test_a_number_out_of_range_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.OptimizerError, match=text):
        image_schedules.WarmupStaircase.Params(**{**PUBLISHED, **config}).instantiate()
