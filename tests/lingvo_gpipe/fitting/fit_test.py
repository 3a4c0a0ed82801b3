"""`fit`, `evaluate` and `predict` of a pipelined model have the numbers of the plain model."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

from lingvo_gpipe.fitting import PipelinedModel
from tests.lingvo_gpipe.fitting.fit_cases import CASES, Case

pytestmark = pytest.mark.usefixtures("float64")

LAYOUTS = [(k, m) for k in (1, 2, 3) for m in (1, 4)]


def trained(case: Case, layout: tuple[int, int] | None) -> tuple[Any, ...]:
    """Return weights, history, evaluation and predictions after three epochs."""
    keras.utils.set_random_seed(1)
    model = case.model()
    if layout is not None:
        model = PipelinedModel(model, *layout)
    model.compile(**case.compile())
    fit = case.fit()
    history = model.fit(**fit, epochs=3, verbose=0).history
    again = {**fit, "steps": fit.get("steps_per_epoch")}
    kept = ("x", "y", "batch_size", "sample_weight", "steps")
    evaluated = model.evaluate(
        **{name: again[name] for name in kept if again.get(name) is not None},
        return_dict=True,
        verbose=0,
    )
    inputs = fit["x"] if "y" in fit else case.fit()["x"]
    predicted = model.predict(
        inputs, batch_size=fit.get("batch_size"), steps=again["steps"], verbose=0
    )
    return model.get_weights(), history, evaluated, predicted


@functools.cache
def of_keras(name: str) -> tuple[Any, ...]:
    """Return what the plain model of a case is compared by, for each of its layouts."""
    return trained(CASES[name], None)


def compare(name: str, layout: tuple[int, int]) -> None:
    plain, found = of_keras(name), trained(CASES[name], layout)
    assert len(plain[0]) == len(found[0])
    for number, (one, other) in enumerate(zip(plain[0], found[0], strict=True)):
        scale = max(np.abs(one).max(initial=0), 1e-3)
        assert np.abs(one - other).max(initial=0) <= 1e-10 * scale, f"weight {number}"
    for wanted, got in zip(plain[1:3], found[1:3], strict=True):
        assert wanted.keys() == got.keys()
        for key in wanted:
            np.testing.assert_allclose(got[key], wanted[key], rtol=1e-8, atol=1e-8, err_msg=key)
    for one, other in zip(keras.tree.flatten(plain[3]), keras.tree.flatten(found[3]), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-8, atol=1e-8)


def points() -> list[Any]:
    """Return each case with each layout; `make test` runs one layout of each case."""
    found = []
    for number, (name, case) in enumerate(CASES.items()):
        layouts = [layout for layout in LAYOUTS if layout[1] == 1 or not case.one_micro_batch]
        chosen = (2 + number % 2, 1 if case.one_micro_batch else 4)
        for layout in layouts:
            marks = () if layout == chosen else (pytest.mark.sameness_grid,)
            found.append(
                pytest.param(name, layout, marks=marks, id=f"{name}-K{layout[0]}-M{layout[1]}")
            )
    return found


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")  # a dict for one input
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize(("name", "layout"), points())
def test_fit_has_the_numbers_of_keras(name: str, layout: tuple[int, int]) -> None:
    compare(name, layout)
