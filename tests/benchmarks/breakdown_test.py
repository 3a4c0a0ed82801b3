"""The real steps that are taken apart, and the share of a step that is not explained."""

from __future__ import annotations

import pytest
import tensorflow as tf

from benchmarks import breakdown
from lingvo_gpipe import network
from lingvo_gpipe.schedule import breakdown as parts


@pytest.mark.parametrize("kind", breakdown.KINDS)
def test_networks_have_two_cells_that_recompute(kind: str) -> None:
    task, batch = breakdown.task_of(kind)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
    analysis = network.analyze(task.model, specs)
    assert len(analysis.cells) == 2
    assert all(len(cell.kept) == 0 for cell in analysis.cells)
    shares = [cell.cost / sum(other.cost for other in analysis.cells) for cell in analysis.cells]
    assert max(shares) < 0.65


def test_what_no_part_explains_counts_without_its_sign_on_the_worst_device() -> None:
    quiet = dict.fromkeys(parts.PARTS, 0.0) | {"forward": 10.0}
    busy = quiet | {"forward": 8.0, "start": 1.0, "transfer": 0.5, "update": 1.0, "rest": -0.5}
    assert breakdown.length_s([quiet, busy]) == breakdown.length_s([busy, quiet]) == 10.0
    assert breakdown.share([quiet, busy], breakdown.REST) == pytest.approx(0.15)
    assert breakdown.share([quiet, busy], breakdown.RUNTIME) == pytest.approx(0.2)
