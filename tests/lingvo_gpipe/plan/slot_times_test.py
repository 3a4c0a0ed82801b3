"""Times of a cell's slots come from the programs that its slots run."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.plan import slot_times

FIELDS = {name: tf.TensorSpec([8, 4]) for name in ("x", "target")}
SECONDS = {"F": 1, "K": 2, "R": 3, "FB": 4, "B": 10, "BK": 5, "I": 20, "IK": 15, "W": 30}


def analysis_of(num_layers: int = 3, **fields: Any) -> network.Analysis:
    own = [layers.Dense.Params(units=4) for _ in range(num_layers)]
    settings: dict[str, Any] = {"num_partitions": 2, "num_micro_batches": 4, **fields}
    params = PipeliningLayer.Params(layers=[*own, layers.MeanSquaredError.Params()], **settings)
    return network.analyze(params, FIELDS)


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        # One forward of the last cell meets its backward.
        ({}, (1, 10, 0, 0, 0, 0, 10), (1, 10, 4, 0, 0, 0, 10)),
        ({"recompute": "never"}, (2, 5, 0, 0, 0, 0, 5), (2, 5, 0, 0, 0, 0, 5)),
        # One forward of the four is kept.
        (
            {"recompute": "except_last", "fuse": False},
            (1.25, 8.75, 0, 0, 0, 0, 8.75),
            (1.25, 8.75, 0, 0, 0, 0, 8.75),
        ),
        ({"schedule": "1f1b"}, (1, 10, 0, 0, 0, 0, 10), (1, 3, 4, 0, 0, 0, 3)),
        # The first cell returns no gradient: its backward is not split.
        (
            {"schedule": "zb_h1", "recompute": "never"},
            (2, 5, 0, 0, 0, 0, 5),
            (2, 0, 0, 15, 30, 0, 45),
        ),
        # One R has a slot of its own: the last cell is fused.
        (
            {"schedule": "1f1b", "recompute": "early"},
            (1, 5, 0, 0, 0, 3, 8),
            (1, 3, 4, 0, 0, 0, 3),
        ),
        # A device twice as fast.
        (
            {"device_speeds": (1.0, 2.0), "recompute": "never"},
            (2, 5, 0, 0, 0, 0, 5),
            (1, 2.5, 0, 0, 0, 0, 2.5),
        ),
    ],
)
def test_slots_take_the_time_of_the_programs_that_they_run(
    fields: dict[str, Any], first: tuple[float, ...], last: tuple[float, ...]
) -> None:
    analysis = analysis_of(**fields)
    times = [slot_times.of_cell(analysis, cell, SECONDS.__getitem__) for cell in analysis.cells]
    assert times == [slot_times.SlotTimes(*first), slot_times.SlotTimes(*last)]


def test_programs_take_the_time_of_their_layers() -> None:
    analysis = analysis_of(cuts=(2, 2))
    times = [slot_times.LayerTime(1.0, 2.0, 0.5, 2.5)] * 4
    # The loss has no weights: all of its backward is that of its inputs.
    assert slot_times.program_times(analysis, analysis.cells[1], times) == {
        **{"F": 2.0, "K": 2.0, "R": 1.0, "B": 5.0, "BK": 4.0},
        **{"I": 4.0, "IK": 3.0, "W": 1.0, "FB": 5.0},
    }
