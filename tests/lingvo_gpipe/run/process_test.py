"""Threads of a process in which a recipe has begun TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.execution import placement
from lingvo_gpipe.run import checkpoints, log_directory, process


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


@pytest.mark.parametrize(
    ("kept", "devices", "expected"),
    [
        ((16, 16), 4, (16, 16)),  # of a recipe that began TensorFlow
        ((16, 16), 2, (4, 4)),  # the run had other devices
        ((8, 8), 4, (4, 4)),  # another machine
        (None, 4, (4, 4)),
    ],
)
def test_a_run_goes_on_with_the_threads_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kept: tuple[int, int] | None,
    devices: int,
    expected: tuple[int, int],
) -> None:
    """A recipe's Keras model begins TensorFlow; the params that a run keeps make none."""
    found: list[tuple[int, int]] = []
    model = pipelining.PipeliningLayer.Params(num_partitions=4)
    values = {"model.num_partitions": str(devices), "model.num_replicas": "1"}
    monkeypatch.setattr(log_directory, "kept_values", lambda _: values)
    monkeypatch.setattr(checkpoints, "newest", lambda _: None if kept is None else "ckpt-3")
    monkeypatch.setattr(checkpoints, "read_value", lambda *_: np.array(kept))
    monkeypatch.setattr(placement, "num_cores", lambda: 16)
    monkeypatch.setattr(placement, "prepare_logical_cpus", lambda _: None)
    monkeypatch.setattr(placement, "set_threads", found.append)
    process.prepare_devices(model, tmp_path)
    assert found == [expected]
