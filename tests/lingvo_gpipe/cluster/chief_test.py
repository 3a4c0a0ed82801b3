"""A chief, without workers."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import chief, chief_supervisor, members


def test_threads_that_wait_sleep_here_and_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = tuple(f"127.0.0.1:{port}" for port in (2, 3, 4))
    config = members.Cluster("127.0.0.1:1", workers).to_config(members.Member(members.CHIEF))
    monkeypatch.setenv(members.VARIABLE, config)
    monkeypatch.setenv("GRPC_FAIL_FAST", "")  # it is set
    monkeypatch.setattr(tf_context.context(), "_config", None)
    connect = mock.Mock()
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", connect)
    channel = mock.Mock(wait=mock.Mock(return_value=chief_supervisor.GO))
    chief.Chief(channel, None).connect(2)
    assert connect.called
    assert channel.write.call_args_list[-1] == mock.call(chief_supervisor.CONNECTED)
    assert tf_context.context().config.experimental.disable_thread_spinning  # sent to the workers


def test_a_folder_that_a_worker_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "run"
    workers = {"worker 0 (a:1)": "CPU:0", "worker 1 (b:2)": "CPU:1"}
    chief.check_shared(str(folder), workers)
    (folder / ".lingvo_gpipe-shared-left").touch()  # by a chief that was killed
    chief.check_shared(str(folder), workers)
    assert list(folder.iterdir()) == []
    read = tf.io.read_file

    def elsewhere(path: str) -> tf.Tensor:
        is_second = tf.zeros([]).device.endswith("CPU:1")
        return read(path.replace("new", "old") if is_second else path)

    monkeypatch.setattr(tf.io, "read_file", elsewhere)
    with pytest.raises(errors.DeviceError) as caught:
        chief.check_shared(str(folder), workers)
    assert str(caught.value) == (
        f"--logdir={folder}: worker 1 (b:2) does not see what the chief sees there. Name a folder "
        "that all hosts share, by the same path"
    )
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(errors.DeviceError, match=r"cannot be written: Not a directory\. Name"):
        chief.check_shared(str(tmp_path / "file" / "run"), workers)
