"""Devices and threads of a process that runs a network."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.cluster import connection
from lingvo_gpipe.execution import placement


def prepare_devices(model: pipelining.PipeliningLayer.Params) -> tuple[int, int]:
    """Make the devices that a network needs, before TensorFlow's first operation.

    Those of workers, where this process is a chief; otherwise logical CPU devices.

    Args:
        model: the network.

    Returns:
        Thread counts between and inside operations; the last bits of results depend on them.
    """
    # Smaller numbers are refused with the network.
    wanted = max(1, model.num_partitions) * max(1, model.num_replicas)
    kind = model.placement
    workers = connection.current()
    if workers is not None:
        with contextlib.suppress(RuntimeError):
            placement.prepare_threads(wanted, placement.num_cores())
        workers.connect(wanted)
        return _threads()
    if kind == "tpu" and not tf.config.list_logical_devices("TPU"):
        placement.initialize_tpu()
    accelerated = kind == "auto" and tf.config.list_physical_devices("GPU")
    if kind in ("auto", "cpu") and model.devices is None and not accelerated:
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < wanted:
            placement.prepare_logical_cpus(wanted)
        # Where TensorFlow is already running, its threads cannot be changed.
        with contextlib.suppress(RuntimeError):
            placement.prepare_threads(wanted, placement.num_cores())
    return _threads()


def _threads() -> tuple[int, int]:
    return (
        tf.config.threading.get_inter_op_parallelism_threads(),
        tf.config.threading.get_intra_op_parallelism_threads(),
    )
