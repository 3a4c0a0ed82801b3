"""Checkpoints: whole or invisible, refused if they do not fit, otherwise restored."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.run import checkpoints
from lingvo_gpipe.run.checkpoints import files, saved
from tests.support import disks, programs


def network(fill: float = 0.0, device: str = "CPU:0", **more: Any) -> dict[str, Any]:
    with tf.device(device):
        return {
            "weights/conv/kernel": tf.Variable(tf.fill([3, 4], float(fill))),
            "slots/conv/kernel/momentums": tf.Variable(tf.fill([3, 4], fill + 1.0)),
            "state/norm.1/mean": tf.Variable(tf.fill([4], fill + 2.0)),
            "step": tf.Variable(int(fill), dtype=tf.int64),
            **more,
        }


def values(objects: dict[str, Any]) -> dict[str, Any]:
    return {key: variable.numpy() for key, variable in objects.items()}


def save(directory: pathlib.Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        checkpoints.Checkpoints(str(directory), network(step), f"step: {step}\n", keep=keep).save(
            step
        )


def names(directory: pathlib.Path) -> list[str]:
    """Return the names of the whole checkpoints."""
    return [os.path.basename(path) for path in checkpoints.find(str(directory))]


def shard(directory: pathlib.Path, step: int) -> pathlib.Path:
    (path,) = directory.glob(f"ckpt-{step}.data-*")
    return path


def test_a_saved_network_comes_back_on_another_device(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 7)
    objects = network(device="CPU:1")
    restored = checkpoints.Checkpoints(str(tmp_path), objects).restore()
    assert restored == checkpoints.Restored(str(tmp_path / "ckpt-7"), 7)
    np.testing.assert_equal(values(objects), values(network(7)))
    assert checkpoints.params_text(restored.path) == "step: 7\n"
    assert checkpoints.read_value(restored.path, "step") == 7


def test_keys_are_paths_and_nothing_else(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1)
    nearest = "no 'weights/conv/kernels'; nearest 'weights/conv/kernel'"
    with pytest.raises(errors.CheckpointError, match=nearest):
        checkpoints.read_value(str(tmp_path / "ckpt-1"), "weights/conv/kernels")
    for key, value in values(network(1)).items():
        np.testing.assert_equal(checkpoints.read_value(str(tmp_path / "ckpt-1"), key), value)


def test_an_empty_directory_restores_nothing(tmp_path: pathlib.Path) -> None:
    assert checkpoints.Checkpoints(str(tmp_path), network()).restore() is None


def test_older_ones_are_rotated_out_with_their_params(tmp_path: pathlib.Path) -> None:
    objects = network()
    saver = checkpoints.Checkpoints(str(tmp_path), objects, "text", keep=2)
    for step in (1, 2, 3, 4):
        saver.save(step)
    assert checkpoints.find(str(tmp_path)) == [str(tmp_path / f"ckpt-{n}") for n in (3, 4)]
    assert not list(tmp_path.glob("ckpt-[12]*"))
    again = checkpoints.Checkpoints(str(tmp_path), objects, "text", keep=2)
    again.save(5)
    assert names(tmp_path) == ["ckpt-4", "ckpt-5"]
    assert not list(tmp_path.glob("ckpt-3*"))


def test_the_one_that_was_just_written_stays_beside_one_of_a_later_step(
    tmp_path: pathlib.Path,
) -> None:
    """A run that went back to an older checkpoint has a best one of a step that it left."""
    save(tmp_path, 1400, keep=1)
    save(tmp_path, 1100, keep=1)
    assert names(tmp_path) == ["ckpt-1100"]
    save(tmp_path, 1000, 1300, 1200, keep=2)
    assert names(tmp_path) == ["ckpt-1200", "ckpt-1300"]


def test_free_space_is_a_text_where_the_folder_is_gone(tmp_path: pathlib.Path) -> None:
    assert files.free_space("").endswith(" MiB")  # of the working directory
    assert files.free_space(str(tmp_path / "gone")) == "an unknown size"


def test_a_checkpoint_is_chosen_by_path_or_directory(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 3, 5)
    for path, step in (("ckpt-3", 3), ("ckpt-3.index", 3), ("", 5)):
        objects = network()
        restored = checkpoints.restore(str(tmp_path / path), objects, {})
        assert restored
        assert restored.step == objects["step"].numpy() == step


def test_the_saved_or_restored_step_is_not_written_again(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 3)
    before = shard(tmp_path, 3).stat().st_mtime_ns
    saver = checkpoints.Checkpoints(str(tmp_path), network(), "text")
    saver.restore()
    saver.save(3)
    assert shard(tmp_path, 3).stat().st_mtime_ns == before


def test_a_step_of_another_run_is_written_again(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 2, 3)
    objects = network(8)
    saver = checkpoints.Checkpoints(str(tmp_path), objects, "new")
    saver.save(3)
    assert checkpoints.read_value(str(tmp_path / "ckpt-3"), "step") == 8
    assert checkpoints.params_text(str(tmp_path / "ckpt-3")) == "new"
    assert names(tmp_path) == ["ckpt-2", "ckpt-3"]


DAMAGED_TEXTS = {
    "an empty text": (".params.txt", lambda _: b""),
    "bytes that are no text": (".params.txt", lambda _: b"class: \xff\n"),
    "a changed text": (".params.txt", lambda content: content.replace(b"step: 5", b"step: 7")),
    "a changed checksum": (".params.txt", lambda content: content.replace(b"crc32", b"crc64")),
}
DAMAGED_VALUES = {
    "a changed bit": (
        ".data-*",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ),
    "no data": (".data-*", None),
    "no index": (".index", None),
    "an index of other bytes": (".index", lambda _: b"garbage" * 99),
    "an empty index": (".index", lambda _: b""),
}
# Its end has no value of the first variable, which alone some functions read.
CUT_OFF = {"data that is cut off": (".data-*", lambda content: content[:-20])}


def damage(directory: pathlib.Path, suffix: str, change: Callable[[bytes], bytes] | None) -> None:
    """Change a file of the checkpoint of step 5, or remove it."""
    (path,) = directory.glob(f"ckpt-5{suffix}")
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


def rows(damages: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("damaged", damages.values(), ids=damages.keys())


@rows(DAMAGED_TEXTS | DAMAGED_VALUES | CUT_OFF)
def test_a_torn_newest_one_is_reported_and_the_one_before_it_used(
    tmp_path: pathlib.Path, damaged: Any
) -> None:
    save(tmp_path, 3, 5)
    damage(tmp_path, *damaged)
    objects = network()
    saver = checkpoints.Checkpoints(str(tmp_path), objects, "text")
    restored = saver.restore()
    assert restored
    ((path, reason),) = restored.torn
    assert (restored.step, path) == (3, str(tmp_path / "ckpt-5"))
    assert reason
    assert "\n" not in reason
    np.testing.assert_equal(values(objects), values(network(3)))
    assert names(tmp_path) == ["ckpt-3"]
    assert list(tmp_path.glob("ckpt-5.torn.txt"))
    objects["step"].assign(5)
    saver.save(5)
    assert checkpoints.Checkpoints(str(tmp_path), network()).restore() == checkpoints.Restored(
        str(tmp_path / "ckpt-5"), 5
    )


@rows(DAMAGED_VALUES)
def test_a_torn_one_that_was_requested_is_refused(tmp_path: pathlib.Path, damaged: Any) -> None:
    save(tmp_path, 3, 5)
    damage(tmp_path, *damaged)
    prefix = str(tmp_path / "ckpt-5")
    key = "weights/conv/kernel"  # the first values of the file
    part = {key: [checkpoints.Part(key, (3, 4))]}
    for action in (
        lambda: checkpoints.restore(prefix, network(), {}),
        lambda: checkpoints.read_value(prefix, key),
        lambda: checkpoints.restore_matching(network(), prefix, part),
    ):
        with pytest.raises(errors.CheckpointError, match="ckpt-5") as caught:
            action()
        assert "\n" not in str(caught.value)


LOST: tuple[Any, ...] = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
)


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.__name__)
def test_a_worker_lost_while_it_restores_tears_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    save(tmp_path, 3, 5)
    before = sorted(path.name for path in tmp_path.iterdir())
    saver = checkpoints.Checkpoints(str(tmp_path), network(), "text")
    lost = mock.Mock(side_effect=kind(None, None, "Connection reset by peer"))
    monkeypatch.setattr(saved.SavedValues, "_restored", lost)
    with pytest.raises(kind):
        saver.restore()
    with pytest.raises(kind):
        checkpoints.restore(str(tmp_path), network(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert saver.restore() == checkpoints.Restored(str(tmp_path / "ckpt-5"), 5)


@rows(DAMAGED_TEXTS)
def test_a_subset_is_restored_without_the_text(tmp_path: pathlib.Path, damaged: Any) -> None:
    save(tmp_path, 3, 5)
    damage(tmp_path, *damaged)
    restored = checkpoints.restore(str(tmp_path), network(), {})
    assert restored == checkpoints.Restored(str(tmp_path / "ckpt-5"), 5)


def test_only_torn_ones_are_an_error(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 5)
    damage(tmp_path, *CUT_OFF["data that is cut off"])
    with pytest.raises(errors.CheckpointError, match="ckpt-5 is torn and cannot be restored: "):
        checkpoints.Checkpoints(str(tmp_path), network()).restore()


def test_another_networks_checkpoint_is_refused_with_what_differs(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 5)
    objects = network(9)
    objects["weights/dense/kernel"] = tf.Variable(tf.zeros([2]))
    objects["weights/conv/kernel"] = tf.Variable(tf.zeros([4, 4]))
    del objects["state/norm.1/mean"]
    before = values(objects)
    with pytest.raises(errors.CheckpointError) as caught:
        checkpoints.Checkpoints(str(tmp_path), objects).restore()
    assert str(caught.value) == (
        f"{tmp_path}/ckpt-5 is of another network: 1 differ (weights/conv/kernel is float32[3, 4] "
        "there, float32[4, 4] here); 1 are missing in it (weights/dense/kernel); 1 are not in this "
        "network (state/norm.1/mean). Give another --logdir, or the model and params it was "
        "written with"
    )
    np.testing.assert_equal(values(objects), before)


@pytest.mark.parametrize("kept", [0.5, 0.25])
def test_a_scalar_that_all_slices_keep_alike_goes_on_in_other_slices(
    tmp_path: pathlib.Path, kept: float
) -> None:
    slices = {"slots/a/w/product/4 0,1": 0.5, "slots/a/w/product/4 1,3": kept}
    saved_ones = {key: tf.Variable(value) for key, value in slices.items()}
    checkpoints.Checkpoints(str(tmp_path), saved_ones).save(1)
    whole = {"slots/a/w/product": tf.Variable(0.0)}
    saver = checkpoints.Checkpoints(str(tmp_path), whole)
    if kept == 0.5:
        saver.restore()
        assert values(whole) == {"slots/a/w/product": 0.5}
    else:
        with pytest.raises(errors.CheckpointError, match=r"ckpt-1 is of other slices: slots/a/w/"):
            saver.restore()


def test_a_subset_restores_where_slots_are_not_wanted(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 5)
    objects = {k: v for k, v in network().items() if not k.startswith("slots/")}
    assert checkpoints.restore(str(tmp_path), objects, {})
    assert objects["step"].numpy() == 5


def test_matching_restores_what_fits_and_reports_the_rest(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 5)
    objects = {
        "weights/stem/kernel": tf.Variable(tf.zeros([3, 4])),
        "weights/head/kernel": tf.Variable(tf.zeros([3, 4])),
        "state/norm.1/mean": tf.Variable(tf.zeros([8])),
        "step": tf.Variable(0, dtype=tf.int64),
    }
    del objects["step"]
    candidates = {key: [checkpoints.Part(key, tuple(v.shape))] for key, v in objects.items()}
    stem = [checkpoints.Part(f"weights/{name}/kernel", (3, 4)) for name in ("no", "conv")]
    candidates["weights/stem/kernel"] = stem
    matched = checkpoints.restore_matching(objects, str(tmp_path), candidates)
    assert matched.restored == ("weights/stem/kernel",)
    assert matched.missing == ("weights/head/kernel",)
    assert matched.misfits == {
        "state/norm.1/mean": "state/norm.1/mean is float32[4] there, float32[8] here"
    }
    assert objects["weights/stem/kernel"].numpy().max() == 5


def test_a_full_disk_leaves_the_older_ones_and_nothing_else(tmp_path: pathlib.Path) -> None:
    big = tf.Variable(tf.random.stateless_uniform([1 << 18], [1, 2]))
    objects = network(1, big=big)
    saver = checkpoints.Checkpoints(str(tmp_path), objects, "text")
    saver.save(1)
    before = sorted(os.listdir(tmp_path))
    with (
        disks.full(1 << 19),
        pytest.raises(errors.CheckpointError, match=r"cannot be written .*one is .*ckpt-1"),
    ):
        saver.save(2)
    assert sorted(os.listdir(tmp_path)) == before
    assert names(tmp_path) == ["ckpt-1"]
    saver.save(3)
    assert [checkpoints.step_of(p) for p in checkpoints.find(str(tmp_path))] == [1, 3]


def test_an_unwritable_directory_is_reported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CheckpointError, match="cannot be written here: Not a directory"):
        checkpoints.Checkpoints(str(tmp_path / "file" / "logs"), network())


def test_a_folder_without_checkpoints_is_named(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "best", 3)
    with pytest.raises(errors.CheckpointError, match=r"has no whole checkpoint\. Name one"):
        files.at(str(tmp_path))


def test_one_that_is_still_written_is_not_whole(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 2, 3)
    prefix = str(tmp_path / "ckpt-3")
    files.discard([prefix])
    assert names(tmp_path) == ["ckpt-2"]
    with pytest.raises(errors.CheckpointError, match=r"no checkpoint .*ckpt-3; there are .*ckpt-2"):
        files.at(prefix)


# A process per instant, of one that has imported TensorFlow and computed nothing with it.
KILLED_CHILDREN = """
    import os, signal, sys, threading
    import tensorflow as tf
    from lingvo_gpipe.run import checkpoints

    root, *instants = sys.argv[1:]
    children = []
    for instant in instants:
        directory = os.path.join(root, instant)
        child = os.fork()
        if not child:
            break
        children.append(child)
    else:
        for child in children:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        sys.exit()

    variable = tf.Variable(tf.zeros([1 << 20]))
    thread = checkpoints.WriterThread()
    saver = checkpoints.Checkpoints(directory, {"v": variable}, "text", keep=1, thread=thread)
    variable.assign_add(tf.ones_like(variable))
    saver.save(1)
    thread.join()

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(suffix):
        while not any(n.startswith("ckpt-2") and suffix in n for n in os.listdir(directory)):
            pass
        die()

    if instant.startswith("file "):
        threading.Thread(target=wait_for, args=(instant[5:],), daemon=True).start()
    else:
        kind, _, count = instant.partition(" ")
        real, calls = getattr(os, kind), []
        def counted(*args):
            calls.append(args)
            return die() if len(calls) == int(count) else real(*args)
        setattr(os, kind, counted)
    variable.assign_add(tf.ones_like(variable))
    saver.save(2)
    variable.assign_add(tf.ones_like(variable))
    thread.join()
    die()
"""
# Before and within TensorFlow's own writing; before each step that makes it visible; while the
# older one is removed; and after everything.
INSTANTS = {
    "fsync 1": {1},
    "file _temp": {1, 2},
    "fsync 3": {1},
    "replace 1": {1},
    "fsync 5": {2},
    "remove 1": {2},
    "fsync 99": {2},
}


@pytest.mark.slow
def test_a_kill_leaves_a_whole_checkpoint(tmp_path: pathlib.Path) -> None:
    kill_at(tmp_path, ("file _temp", "replace 1", "remove 1"))


@pytest.mark.reliability_full
@pytest.mark.parametrize("instant", INSTANTS)
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(
    tmp_path: pathlib.Path, instant: str
) -> None:
    kill_at(tmp_path, (instant,))


def kill_at(directory: pathlib.Path, instants: tuple[str, ...]) -> None:
    """Kill processes at different instants of their second save, all processes at once."""
    done = programs.run(KILLED_CHILDREN, str(directory), *instants)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(instants), done.stderr
    for instant in instants:
        check_after_kill(directory / instant, instant)


def check_after_kill(directory: pathlib.Path, instant: str) -> None:
    left = shutil.copytree(directory, directory.with_name(f"{instant} left"))
    for path in checkpoints.find(str(left)):
        values = checkpoints.read_value(path, "v")
        assert (values == checkpoints.step_of(path)).all()
    variable = tf.Variable(tf.zeros([1 << 20]))
    saver = checkpoints.Checkpoints(str(directory), {"v": variable}, "text", keep=1)
    restored = saver.restore()
    assert restored
    assert restored.step in INSTANTS[instant], instant
    assert not restored.torn
    assert (variable.numpy() == restored.step).all()
    saver.save(3)
    assert {p.name.partition(".")[0] for p in directory.iterdir()} == {"ckpt-3"}
