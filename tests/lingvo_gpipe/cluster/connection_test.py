"""The chief's side of TensorFlow, without workers."""

from __future__ import annotations

from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from lingvo_gpipe.cluster import chief_supervisor, connection, members


@pytest.mark.parametrize(("num_devices", "idle"), [(1, 2), (2, 1), (3, 0), (4, 0)])
def test_workers_without_a_cell_are_counted(
    num_devices: int, idle: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = members.Cluster("127.0.0.1:1", tuple(f"127.0.0.1:{port}" for port in (2, 3, 4)))
    config = cluster.to_config(members.Member(members.CHIEF))
    monkeypatch.setenv(members.VARIABLE, config)
    monkeypatch.setenv("GRPC_FAIL_FAST", "")  # it is set
    connected = mock.Mock()
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", connected)
    channel = mock.Mock(read=mock.Mock(return_value=chief_supervisor.GO))
    monkeypatch.setattr(tf_context.context(), "_config", None)
    connection.Connection(channel).connect(num_devices)
    assert connected.called
    assert tf_context.context().config.experimental.disable_thread_spinning  # sent to the workers
    line = (
        f"{idle} of 3 workers have no cell: raise num_partitions or num_replicas, or name fewer "
        "workers\n"
    )
    assert capsys.readouterr().err == (line if idle else "")
