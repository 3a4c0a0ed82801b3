"""A checkpoint that is written while training goes on: its moment's values, whole or invisible."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import executor

from lingvo_gpipe import errors, packing
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import store
from tests.support import disks


class Gate(checkpoints.WriterThread):
    """A thread that begins with nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def submit(self, job: Any) -> concurrent.futures.Future[None]:
        def after_opening() -> None:
            self._is_open.wait()
            job()

        return super().submit(after_opening)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()
    made.close()


def variables() -> dict[str, Any]:
    """Return a variable on each device, a pack of two, and a table that is updated by rows."""
    made: dict[str, Any] = {}
    for number in range(2):
        with tf.device(f"CPU:{number}"):
            made[f"dense{number}"] = tf.Variable(tf.fill([100, 3], float(number)))
    made["table"] = tf.Variable(tf.zeros([50, 2]))
    return made


def values(held: dict[str, Any]) -> dict[str, Any]:
    return {key: np.array(variable.numpy()) for key, variable in held.items()}


def saved(prefix: str, keys: Any) -> dict[str, Any]:
    return {key: checkpoints.read_value(prefix, key) for key in keys}


def change(held: dict[str, Any]) -> None:
    """Change every value: in graphs, at once, in place and by rows."""

    @tf.function
    def in_graph() -> None:
        held["dense0"].assign_add(tf.ones([100, 3]))

    in_graph()
    held["dense1"].assign(held["dense1"] * 2.0 + 1.0)
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 7]))
    for _ in range(2):
        held["table"].scatter_add(rows)


def test_it_has_the_values_of_its_moment(tmp_path: pathlib.Path, gate: Gate) -> None:
    held = variables()
    saver = checkpoints.Checkpoints(str(tmp_path), held, "text", thread=gate)
    before = values(held)
    prefix = saver.save(1)
    change(held)
    assert checkpoints.find(str(tmp_path)) == []
    gate.check()
    gate.open()
    gate.join()
    np.testing.assert_equal(saved(prefix, held), before)
    assert not np.array_equal(held["table"].numpy(), before["table"])


def test_parts_of_a_pack_have_the_values_of_its_moment(
    tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "is_packed", lambda _: True)
    wanted = {
        key: packing.Wanted((3, 5), tf.float32, "/device:CPU:1", "weights", lambda: tf.ones([3, 5]))
        for key in ("one", "two")
    }
    held = packing.create(wanted)
    assert isinstance(held["one"], packing.PackedVariable)
    prefix = checkpoints.Checkpoints(str(tmp_path), held, thread=gate).save(1)
    held["two"].assign(np.zeros([3, 5]))
    gate.open()
    gate.join()
    np.testing.assert_equal(saved(prefix, held), {key: np.ones([3, 5]) for key in held})


def test_the_next_one_waits_for_the_one_before(tmp_path: pathlib.Path, gate: Gate) -> None:
    held = variables()
    saver = checkpoints.Checkpoints(str(tmp_path), held, "text", keep=5, thread=gate)
    first = values(held)
    saver.save(1)
    change(held)
    second = values(held)
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    saver.save(2)
    assert [checkpoints.step_of(path) for path in checkpoints.find(str(tmp_path))][:1] == [1]
    gate.join()
    np.testing.assert_equal(saved(str(tmp_path / "ckpt-1"), held), first)
    np.testing.assert_equal(saved(str(tmp_path / "ckpt-2"), held), second)


def test_after_a_failure_what_was_begun_is_not_written(tmp_path: pathlib.Path, gate: Gate) -> None:
    held = variables()
    best = checkpoints.Checkpoints(str(tmp_path / "best"), held, "text", thread=gate)
    usual = checkpoints.Checkpoints(str(tmp_path / "usual"), held, "text", thread=gate)
    best.save(1)
    usual.save(1)
    (tmp_path / "best").rmdir()
    gate.open()
    with pytest.raises(
        errors.CheckpointError, match=r"best/ckpt-1: .* cannot be written \(No such"
    ):
        gate.join()
    assert checkpoints.find(str(tmp_path / "usual")) == []
    gate.join()  # it was raised
    (tmp_path / "best").mkdir()
    best.save(1)
    usual.save(1)
    gate.join()
    assert checkpoints.find(str(tmp_path / "usual"))
    assert gate.close() is None


def test_an_error_that_nobody_waited_for_is_returned_at_the_end(
    tmp_path: pathlib.Path, gate: Gate
) -> None:
    saver = checkpoints.Checkpoints(str(tmp_path / "run"), variables(), "text", thread=gate)
    saver.save(1)
    (tmp_path / "run").rmdir()
    gate.open()
    assert isinstance(gate.close(), errors.CheckpointError)


def test_all_are_written_by_one_executor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each would be freed while other threads may wait for it."""
    made: list[Any] = []
    make = executor.new_executor

    def recorded(*args: Any, **kwargs: Any) -> executor.Executor:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(executor, "new_executor", recorded)
    thread = checkpoints.WriterThread()
    saver = checkpoints.Checkpoints(str(tmp_path), variables(), "text", thread=thread)
    saver.save(1)
    saver.save(2)
    thread.join()
    assert len(made) == 1
    assert thread.close() is None


# --- several processes ----------------------------------------------------------------------------


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each logical CPU for a process of its own, whose variables are packed."""
    monkeypatch.setattr(store, "_cpu_of_process", lambda device: device)
    monkeypatch.setattr(packing, "is_packed", lambda device: device.endswith(("CPU:1", "CPU:2")))


def packed() -> dict[str, Any]:
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


@pytest.mark.usefixtures("several_processes")
def test_each_process_writes_a_file_by_one_graph(tmp_path: pathlib.Path, gate: Gate) -> None:
    held = packed()
    assert sum(isinstance(one, packing.PackedVariable) for one in held.values()) == 9
    saver = checkpoints.Checkpoints(str(tmp_path), held, "text", thread=gate)
    gate.open()
    for step in (1, 2, 3):
        packing.assign([(v, tf.cast(tf.fill(v.shape, step), v.dtype)) for v in held.values()])
        saver.save(step)
        packing.assign([(v, tf.zeros(v.shape, v.dtype)) for v in held.values()])
    gate.join()
    for step in (1, 2, 3):
        for key in held:
            assert np.all(checkpoints.read_value(str(tmp_path / f"ckpt-{step}"), key) == step), key
    assert saver._save.traces == 1
    assert saver._stored == ()
    assert sorted(path.name for path in tmp_path.glob("ckpt-3*")) == [
        *(f"ckpt-3.data-0000{number}-of-00003" for number in range(3)),
        *("ckpt-3.index", "ckpt-3.params.txt"),
    ]
    assert checkpoints.restore(str(tmp_path / "ckpt-2"), held, {})
    assert all(np.all(np.asarray(variable) == 2) for variable in held.values())


@pytest.mark.usefixtures("several_processes")
def test_a_disk_that_is_full_for_one_process_leaves_the_older_ones(tmp_path: pathlib.Path) -> None:
    with tf.device("CPU:2"):
        big = tf.Variable(tf.random.stateless_uniform([1 << 18], [1, 2]))
    saver = checkpoints.Checkpoints(str(tmp_path), {**packed(), "big": big}, "text")
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


def test_the_reason_of_a_graphs_error_is_no_traceback() -> None:
    message = (
        'Graph execution error:\n\nDetected at node SaveV2\n  File "a.py", line 1, in f\n\n'
        "disk/ckpt-2.index; No space left on device\n\t [[{{node SaveV2}}]] [Op:saved_1]"
    )
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert checkpoints.reason(error) == "disk/ckpt-2.index; No space left on device"
