"""The default model learns, with its default partitions, to classify unseen digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_gpipe.params.image import digits
from lingvo_gpipe.run import loop


@pytest.mark.slow
def test_the_default_job_reads_digits_after_a_sixth_of_its_updates(tmp_path: Path) -> None:
    params = digits.ConvNet().task()
    assert (params.model.num_partitions, params.model.num_micro_batches) == (2, 4)
    params.train.max_steps = 120
    result = loop.run(params, tmp_path, evaluate=True)
    assert result.metrics["accuracy"] >= 0.96
