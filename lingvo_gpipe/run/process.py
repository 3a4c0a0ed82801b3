"""Devices and threads of a process that runs a network."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.cluster import chief
from lingvo_gpipe.execution import placement


def prepare_devices(model: pipelining.PipeliningLayer.Params) -> None:
    """Make the devices that a network needs, before TensorFlow's first operation.

    Those of workers, where this process is a chief; otherwise logical CPU devices.
    """
    wanted = _num_devices(model)
    workers = chief.current()
    if workers is not None:
        with contextlib.suppress(RuntimeError):
            placement.prepare_threads(wanted, placement.num_cores())
        workers.connect(wanted)
        return
    if model.placement == "tpu" and not tf.config.list_logical_devices("TPU"):
        placement.initialize_tpu()
    if _on_logical_cpus(model):
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < wanted:
            placement.prepare_logical_cpus(wanted)
        # Where TensorFlow is already running, its threads cannot be changed.
        with contextlib.suppress(RuntimeError):
            placement.prepare_threads(wanted, placement.num_cores())


def _num_devices(model: pipelining.PipeliningLayer.Params) -> int:
    # Smaller numbers are refused with the network.
    return max(1, model.num_partitions) * max(1, model.num_replicas)


def _on_logical_cpus(model: pipelining.PipeliningLayer.Params) -> bool:
    accelerated = model.placement == "auto" and tf.config.list_physical_devices("GPU")
    return model.placement in ("auto", "cpu") and model.devices is None and not accelerated
