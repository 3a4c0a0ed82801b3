"""The devices of the cells, chosen from a list of device names.

The choice uses only names, so placements on accelerators can be tested without accelerators.
Logical CPU devices are names, not cores: only the table's control edges make each of them run one
slot at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.network import host_order

KINDS = ("auto", "cpu", "gpu", "tpu")
_WORKER = "/job:worker/"


def place(
    num_devices: int,
    kind: str = "auto",
    names: Sequence[str] | None = None,
    available: Sequence[str] | None = None,
    *,
    num_replicas: int = 1,
) -> tuple[str, ...]:
    """Return device names, as many as the rows of the table of all replicas.

    Where there are workers, their devices are used and no others, in the order of (worker, device).
    Which row has which of them, `network.host_order` chooses.

    Args:
        num_devices: number of rows of the table.
        kind: cpu, gpu, tpu or auto. auto chooses the cores of an initialised TPU system
            (`initialize_tpu`), otherwise GPUs, otherwise CPUs.
        names: device names, one per row and replica, instead of an automatic choice.
        available: names of the devices that exist; None: ask TensorFlow.
        num_replicas: R.

    Raises:
        DeviceError: a kind or name is unknown, or there are too few devices.

    >>> place(2, available=["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"])
    ('/device:GPU:0', '/device:GPU:1')
    """
    if available is None:
        available = [device.name for device in tf.config.list_logical_devices()]
    present = list(map(short, available))
    if kind not in KINDS:
        raise errors.DeviceError(f"unknown placement {kind!r}; {errors.suggestion(kind, KINDS)}")
    wanted = num_replicas * num_devices
    if names is not None:
        return _named(num_devices, num_replicas, names, present)
    workers = list(filter(is_on_worker, present))
    groups = {k: [n for n in workers or present if f":{k.upper()}:" in n] for k in KINDS[1:]}
    if kind == "auto":
        kind = next((k for k in ("tpu", "gpu") if groups[k]), "cpu")
    chosen = sorted(groups[kind], key=_task_and_number)
    if len(chosen) < wanted:
        raise errors.DeviceError(_too_few(num_devices, num_replicas, kind, len(chosen)))
    return tuple(_shared_out(chosen, wanted, kind) if workers else chosen[:wanted])


def is_on_worker(name: str) -> bool:
    """Return whether a device is in the process of a worker.

    >>> is_on_worker("/job:worker/replica:0/task:0/device:CPU:0"), is_on_worker("/device:CPU:0")
    (True, False)
    """
    return _WORKER in name


def workers(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each device's worker; 0 for those of a process without workers.

    >>> workers(["/job:worker/replica:0/task:2/device:CPU:1", "/device:CPU:3"])
    (2, 0)
    """
    return tuple(_task_and_number(name)[0] if is_on_worker(name) else 0 for name in names)


def _task_and_number(name: str) -> tuple[int, int]:
    """Return by what devices are sorted: number of the worker, number of the device there."""
    spec = tf.DeviceSpec.from_string(name)
    return spec.task or 0, spec.device_index or 0


def _shared_out(names: Sequence[str], num_devices: int, kind: str) -> list[str]:
    """Return devices of workers in equal shares, neighbours on one.

    A worker has as many CPU devices as it is asked for, but accelerators only as it has them.

    >>> worker = "/job:worker/task:{}/device:CPU:{}".format
    >>> _shared_out([worker(0, 0), worker(0, 1), worker(1, 0), worker(1, 1)], 3, "cpu")[1:]
    ['/job:worker/task:0/device:CPU:1', '/job:worker/task:1/device:CPU:0']
    """
    of_worker: dict[int, list[str]] = {}
    for name in names:
        of_worker.setdefault(_task_and_number(name)[0], []).append(name)
    queues = list(of_worker.values())
    counts: Sequence[int] = list(map(len, queues))
    if kind != "cpu":
        counts = host_order.first_with_enough(num_devices, counts)
    return [queues[n].pop(0) for n in host_order.share_out(num_devices, counts)]


def short(name: str) -> str:
    """Return a device's name without the job, replica and task of the local process.

    >>> short("/job:localhost/replica:0/task:0/device:CPU:1"), short("gpu:0")
    ('/device:CPU:1', '/device:GPU:0')
    """
    name = name.removeprefix("/job:localhost/replica:0/task:0")
    alone = re.fullmatch(r"/?(device:)?(\w+):(\d+)", name)
    return f"/device:{alone[2].upper()}:{alone[3]}" if alone else name


def _named(
    num_devices: int, num_replicas: int, names: Sequence[str], present: Sequence[str]
) -> tuple[str, ...]:
    if len(names) != num_replicas * num_devices:
        raise errors.DeviceError(
            f"{len(names)} devices are named for {_needed(num_devices, num_replicas)}. Name one "
            f"per partition{'' if num_replicas == 1 else ' and replica'}"
        )
    for name in names:
        if short(name) not in present:
            raise errors.DeviceError(
                f"there is no device {name!r}; {errors.suggestion(name, present)}. "
                "tf.config.list_logical_devices() lists them"
            )
    return tuple(map(short, names))


def _needed(num_devices: int, num_replicas: int) -> str:
    """Return what needs devices, as text.

    >>> _needed(4, 1), _needed(4, 2)
    ('4 partitions', '2 replicas of 4 partitions')
    """
    partitions = f"{num_devices} partitions"
    return partitions if num_replicas == 1 else f"{num_replicas} replicas of {partitions}"


def _too_few(num_devices: int, num_replicas: int, kind: str, count: int) -> str:
    wanted = num_replicas * num_devices
    lower = "num_partitions" if num_replicas == 1 else "num_replicas or num_partitions"
    way_out = {
        "cpu": f"Call lingvo_gpipe.prepare_logical_cpus({wanted}) before TensorFlow's first "
        "operation",
        "gpu": f"Lower {lower}, or split a GPU into virtual ones by "
        "tf.config.set_logical_device_configuration, or use placement='cpu'",
        "tpu": f"Lower {lower}, or use placement='cpu'",
    }
    return (
        f"{_needed(num_devices, num_replicas)} need {wanted} {kind.upper()} devices, but there "
        f"{'is' if count == 1 else 'are'} {count}. {way_out[kind]}"
    )


def prepare_logical_cpus(count: int) -> None:
    """Configure TensorFlow with at least `count` logical CPU devices.

    Call it before TensorFlow's first operation, such as the first variable of a Keras model.

    Raises:
        DeviceError: TensorFlow was already initialised with fewer devices.
    """
    physical = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(physical) or ()) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(
            physical, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except (RuntimeError, ValueError) as error:
        present = len(tf.config.list_logical_devices("CPU"))
        if present < count:
            raise errors.DeviceError(
                f"{count} logical CPU devices are needed, but TensorFlow was initialised with "
                f"{present}. Call lingvo_gpipe.prepare_logical_cpus({count}) before its first "
                "operation, in task() of a recipe before it builds a Keras model"
            ) from error


def num_cores() -> int:
    """Return the number of cores on which this process may run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return cores or os.cpu_count() or 1


def thread_counts(num_devices: int, cores: int) -> tuple[int, int]:
    """Return the thread counts with which cells on logical CPUs share the cores fairly.

    If there are as many devices as cores, an operation uses one thread, because devices run at the
    same time. At least two threads run operations, so that a cell that waits for another never
    blocks the only thread.

    Returns:
        (inter-op, intra-op) thread counts; the sums of some kernels depend on them.

    >>> thread_counts(num_devices=4, cores=16)
    (4, 4)
    """
    return max(2, min(num_devices, cores)), max(1, cores // num_devices)


def prepare_threads(num_devices: int, cores: int) -> tuple[int, int]:
    """Set TensorFlow's thread counts to those of `thread_counts`, and return them.

    Raises:
        RuntimeError: TensorFlow is initialised, with other counts.
    """
    counts = thread_counts(num_devices, cores)
    tf.config.threading.set_inter_op_parallelism_threads(counts[0])
    tf.config.threading.set_intra_op_parallelism_threads(counts[1])
    return counts


def initialize_tpu(address: str = "local") -> None:
    """Connect to a TPU system and initialise it, before cells are placed on its cores.

    The trainer calls it for `placement='tpu'`; any other program must call it first.

    Args:
        address: address of the TPU system; "local": that of this machine.

    Raises:
        DeviceError: no TPU answers at the address.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as error:
        raise errors.DeviceError(
            f"no TPU system answers at {address!r}: {str(error).splitlines()[0]}. Check the "
            "address, or use placement='gpu' or 'cpu'"
        ) from error
