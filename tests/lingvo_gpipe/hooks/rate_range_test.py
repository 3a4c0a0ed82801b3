"""A learning-rate range test finds the rate that lowers the loss fastest, and then stops."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingvo_gpipe import errors, hooks, optim
from lingvo_gpipe.hooks import rate_range
from lingvo_gpipe.run import loop
from tests.tiny_task import one_layer_task, stop_after


def ranged(**fields: Any) -> Any:
    """Return a range test of a task of one layer."""
    params = one_layer_task(max_steps=1000)
    params.train.optimizer.learning_rate = optim.RateRange.Params(**fields)
    params.train.hooks = (hooks.RateRangeTest.Params(),)
    return params


def test_a_test_records_stops_and_suggests(tmp_path: Path) -> None:
    params = ranged(lowest=1e-3, highest=1e4, steps=40)
    lines: list[str] = []
    whole = loop.run(params, tmp_path / "whole", report=lines.append)
    assert whole.ended == "hook"
    assert 10 < whole.step < 40  # the loss has diverged
    assert any("ends the run" in line and "the loss rises at a rate of" in line for line in lines)
    (found,) = [line for line in lines if line.startswith("range test of ")]
    assert found.startswith(f"range test of {whole.step} learning rates from 0.001 to ")
    suggested = float(found.split("learning_rate=")[1].split(",")[0])
    assert 1e-3 < suggested < 10
    with (tmp_path / "whole" / "rate_range.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["learning_rate"]) for row in rows]
    factor = (1e4 / 1e-3) ** (1 / 39)
    np.testing.assert_allclose(rates, 1e-3 * factor ** np.arange(whole.step), rtol=1e-6)
    # Its own definition of a smoothed loss: a moving mean, corrected for its beginning.
    mean = 0.0
    for number, row in enumerate(rows, 1):
        mean = 0.9 * mean + 0.1 * float(row["loss"])
        assert float(row["smoothed_loss"]) == pytest.approx(mean / (1 - 0.9**number))
    # One that is cut off and resumed says the same.
    again: list[str] = []
    cut = loop.run(params, tmp_path / "cut", report=again.append, should_stop=stop_after(7))
    assert cut.ended == "signal"
    assert not any(line.startswith("range test of") for line in again)
    loop.run(params, tmp_path / "cut", report=again.append)
    assert found.replace("whole", "cut") in again
    tables = [(tmp_path / name / "rate_range.csv").read_text() for name in ("whole", "cut")]
    assert tables[0] == tables[1]


def test_all_rates_may_be_tried(tmp_path: Path) -> None:
    lines: list[str] = []
    result = loop.run(ranged(lowest=1e-9, highest=1e-8, steps=3), tmp_path, report=lines.append)
    assert (result.step, result.ended) == (3, "hook")
    assert any("all 3 rates were tried" in line for line in lines)


def test_the_steepest_and_the_lowest_loss_are_found() -> None:
    rates = np.logspace(-5, 1, 61)
    position = np.log10(rates)
    # Falls around 1e-2, is lowest at 1e-1, rises after it.
    losses = 2.0 - 1.5 / (1 + np.exp(-6 * (position + 2))) + np.maximum(position + 1, 0) ** 2
    found = rate_range.suggest(list(rates), list(losses))
    assert found is not None
    assert found.steepest == pytest.approx(1e-2)
    assert found.lowest == pytest.approx(1e-1)
    assert found.rate == pytest.approx(1e-2)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0, 4.0], [1.0, 0.5], []])
def test_losses_that_do_not_fall_suggest_nothing(losses: list[float]) -> None:
    assert rate_range.suggest([10.0**n for n in range(len(losses))], losses) is None


def test_a_rate_that_does_not_rise_is_refused(tmp_path: Path) -> None:
    params = one_layer_task(max_steps=1)
    params.train.hooks = (hooks.RateRangeTest.Params(),)
    with pytest.raises(errors.HookError) as caught:
        loop.run(params, tmp_path)
    assert "failed in begin at step 0: the rate does not rise: set train.opt" in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        hooks.RateRangeTest.Params(smoothing=1.0),
        hooks.RateRangeTest.Params(divergence=1.0),
        hooks.RateRangeTest.Params(interval_steps=None),
    ],
)
def test_fields_out_of_range_are_refused(params: Any) -> None:
    with pytest.raises(errors.ParamsError):
        params.instantiate()


@pytest.mark.parametrize(
    "fields", [{"lowest": 0.0}, {"lowest": 20.0}, {"highest": float("inf")}, {"steps": 1}]
)
def test_a_range_that_does_not_rise_is_refused(fields: Any) -> None:
    with pytest.raises(errors.ParamsError, match="RateRange"):
        optim.RateRange.Params(**fields).instantiate()
