"""Threads of a process in which a recipe has begun TensorFlow."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.execution import placement
from lingvo_gpipe.run import process


@pytest.mark.parametrize(
    ("fields", "threads", "flags"),
    [
        ({"num_partitions": 4}, (4, 4), None),
        ({"num_partitions": 4}, (16, 16), "--num_partitions=4"),
        ({"num_partitions": 2, "num_replicas": 2}, (16, 16), "--num_partitions=2 --num_replicas=2"),
        ({"num_partitions": 2, "placement": "gpu"}, (16, 16), None),
        ({"num_partitions": 1, "devices": ("/CPU:0",)}, (2, 2), None),
    ],
)
def test_a_line_says_that_a_recipe_has_fixed_other_threads(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    threads: tuple[int, int],
    flags: str | None,
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 16)
    for name, count in zip(("inter", "intra"), threads, strict=True):
        getter = f"get_{name}_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, getter, lambda count=count: count)
    lines = list(process.thread_notes(pipelining.PipeliningLayer.Params(**fields)))
    if flags is None:
        assert lines == []
        return
    (line,) = lines
    assert "are 16, 16, not 4, 4, with which 4 devices share the cores" in line
    assert line.endswith(f"sets these with {flags}")
