"""Times of a cell's slots come from the programs that its slots run."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import layers, network
from lingvo_gpipe.pipelining import PipeliningLayer
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.schedule.recompute import Work

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
        ({}, (1, 10, None, 0, 0, 0), (1, 10, 4, 0, 0, 0)),
        ({"recompute": "never"}, (2, 5, None, 0, 0, 0), (2, 5, None, 0, 0, 0)),
        # One forward of the four is kept.
        (
            {"recompute": "except_last", "fuse": False},
            (1.25, 8.75, None, 0, 0, 0),
            (1.25, 8.75, None, 0, 0, 0),
        ),
        ({"schedule": "1f1b"}, (1, 10, None, 0, 0, 0), (1, 3, 4, 0, 0, 0)),
        # The first cell returns no gradient: its backward is not split.
        (
            {"schedule": "zb_h1", "recompute": "never"},
            (2, 5, None, 0, 0, 0),
            (2, 0, None, 15, 30, 0),
        ),
        # One R has a slot of its own: the last cell is fused.
        (
            {"schedule": "1f1b", "recompute": "early"},
            (1, 5, None, 0, 0, 3),
            (1, 3, 4, 0, 0, 0),
        ),
        # A device twice as fast.
        (
            {"device_speeds": (1.0, 2.0), "recompute": "never"},
            (2, 5, None, 0, 0, 0),
            (1, 2.5, None, 0, 0, 0),
        ),
    ],
)
def test_slots_take_the_time_of_the_programs_that_they_run(
    fields: dict[str, Any], first: tuple[Any, ...], last: tuple[Any, ...]
) -> None:
    analysis = analysis_of(**fields)
    for cell, expected in zip(analysis.cells, (first, last), strict=True):
        times = slot_times.of_cell(analysis, cell, SECONDS.__getitem__)
        forward_s, backward_s, fused_s, inputs_s, weights_s, recompute_s = expected
        assert times.seconds == {
            "F": forward_s,
            "R": recompute_s,
            "B": backward_s,
            "I": inputs_s,
            "W": weights_s,
        }
        assert times.fused_s == fused_s


def test_programs_take_the_time_of_their_layers() -> None:
    analysis = analysis_of(cuts=(2, 2))
    times = [Work(1.0, 2.0, 0.5, 2.5)] * 4
    # The loss has no weights: all of its backward is that of its inputs.
    assert slot_times.program_times(analysis, analysis.cells[1], times) == {
        **{"F": 2.0, "K": 2.0, "R": 1.0, "B": 5.0, "BK": 4.0},
        **{"I": 4.0, "IK": 3.0, "W": 1.0, "FB": 5.0},
    }
