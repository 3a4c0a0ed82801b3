"""The chief: it connects TensorFlow to the workers, whose devices it can name from then on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.cluster import chief_supervisor, child, members

LOST_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)
"""What TensorFlow raises for a worker that is gone."""
_SHARED = ".lingvo_gpipe-shared-"  # how the name of a file begins that workers are asked for


class Chief:
    """This process as a chief, connected to its supervisor and, by TensorFlow, to its workers."""

    def __init__(self, channel: child.Channel, folder: str | None) -> None:
        self._channel = channel
        self._folder = folder
        self._is_connected = False

    def connect(self, num_devices: int) -> None:
        """Wait until the workers serve, and connect; the second call does nothing.

        Args:
            num_devices: number of devices that the network needs; CPUs are shared out evenly.

        Raises:
            DeviceError: a worker does not see the folder of the run.
        """
        if self._is_connected:
            return
        self._is_connected = True
        cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
        workers = cluster.num_tasks("worker")
        needs = {
            "devices": -(-num_devices // workers),
            "packages": hyperparams.registered_packages(),
        }
        self._channel.write(chief_supervisor.NEEDS + json.dumps(needs))
        if self._channel.wait() != chief_supervisor.GO:
            os._exit(child.START_AGAIN)  # without its supervisor nobody would end it
        os.environ["GRPC_FAIL_FAST"] = "true"  # the supervisor knows that they are there
        _without_spinning()
        tf.config.experimental_connect_to_cluster(
            cluster, job_name=members.CHIEF, task_index=0, protocol="grpc"
        )
        tf.config.list_logical_devices()
        self._channel.write(chief_supervisor.CONNECTED)
        if self._folder is not None:
            names = [f"worker {i} ({cluster.task_address('worker', i)})" for i in range(workers)]
            devices = [f"/job:worker/task:{i}/device:CPU:0" for i in range(workers)]
            check_shared(self._folder, dict(zip(names, devices, strict=True)))

    def note_step(self, step: int) -> None:
        """Note that an update begins."""
        self._channel.write(f"{chief_supervisor.STEP}{step}")


def check_shared(folder: str, workers: Mapping[str, str]) -> None:
    """Check that all workers see the folder of a run, by a file that is made in it meanwhile.

    Args:
        folder: the run's; made if it is not there.
        workers: name for messages → a device of the worker's process.

    Raises:
        DeviceError: one does not.
    """
    way_out = "Name a folder that all hosts share, by the same path"
    try:
        os.makedirs(folder, exist_ok=True)
        for left in Path(folder).glob(f"{_SHARED}*"):  # by a chief that was killed
            left.unlink(missing_ok=True)
        mark = tempfile.NamedTemporaryFile(prefix=_SHARED, dir=folder)  # noqa: SIM115
    except OSError as error:
        raise errors.DeviceError(
            f"--logdir={folder} cannot be written: {error.strerror}. {way_out}"
        ) from error
    with mark:
        for name, device in workers.items():
            try:
                with tf.device(device):
                    tf.io.read_file(os.path.join(folder, os.path.basename(mark.name))).numpy()
            except tf.errors.NotFoundError as error:
                raise errors.DeviceError(
                    f"--logdir={folder}: {name} does not see what the chief sees there. {way_out}"
                ) from error


def _without_spinning() -> None:
    """Let threads that wait sleep at once, here and in the workers; nothing once TensorFlow began.

    The settings of this process rule there, too. A thread that spins takes its worker's core from
    the cells. TensorFlow's option for this has no public interface.
    """
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context as tf_context

    context = tf_context.context()
    config = config_pb2.ConfigProto()
    if context._config is not None:
        config.CopyFrom(context._config)
    config.experimental.disable_thread_spinning = True
    context._config = config


_current: Chief | None = None


def make_current(channel: child.Channel, folder: str | None) -> Chief:
    """Make this process, which a supervisor has started, a chief.

    Args:
        channel: to the supervisor.
        folder: of the run, which all hosts must share; None: there is none.
    """
    global _current
    _current = Chief(channel, folder)
    return _current


def current() -> Chief | None:
    """Return this process as a chief; None: it has no workers."""
    return _current


def lost_a_worker(error: BaseException) -> bool:
    """Return whether an error may come from the loss of a worker, so that a new start may help."""
    if isinstance(error, errors.StepError) and error.micro_batch is not None:
        return False  # its slot fails by itself
    return was_caused_by(error, LOST_ERRORS) or isinstance(error, errors.StepError)


def was_caused_by(
    error: BaseException, kinds: type[BaseException] | tuple[type[BaseException], ...]
) -> bool:
    """Return whether an error, or one in whose handling it was raised, is one of these kinds."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
