"""Learning rates against their closed forms and hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, optim

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
    found = [rate(tf.constant(step, tf.int64)) for step in steps]
    assert {one.dtype for one in found} == {tf.float64}
    assert rate.experimental_get_tracing_count() == 1
    return [float(one) for one in found]


def test_the_rise_ends_at_the_peak_and_then_falls_to_the_stair_of_that_update() -> None:
    end = 3 * EPOCH
    last, after = staircase(PUBLISHED, [end - 1, end])
    assert last == pytest.approx(0.64 * (end - 1) / end, rel=1e-6)
    assert after == pytest.approx(0.64 * 0.9**3, rel=1e-6)


def test_every_update_has_the_rate_of_the_closed_form() -> None:
    config = {**PUBLISHED, "warmup_steps": 7, "decay_steps": 2.4, "decay": 0.5, "floor": 0.01}
    steps = list(range(40))
    expected = [
        max(step / 7 if step < 7 else 0.5 ** math.floor(step / 2.4), 0.01) * 0.64 for step in steps
    ]
    assert staircase(config, steps) == pytest.approx(expected, rel=1e-6)


def test_the_floor_holds_from_the_first_update_on() -> None:
    first, late = staircase(PUBLISHED, [0, 1000 * EPOCH])
    assert [first, late] == pytest.approx([0.64e-4, 0.64e-4], rel=1e-6)


def test_without_a_rise_the_first_update_has_the_peak() -> None:
    assert staircase({**PUBLISHED, "warmup_steps": 0}, [0, EPOCH - 1, EPOCH]) == pytest.approx(
        [0.64, 0.64, 0.576], rel=1e-6
    )


def test_a_staircase_goes_to_text_and_back() -> None:
    params = optim.WarmupStaircase.Params(**PUBLISHED)
    assert hyperparams.from_text(params.to_text()) == params


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peak": -1.0}, "WarmupStaircase: peak=-1.0 is not possible. Use 0 or more"),
        ({"warmup_steps": -1}, "WarmupStaircase: warmup_steps=-1 is not possible. Use 0 or"),
        ({"decay_steps": 0.0}, "WarmupStaircase: decay_steps=0.0 is not possible. Use more than 0"),
        ({"peak": math.nan}, "WarmupStaircase: peak=nan is not possible. Use 0 or more"),
        ({"decay": math.inf}, "WarmupStaircase: decay=inf is not possible. Use 0 or more"),
    ],
)
def test_a_staircase_of_numbers_out_of_range_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ParamsError, match=text):
        optim.WarmupStaircase.Params(**{**PUBLISHED, **config}).instantiate()


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


def test_an_optimizer_takes_it_and_its_text_leads_back() -> None:
    params = optim.Optimizer.Params(learning_rate=optim.InverseSquareRoot.Params(warmup_steps=100))
    assert hyperparams.from_text(params.to_text()) == params
    told = params.instantiate().rate(tf.constant(99, tf.int64))
    assert told.dtype == tf.float64
    assert float(told) == pytest.approx(3 / 320)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"units": 0}, "InverseSquareRoot: units=0 is not possible. Use 1 or more"),
        ({"warmup_steps": 0}, "InverseSquareRoot: warmup_steps=0 is not possible. Use 1 or"),
        ({"factor": -1.0}, "InverseSquareRoot: factor=-1.0 is not possible. Use 0 or"),
        ({"factor": math.nan}, "InverseSquareRoot: factor=nan is not possible. Use 0 or"),
    ],
)
def test_an_inverse_root_of_numbers_out_of_range_is_refused(fields: Any, text: str) -> None:
    with pytest.raises(errors.ParamsError, match=text):
        optim.InverseSquareRoot.Params(**fields).instantiate()
