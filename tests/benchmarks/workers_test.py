"""Runs are compared by their numbers, not by what a process writes about itself."""

from __future__ import annotations

from pathlib import Path

from benchmarks import workers
from lingvo_gpipe.run import tensorboard


def test_a_run_that_starts_twice_has_the_curves_of_one_that_starts_once(tmp_path: Path) -> None:
    for name, starts in (("once", [range(1, 5)]), ("twice", [range(1, 3), range(3, 5)])):
        for steps in starts:
            writer = tensorboard.Writer(tmp_path / name / "train")
            first = steps.start - 1
            writer.scalars(first, {"sampling_share/de:en": 0.25})
            writer.scalars(0, {"learning_rate_planned": float(steps.stop)})
            for step in steps:
                writer.scalars(step, {"loss": 1.0 / step, "examples_per_second": float(first)})
            writer.close()
    once, twice = (workers.curves(tmp_path / name) for name in ("once", "twice"))
    assert once == twice
    assert set(once) == {("train", "loss", step) for step in range(1, 5)}
