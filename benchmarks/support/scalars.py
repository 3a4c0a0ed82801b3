"""Reads what runs have written for TensorBoard."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A scalar of TensorBoard."""

    step: int
    wall_s: float
    value: float


def read(folder: Path) -> dict[str, list[Point]]:
    """Return the scalars in a folder of TensorBoard: tag → points in the order of writing.

    A folder that does not exist has none.
    """
    if not folder.exists():
        return {}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()

    def value(event: event_accumulator.TensorEvent) -> float:
        return float(tensor_util.make_ndarray(event.tensor_proto))

    points: dict[str, list[Point]] = {}
    for tag in events.Tags()["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name != "scalars":
            continue
        points[tag] = sorted(
            (Point(event.step, event.wall_time, value(event)) for event in events.Tensors(tag)),
            key=lambda point: point.wall_s,
        )
    return points
