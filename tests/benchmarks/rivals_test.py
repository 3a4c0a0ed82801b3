"""The reference of the rivals: what it writes it reads, and another gradient is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals.reference import Reference

KERNEL = np.asarray([[1.0, -2.0], [0.5, 4.0]], np.float32)
REFERENCE = Reference(
    loss=2.0,
    batch={"x": KERNEL},
    weights={"dense/kernel": KERNEL, "dense/bias": KERNEL[0], "dense_1/kernel": KERNEL},
    gradients={"dense/kernel": KERNEL, "dense/bias": 0 * KERNEL[0], "dense_1/kernel": KERNEL},
)


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    REFERENCE.write(tmp_path / "reference.npz")
    reference = Reference.read(tmp_path / "reference.npz")
    assert reference.loss == 2.0
    assert reference.layers == ["dense", "dense_1"]
    np.testing.assert_array_equal(reference.weights_of("dense")["bias"], KERNEL[0])
    assert reference.worst_error(REFERENCE.gradients) == 0.0


def test_a_gradient_differs_by_its_share_of_the_largest_of_its_layer() -> None:
    bias = {"dense/bias": np.asarray([0.0, 0.4], np.float32)}
    assert REFERENCE.worst_error({**REFERENCE.gradients, **bias}) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("loss", "error"), [(2.1, 0.0), (2.0, 1e-3), (math.nan, 0.0), (2.0, math.nan), (2.0, math.inf)]
)
def test_a_rival_that_computes_something_else_is_refused(loss: float, error: float) -> None:
    paths = list(REFERENCE.gradients)
    REFERENCE.check("mlp, 1f1b", {"loss": 2.0, "error": 1e-6, "paths": paths})
    with pytest.raises(ValueError, match="mlp, 1f1b computes something else"):
        REFERENCE.check("mlp, 1f1b", {"loss": loss, "error": error, "paths": paths})


def test_a_gradient_that_is_missing_or_not_finite_is_refused() -> None:
    some = {"loss": 2.0, "error": 0.0, "paths": list(REFERENCE.gradients)[1:]}
    with pytest.raises(ValueError, match="has other gradients than the network: dense/kernel"):
        REFERENCE.check("mlp, 1f1b", some)
    broken = {**REFERENCE.gradients, "dense/bias": np.full(2, math.nan, np.float32)}
    assert REFERENCE.worst_error(broken) == math.inf
