"""The chief's side of TensorFlow, without workers."""

from __future__ import annotations

from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import chief_supervisor, connection, members

WORKERS = tuple(f"127.0.0.1:{port}" for port in (2, 3, 4))
CLUSTER = members.Cluster("127.0.0.1:1", WORKERS)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Replace TensorFlow's call that connects."""
    config = CLUSTER.to_config(members.Member(members.CHIEF))
    monkeypatch.setenv(members.VARIABLE, config)
    monkeypatch.setenv("GRPC_FAIL_FAST", "")  # it is set
    monkeypatch.setattr(tf_context.context(), "_config", None)
    made = mock.Mock()
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", made)
    return made


def supervisor_s_channel() -> mock.Mock:
    return mock.Mock(read=mock.Mock(return_value=chief_supervisor.GO))


@pytest.mark.parametrize(("num_devices", "idle"), [(1, 2), (2, 1), (3, 0), (4, 0)])
def test_workers_without_a_cell_are_counted(
    num_devices: int, idle: int, connected: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = supervisor_s_channel()
    connection.Connection(channel).connect(num_devices)
    assert connected.called
    assert channel.write.call_args_list[-1] == mock.call(chief_supervisor.CONNECTED)
    assert tf_context.context().config.experimental.disable_thread_spinning  # sent to the workers
    line = (
        f"{idle} of 3 workers have no cell: raise num_partitions or num_replicas, or name fewer "
        "workers\n"
    )
    assert capsys.readouterr().err == (line if idle else "")


def test_a_chief_s_port_that_another_program_took_is_named(connected: mock.Mock) -> None:
    channel = supervisor_s_channel()
    connected.side_effect = tf.errors.UnknownError(None, None, "Could not start gRPC server")
    with pytest.raises(errors.DeviceError, match="the chief cannot listen at port 1: another pro"):
        connection.Connection(channel).connect(3)
    assert mock.call(chief_supervisor.CONNECTED) not in channel.write.call_args_list
