"""The reference of the rivals: what it writes it reads, and another gradient is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import measures

KERNEL = np.asarray([[1.0, -2.0], [0.5, 4.0]], np.float32)
REFERENCE = measures.Reference(
    loss=2.0,
    flops=64.0,
    batch={"x": KERNEL},
    weights={"dense/kernel": KERNEL, "dense/bias": KERNEL[0], "dense_1/kernel": KERNEL},
    gradients={"dense/kernel": KERNEL, "dense/bias": 0 * KERNEL[0], "dense_1/kernel": KERNEL},
)


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    REFERENCE.write(tmp_path / "reference.npz")
    found = measures.Reference.read(tmp_path / "reference.npz")
    assert (found.loss, found.flops) == (2.0, 64.0)
    assert found.layers == ["dense", "dense_1"]
    np.testing.assert_array_equal(found.weights_of("dense")["bias"], KERNEL[0])
    assert found.worst_error(REFERENCE.gradients) == 0.0


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


def test_resident_memory_counts_from_its_start() -> None:
    """A peak before it does not."""
    np.ones(2**25).sum()  # 256 MiB, for a moment
    resident = measures.Resident()
    assert resident.grown_mib() < 100
    held = np.ones(2**24)
    assert held.nbytes / measures.MIB <= resident.grown_mib() + 1 < 228


def test_the_best_rival_is_the_fastest_that_fits() -> None:
    needs = {"gpipe,kept": 60.0, "gpipe,checkpointed": 20.0, "1f1b,kept": 19.0}
    times = {"gpipe,kept": 0.4, "gpipe,checkpointed": 0.9, "1f1b,kept": 0.7}
    runs = {
        name: [{"s": times.get(name, 1.0), "device_mib": needs.get(name, 20.0), "other_load": 0.0}]
        for name in rivals.TORCH
    }
    cap = rivals.cap_mib(runs, REFERENCE)
    assert 40.0 < cap < 40.1  # and half of the weights' bytes
    assert rivals.best(runs, cap, 0.0) == "1f1b,kept"
    assert rivals.best(runs, 70.0, 0.0) == "gpipe,kept"
