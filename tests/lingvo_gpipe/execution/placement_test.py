"""Placement by device names, without accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.execution import placement
from lingvo_gpipe.plan import hosts

CPUS = [f"/device:CPU:{n}" for n in range(3)]
GPUS = [f"/device:GPU:{n}" for n in (1, 0, 2)]  # as TensorFlow may list them
TPUS = [f"/device:TPU:{n}" for n in (0, 10, 2, 1)]
SYSTEM = "/device:TPU_SYSTEM:0"


@pytest.mark.parametrize(
    ("available", "chosen"),
    [
        (CPUS, ("/device:CPU:0", "/device:CPU:1")),
        (CPUS + GPUS, ("/device:GPU:0", "/device:GPU:1")),
        ([*CPUS, *GPUS, SYSTEM, *TPUS], ("/device:TPU:0", "/device:TPU:1")),
        ([*CPUS, SYSTEM], ("/device:CPU:0", "/device:CPU:1")),
    ],
)
def test_auto_takes_tpu_cores_then_gpus_then_cpus(
    available: list[str], chosen: tuple[str, ...]
) -> None:
    assert placement.place(2, available=available) == chosen


@pytest.mark.parametrize(("kind", "there"), [("gpu", 4), ("tpu", 4), ("cpu", 4)])
def test_replicas_have_devices_of_their_own(kind: str, there: int) -> None:
    """K = 2 devices for each of R = 2 replicas, one replica after the other."""
    available = [f"/device:{k}:{n}" for k in ("CPU", "GPU", "TPU") for n in range(there)]
    found = placement.place(2, kind, available=available, num_replicas=2)
    assert found == tuple(f"/device:{kind.upper()}:{n}" for n in range(4))
    named = [f"/device:{kind.upper()}:{n}" for n in (3, 1, 2, 0)]
    assert placement.place(2, names=named, available=available, num_replicas=2) == tuple(named)
    with pytest.raises(errors.DeviceError, match="3 replicas of 2 partitions need 6"):
        placement.place(2, kind, available=available, num_replicas=3)


def test_devices_are_ordered_by_number_not_by_text() -> None:
    found = placement.place(4, "tpu", available=TPUS)
    assert [name.rsplit(":", 1)[1] for name in found] == ["0", "1", "2", "10"]


@pytest.mark.parametrize(
    ("wanted", "kind", "available", "text"),
    [
        (
            4,
            "auto",
            CPUS,
            "4 partitions need 4 CPU devices, but there are 3. Call lingvo_gpipe."
            "prepare_logical_cpus(4) before TensorFlow's first operation",
        ),
        (
            4,
            "auto",
            CPUS + GPUS,
            "4 partitions need 4 GPU devices, but there are 3. Lower num_partitions, or split a "
            "GPU into virtual ones by tf.config.set_logical_device_configuration, or use "
            "placement='cpu'",
        ),
        (
            5,
            "tpu",
            CPUS + TPUS,
            "5 partitions need 5 TPU devices, but there are 4. Lower num_partitions, or use "
            "placement='cpu'",
        ),
        (
            1,
            "gpus",
            CPUS,
            "unknown placement 'gpus'; nearest 'gpu'",
        ),
    ],
)
def test_too_few_devices_are_reported(
    wanted: int, kind: str, available: list[str], text: str
) -> None:
    with pytest.raises(errors.DeviceError) as error:
        placement.place(wanted, kind, available=available)
    assert str(error.value) == text


def test_devices_by_name_are_taken_unchanged() -> None:
    names = ["/job:localhost/replica:0/task:0/device:GPU:2", "/device:CPU:1", "/device:GPU:2"]
    found = placement.place(3, names=names, available=CPUS + GPUS)
    assert found == ("/device:GPU:2", "/device:CPU:1", "/device:GPU:2")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["/device:GPU:0", "/device:GPU:7"],
            "there is no device '/device:GPU:7'; nearest '/device:GPU:0', '/device:GPU:1', "
            "'/device:GPU:2'. tf.config.list_logical_devices() lists them",
        ),
        (["/device:GPU:0"], "1 devices are named for 2 partitions. Name one per partition"),
    ],
)
def test_wrong_device_names_are_reported(names: list[str], text: str) -> None:
    with pytest.raises(errors.DeviceError) as error:
        placement.place(2, names=names, available=GPUS)
    assert str(error.value) == text


@pytest.mark.parametrize("name", ["gpu:1", "GPU:1", "/gpu:1", "/GPU:1", "/device:gpu:1"])
def test_devices_may_be_named_as_in_tf_device(name: str) -> None:
    with tf.device(name):  # which takes it
        pass
    assert placement.place(1, names=[name], available=GPUS) == ("/device:GPU:1",)


def test_names_of_other_tasks_keep_them() -> None:
    remote = "/job:worker/replica:0/task:1/device:CPU:0"
    assert placement.short(remote) == remote


def of_workers(kind: str, counts: Sequence[int]) -> list[str]:
    """Return the devices of workers with these numbers of them, last ones first."""
    name = "/job:worker/replica:0/task:{}/device:{}:{}".format
    return [name(task, kind, n) for task, count in enumerate(counts) for n in range(count)][::-1]


@pytest.mark.parametrize(
    ("counts", "wanted", "shares"),
    [
        ((4, 4), 6, (0, 0, 0, 1, 1, 1)),
        ((8, 8), 4, (0, 0, 0, 0)),
        ((6, 6, 6), 8, (0, 0, 0, 0, 1, 1, 1, 1)),
        ((1, 3), 4, (0, 1, 1, 1)),
        ((1, 5, 1), 6, (0, 1, 1, 1, 1, 1)),
        ((2, 0, 2), 3, (0, 0, 2)),
    ],
)
def test_gpus_of_the_first_workers_that_have_enough_are_shared_out(
    counts: tuple[int, ...], wanted: int, shares: tuple[int, ...]
) -> None:
    available = [*of_workers("CPU", [1] * len(counts)), *of_workers("GPU", counts), *GPUS]
    found = placement.place(wanted, available=available)
    assert placement.workers(found) == shares
    assert len(set(found)) == wanted
    with pytest.raises(errors.DeviceError, match="need 9 GPU devices, but there"):
        placement.place(9, available=of_workers("GPU", (4, 4)))


@pytest.mark.parametrize("there", [1, 2, 3, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_a_run_uses_the_hosts_that_its_plan_shows(num_workers: int, there: int) -> None:
    for wanted in range(1, num_workers * there + 1):
        gpus = placement.place(wanted, available=of_workers("GPU", [there] * num_workers))
        shape = f"{num_workers}x{there}"
        assert placement.workers(gpus) == hosts.parse(shape).place(wanted)
        # Workers have as many CPU devices as the chief asks them for.
        asked = -(-wanted // num_workers)
        cpus = placement.place(wanted, available=of_workers("CPU", [asked] * num_workers))
        assert placement.workers(cpus) == hosts.parse(f"{num_workers}").place(wanted)


def test_devices_that_were_requested_before_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which TensorFlow is not initialised: the number can still change."""
    asked: list[Any] = []
    config = tf.config
    monkeypatch.setattr(
        config, "get_logical_device_configuration", lambda _: asked[-1] if asked else None
    )
    monkeypatch.setattr(
        config, "set_logical_device_configuration", lambda _, devices: asked.append(devices)
    )
    for count in (3, 2, 4, 1):
        placement.prepare_logical_cpus(count)
    assert list(map(len, asked)) == [3, 4]


def test_logical_cpus_cannot_grow_once_tensorflow_has_begun() -> None:
    there = len(tf.config.list_logical_devices("CPU"))
    placement.prepare_logical_cpus(there)
    with pytest.raises(errors.DeviceError) as error:
        placement.prepare_logical_cpus(there + 1)
    assert str(error.value) == (
        f"{there + 1} logical CPU devices are needed, but TensorFlow was initialised with {there}. "
        f"Call lingvo_gpipe.prepare_logical_cpus({there + 1}) before its first operation, in "
        "task() of a recipe before it builds a Keras model"
    )
