"""A checkpoint of several processes has the files of TensorFlow's own, and is traced once."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import shards, store
from tests.support import disks


@pytest.fixture(autouse=True)
def over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each logical CPU for a process of its own, whose variables are packed."""
    monkeypatch.setattr(store, "_process", lambda device: device)
    monkeypatch.setattr(packing, "is_packed", lambda device: device.endswith(("CPU:1", "CPU:2")))


def variables() -> dict[str, Any]:
    """Return a scalar of the first device, and packs of several dtypes of the others."""
    wanted = {}
    for number, dtype in ((1, tf.float32), (1, tf.bfloat16), (2, tf.float32)):
        for name, shape in (("norm.1/mean", (5,)), ("kernel", (3, 4)), ("bias", ())):
            wanted[f"variables/{number}/{dtype.name}/{name}"] = packing.Wanted(
                shape,
                dtype,
                f"/device:CPU:{number}",
                "weights",
                functools.partial(tf.cast, tf.fill(shape, number), dtype),
            )
    with tf.device("CPU:0"):
        step = tf.Variable(7, dtype=tf.int64)
    return {**packing.create(wanted), "step": step}


def content(prefix: str) -> dict[str, Any]:
    """Return name in the files → dtype and value."""
    reader = tf.train.load_checkpoint(prefix)
    types = reader.get_variable_to_dtype_map()
    return {name: (types[name], reader.get_tensor(name)) for name in types}


def test_the_files_are_those_of_tensorflow(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = variables()
    assert sum(isinstance(one, packing.Part) for one in held.values()) == 9
    own = checkpoints.Checkpoints(str(tmp_path / "own"), held, "text")
    assert isinstance(own._checkpoint, shards.OverHosts)
    own.save(3)
    monkeypatch.setattr(store, "_process", lambda _: "one")
    plain = checkpoints.Checkpoints(str(tmp_path / "plain"), held, "text")
    assert isinstance(plain._checkpoint, tf.train.Checkpoint)
    plain.save(3)
    found, expected = (content(str(tmp_path / name / "ckpt-3")) for name in ("own", "plain"))
    np.testing.assert_equal(found, expected)
    assert len(found) == 12  # the values, the counter and the graph of objects
    names = sorted(os.listdir(tmp_path / "own"))
    assert names == [
        "checkpoint",
        *(f"ckpt-3.data-0000{number}-of-00003" for number in range(3)),
        "ckpt-3.index",
        "ckpt-3.params.txt",
    ]


def test_each_has_the_values_of_its_moment_by_one_graph(
    tmp_path: pathlib.Path,
) -> None:
    held = variables()
    saver = checkpoints.Checkpoints(
        str(tmp_path), held, "text", writer=checkpoints.Writer(background=True)
    )
    for step in (1, 2, 3):
        packing.assign([(v, tf.cast(tf.fill(v.shape, step), v.dtype)) for v in held.values()])
        saver.save(step)
        packing.assign([(v, tf.zeros(v.shape, v.dtype)) for v in held.values()])
    assert saver._writer.close() is None
    for step in (1, 2, 3):
        for key in held:
            assert np.all(checkpoints.read_value(str(tmp_path / f"ckpt-{step}"), key) == step), key
    over = saver._checkpoint
    assert isinstance(over, shards.OverHosts)
    assert over._save.traces == 1
    assert over.stored == ()
    assert saver.restore(2) == checkpoints.Restored(str(tmp_path / "ckpt-2"), 2)
    assert all(np.all(np.asarray(variable) == 2) for variable in held.values())


def test_a_full_disk_leaves_the_older_ones_and_nothing_else(
    tmp_path: pathlib.Path,
) -> None:
    with tf.device("CPU:2"):
        big = tf.Variable(tf.random.stateless_uniform([1 << 18], [1, 2]))
    saver = checkpoints.Checkpoints(str(tmp_path), {**variables(), "big": big}, "text")
    saver.save(1)
    names = sorted(os.listdir(tmp_path))
    with (
        disks.full(1 << 19),
        pytest.raises(errors.CheckpointError, match=r"cannot be written .*one is .*ckpt-1"),
    ):
        saver.save(2)
    assert sorted(os.listdir(tmp_path)) == names
    saver.save(3)
    assert [checkpoints.step_of(path) for path in checkpoints.find(str(tmp_path))] == [1, 3]
