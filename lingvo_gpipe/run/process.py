"""Devices, threads and memory of a process that runs a network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from lingvo_gpipe import errors, pipelining, task
from lingvo_gpipe.cluster import connection
from lingvo_gpipe.execution import placement
from lingvo_gpipe.input import Input
from lingvo_gpipe.plan import host_memory, machine_memory
from lingvo_gpipe.run import checkpoints, log_directory
from lingvo_gpipe.run.checkpoints import keys


def prepare_devices(
    model: pipelining.PipeliningLayer.Params, folder: Path | None = None
) -> tuple[int, int]:
    """Make the devices that a network needs, before TensorFlow's first operation.

    Those of workers, where this process is a chief; otherwise logical CPU devices.

    Args:
        model: the network.
        folder: of a run that goes on, perhaps: if its recipe began TensorFlow, and this process has
            taken the params from the folder, the thread counts are those that it began with.

    Returns:
        Thread counts between and inside operations; the last bits of results depend on them.
    """
    wanted = _num_devices(model)
    workers = connection.current()
    if workers is not None:
        with contextlib.suppress(RuntimeError):
            placement.prepare_threads(wanted, placement.num_cores())
        workers.connect(wanted)
        return _threads()
    if model.placement == "tpu" and not tf.config.list_logical_devices("TPU"):
        placement.initialize_tpu()
    if _on_logical_cpus(model):
        cpu = tf.config.list_physical_devices("CPU")[0]
        if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < wanted:
            placement.prepare_logical_cpus(wanted)
        # Where TensorFlow is already running, its threads cannot be changed.
        with contextlib.suppress(RuntimeError):
            if folder is not None and _recipe_began_tensorflow(model, folder):
                placement.set_threads(placement.spare_thread_counts(placement.num_cores()))
            else:
                placement.prepare_threads(wanted, placement.num_cores())
    return _threads()


def check_memory(
    params: task.Task.Params, source: Input, report: Callable[[str], None], *, refuse: bool
) -> None:
    """Report that a step may not fit into the memory of this machine.

    Args:
        params: of the task.
        source: its input.
        report: receives the line.
        refuse: as in `host_memory.warning`.

    Raises:
        DeviceError: it cannot fit.
    """
    if connection.current() is not None or not _on_logical_cpus(params.model):
        return
    fields, memory = source.element_spec(training=True), machine_memory.of_this_machine()
    line = host_memory.warning(params, fields, memory, refuse=refuse)
    if line is not None:
        report(line)


def thread_notes(model: pipelining.PipeliningLayer.Params) -> Iterator[str]:
    """Yield a line if a recipe has begun TensorFlow with other threads than its devices need."""
    if connection.current() is not None or not _on_logical_cpus(model):
        return
    wanted, there = _num_devices(model), _threads()
    fitting = placement.thread_counts(wanted, placement.num_cores())
    if there != fitting:
        flags = f"--num_partitions={model.num_partitions}"
        if model.num_replicas > 1:
            flags += f" --num_replicas={model.num_replicas}"
        yield (
            "the recipe began TensorFlow before the number of devices was known: thread counts "
            f"(between, inside operations) are {there[0]}, {there[1]}, not {fitting[0]}, "
            f"{fitting[1]}, with which {wanted} devices share the cores. The trainer sets these "
            f"with {flags}"
        )


def _recipe_began_tensorflow(model: pipelining.PipeliningLayer.Params, folder: Path) -> bool:
    """Return whether a run on as many devices has the thread counts of a recipe that does."""
    values = log_directory.kept_values(folder) or {}
    numbers = ("num_partitions", "num_replicas")
    if any(values.get(f"model.{name}") != str(model.get(name)) for name in numbers):
        return False
    with contextlib.suppress(errors.CheckpointError):  # reported when it is restored
        newest = checkpoints.newest(str(folder / log_directory.CHECKPOINTS))
        if newest is not None:
            threads = checkpoints.read_value(newest, keys.THREADS)
            return tuple(threads) == placement.spare_thread_counts(placement.num_cores())
    return False


def _num_devices(model: pipelining.PipeliningLayer.Params) -> int:
    # Smaller numbers are refused with the network.
    return max(1, model.num_partitions) * max(1, model.num_replicas)


def _on_logical_cpus(model: pipelining.PipeliningLayer.Params) -> bool:
    accelerated = model.placement == "auto" and tf.config.list_physical_devices("GPU")
    return model.placement in ("auto", "cpu") and model.devices is None and not accelerated


def _threads() -> tuple[int, int]:
    return (
        tf.config.threading.get_inter_op_parallelism_threads(),
        tf.config.threading.get_intra_op_parallelism_threads(),
    )
