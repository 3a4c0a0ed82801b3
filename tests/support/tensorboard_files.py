"""What TensorBoard reads in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator


def curves(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return tag → (step, value) of all points in a folder's files; a text is a str."""
    events = event_accumulator.EventAccumulator(str(folder), {"tensors": 0}).Reload()
    return {
        tag: [(event.step, _value(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def values(folder: Path, tag: str) -> list[Any]:
    """Return the values of a curve; none where there is no curve of this name."""
    return [value for _, value in curves(folder).get(tag, [])]


def _value(proto: Any) -> Any:
    value = tf.make_ndarray(proto)
    return value.item().decode() if value.dtype == object and value.ndim == 0 else value
