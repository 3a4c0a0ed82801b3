"""The inverse square root with warm-up, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.optim import inverse_sqrt, optimizer


def rate(step: int, **fields: Any) -> float:
    schedule = inverse_sqrt.InverseSquareRoot.Params(**fields).instantiate()
    return float(schedule.rate(tf.constant(step, tf.int64)))


def test_the_paper_s_rate_by_hand() -> None:
    # 3 / 32 · s / 8,000,000 up to s = 40,000, then 3 / 32 / √s.
    assert rate(0) == pytest.approx(1.171875e-8)
    assert rate(9_999) == pytest.approx(1.171875e-4)
    assert rate(39_999) == pytest.approx(4.6875e-4)
    assert rate(40_000) < rate(39_999)
    assert rate(159_999) == pytest.approx(2.34375e-4)
    assert rate(2**40 - 1) == pytest.approx(3 / 32 / 2**20)


def test_other_sizes_by_hand() -> None:
    found = [rate(step, factor=2.0, units=16, warmup_steps=4) for step in (0, 1, 3, 15, 35)]
    assert found == pytest.approx([0.0625, 0.125, 0.25, 0.125, 1 / 12])


def test_an_optimizer_takes_it_and_its_text_leads_back() -> None:
    params = optimizer.Optimizer.Params(
        learning_rate=inverse_sqrt.InverseSquareRoot.Params(warmup_steps=100)
    )
    assert hyperparams.from_text(params.to_text()) == params
    told = params.instantiate().rate(tf.constant(99, tf.int64))
    assert told.dtype == tf.float32
    assert float(told) == pytest.approx(3 / 320)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"units": 0}, "InverseSquareRoot: units=0 is too small. Use 1 or more"),
        ({"warmup_steps": 0}, "InverseSquareRoot: warmup_steps=0 is too small. Use 1 or more"),
        ({"factor": -1.0}, "InverseSquareRoot: factor=-1.0 is negative. Use 0 or more"),
    ],
)
def test_a_number_out_of_range_is_refused(fields: Any, text: str) -> None:
    with pytest.raises(errors.OptimizerError, match=text):
        inverse_sqrt.InverseSquareRoot.Params(**fields).instantiate()
