"""Numbers that are not possible are refused by name, and all Params go to text and back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lingvo_gpipe import errors, optim

STAIRCASE: dict[str, Any] = {"peak": 0.64, "decay": 0.9, "decay_steps": 100.0}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (optim.Adafactor.Params(decay_exponent=0.0), "decay_exponent=0.0 | more than 0"),
        (optim.Adafactor.Params(epsilon=-1.0), "epsilon=-1.0 | more than 0"),
        (optim.Adafactor.Params(clip_threshold=0.0), "clip_threshold=0.0 | more than 0, or None"),
        (optim.Adafactor.Params(momentum=1.0), "momentum=1.0 | 0 or more, and less than 1"),
        (optim.Adafactor.Params(min_factored=0), "min_factored=0 | 1 or more"),
        (optim.RMSProp.Params(decay=1.0), "decay=1.0 | 0 or more, and less than 1"),
        (optim.RMSProp.Params(momentum=-0.1), "momentum=-0.1 | 0 or more"),
        (optim.RMSProp.Params(epsilon=0.0), "epsilon=0.0 | more than 0"),
        (optim.WarmupStaircase.Params(**STAIRCASE | {"peak": -1.0}), "peak=-1.0 | 0 or more"),
        (optim.WarmupStaircase.Params(**STAIRCASE | {"peak": math.nan}), "peak=nan | 0 or more"),
        (optim.WarmupStaircase.Params(**STAIRCASE | {"decay": math.inf}), "decay=inf | 0 or more"),
        (optim.WarmupStaircase.Params(**STAIRCASE, warmup_steps=-1), "warmup_steps=-1 | 0 or more"),
        (
            optim.WarmupStaircase.Params(**STAIRCASE | {"decay_steps": 0.0}),
            "decay_steps=0.0 | more than 0",
        ),
        (optim.InverseSquareRoot.Params(units=0), "units=0 | 1 or more"),
        (optim.InverseSquareRoot.Params(warmup_steps=0), "warmup_steps=0 | 1 or more"),
        (optim.InverseSquareRoot.Params(factor=-1.0), "factor=-1.0 | 0 or more"),
        (optim.InverseSquareRoot.Params(factor=math.nan), "factor=nan | 0 or more"),
        (optim.Average.Params(decay=1.0), "decay=1.0 | 0 or more, and less than 1"),
        (optim.LossScale.Params(initial=0.5), "initial=0.5 | 1 to 1,099,511,627,776"),
        (optim.LossScale.Params(initial=2.0**41), "initial=2199023255552.0 | 1 to"),
        (optim.LossScale.Params(initial=math.nan), "initial=nan | 1 to"),
        (optim.LossScale.Params(growth_steps=0), "growth_steps=0 | 1 or more"),
    ],
)
def test_a_number_that_is_not_possible_is_refused(params: Any, text: str) -> None:
    owner = type(params).__qualname__.removesuffix(".Params")
    value, use = text.split(" | ")
    with pytest.raises(errors.ParamsError) as refused:
        params.instantiate()
    assert str(refused.value).startswith(f"{owner}: {value} is not possible. Use {use}")
