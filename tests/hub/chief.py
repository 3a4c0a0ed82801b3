"""A chief that trains a network of large weights, and counts the bytes of its own sockets.

`python -m tests.hub.chief FOLDER [ADDRESSES]` prints one line of JSON. Without addresses of
workers, the same network runs on two logical devices of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, layers, optim, packing, pipelining, task
from lingvo_gpipe.execution import outer_function, variables
from lingvo_gpipe.input import InMemory
from lingvo_gpipe.run import checkpoints, learner
from tests.hub import reading
from tests.hub.worker import end_with_parent

UNITS = 1024
WEIGHT_BYTES = 4 * UNITS**2
"""Bytes of each of the matrices."""
_TCP_INFO = 11
_BYTES_ACKED = 120  # offset in struct tcp_info; bytes_received follows


class Tokens(InMemory):
    """Never read: mini-batches are given."""


def params(devices: tuple[str, ...]) -> Any:
    """Return a task with a tied weight, statistics, dropout, slots and averages."""
    return task.Task.Params(
        model=pipelining.PipeliningLayer.Params(
            layers=[
                layers.Embedding.Params(
                    name="emb", vocabulary=UNITS, units=UNITS, reads=("ids",), writes=("x",)
                ),
                layers.Dense.Params(name="d0", units=UNITS, activation="tanh"),
                layers.BatchNorm.Params(name="norm", momentum=0.8),
                layers.Dropout.Params(name="drop", rate=0.25),
                layers.Dense.Params(name="d1", units=UNITS, activation="tanh"),
                layers.SequenceSoftmax.Params(
                    name="head",
                    vocabulary=UNITS,
                    reads=("x", "label", "real"),
                    tie={"kernel": "emb/table"},
                ),
            ],
            num_partitions=2,
            num_micro_batches=2,
            devices=devices,
            schedule="1f1b",
            seed=3,
        ),
        input=Tokens.Params(batch_size=4),
        train=task.Train(
            optimizer=optim.Optimizer.Params(name="Adam", learning_rate=0.002),
            average=optim.Average.Params(decay=0.9),
            clip_norm=1.0,
            max_steps=1,
        ),
    )


def fields(number: int) -> dict[str, tf.Tensor]:
    """Return a mini-batch of four sequences of three tokens."""

    def ids(seed: int) -> tf.Tensor:
        return tf.random.stateless_uniform([4, 3], [number, seed], 0, UNITS, tf.int32)

    return {"ids": ids(1), "label": ids(2), "real": tf.ones([4, 3])}


def field_bytes(batch: Mapping[str, tf.Tensor]) -> int:
    """Return the bytes of a mini-batch."""
    return sum(value.dtype.size * value.shape.num_elements() for value in batch.values())


def socket_bytes() -> tuple[int, int]:
    """Return the bytes that this process's TCP connections have sent and received."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = own.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            acked, arrived = struct.unpack_from("<QQ", info, _BYTES_ACKED)
            sent, received = sent + acked, received + arrived
    return sent, received


class Traffic:
    """The bytes that operations of this process send and receive.

    Attributes:
        by_name: name of an operation → bytes sent, bytes received.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.by_name: dict[str, tuple[int, int]] = {}
        self._devices = devices

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the bytes of the `with` block; work that it left on the devices is included."""
        self._wait()
        before = socket_bytes()
        yield
        self._wait()
        after = socket_bytes()
        self.by_name[name] = (after[0] - before[0], after[1] - before[1])

    def _wait(self) -> None:
        for device in self._devices:
            with tf.device(device):
                tf.zeros([]).numpy()


def connect(addresses: list[str]) -> tuple[str, ...]:
    """Connect to the workers; return the first device of each."""
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({"worker": addresses}), job_name="chief", task_index=0, protocol="grpc"
    )
    return tuple(f"/job:worker/replica:0/task:{n}/device:CPU:0" for n in range(len(addresses)))


def _damaged(folder: str) -> str:
    """Return a copy of the newest checkpoint with zeros in its values."""
    copy = shutil.copytree(folder, os.path.join(folder, "damaged"))
    for name in os.listdir(copy):
        if ".data-" in name:
            with open(os.path.join(copy, name), "r+b") as file:
                file.write(bytes(os.path.getsize(file.name)))
    return copy


def counted(lines: list[str]) -> list[str]:
    """Return what a line of progress says after the device's name."""
    return [line.partition("): ")[2] for line in lines[1:]]


def main(folder: str, addresses: str = "") -> None:
    """Train, evaluate, save and restore; print what was found."""
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if addresses:
        devices = connect(json.loads(addresses))
    else:
        physical = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            physical, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        devices = ("/device:CPU:0", "/device:CPU:1")
    traffic = Traffic(devices)
    batches = [fields(number) for number in range(8)]
    found: dict[str, Any] = {"losses": []}

    with traffic.of("build"):
        made = learner.Learner(params(devices), batches[0])
    pipe, updater = made.pipe, made.updater
    progress = pipe.executor.follow_progress()
    for number, name in ((0, "first update"), (1, "update")):
        with traffic.of(name):
            result = made.update([batches[number]])
            found["losses"].append(float(result.loss).hex())
    for number, name in ((2, "first accumulated update"), (4, "accumulated update")):
        with traffic.of(name):
            result = made.update(batches[number : number + 2])
            found["losses"].append(float(result.loss).hex())
    for name in ("first evaluation of averages", "evaluation of averages"):
        with traffic.of(name), updater.averaged():
            found["losses"].append(float(pipe.evaluate(batches[6]).loss).hex())
    for name in ("first evaluation with outputs", "evaluation with outputs"):
        with traffic.of(name):
            evaluated = pipe.evaluate(batches[6], outputs=True)
            found["losses"].append(float(evaluated.loss).hex())
    found["counted after an evaluation"] = counted(progress.lines())
    for name in ("first gradients", "gradients"):
        with traffic.of(name):
            gradients = pipe.value_and_gradients(batches[6]).gradients
    found["counted after a step"] = counted(progress.lines())
    with traffic.of("gradients that an outer function copies"):
        copying = outer_function.OuterFunction(
            lambda batch: pipe.value_and_gradients(batch).gradients, assigns=True
        )
        copying(batches[6])
    for name in ("first gradients of a tape", "gradients of a tape"):
        with traffic.of(name):
            with tf.GradientTape() as tape:
                theta = pipe.theta()
                tape.watch(theta)
                outputs = pipe.fprop(theta, batches[6], pipe.context(training=True))
                loss = tf.reduce_sum(outputs)
            taped = variables.flatten(tape.gradient(loss, theta))
            del tape
    found["devices"] = {
        "outputs": [value.device for value in tf.nest.flatten(evaluated.outputs)],
        "gradients": {path: value.device for path, value in gradients.items()},
        "tape": {path: value.device for path, value in taped.items()},
        "weights": {path: variable.device for path, variable in pipe.weights.items()},
    }
    del gradients, taped
    thread = checkpoints.WriterThread()
    kept = checkpoints.Checkpoints(folder, made.variables, "class: x\n", thread=thread)
    with traffic.of("save"):
        kept.save(6)
        thread.join()
    with traffic.of("restore"):
        kept.restore()
    with traffic.of("restore matching"):
        names = {
            path: [checkpoints.Part(f"variables/{path}", tuple(variable.shape))]
            for path, variable in pipe.by_path.items()
        }
        matched = checkpoints.restore_matching(pipe.by_path, folder, names)
    found["matched"] = sorted(matched.restored)
    with contextlib.suppress(errors.CheckpointError):
        only = {"d0/kernel": names["d0/kernel"]}
        checkpoints.restore_matching(pipe.by_path, _damaged(folder), only)
        found["matched"] = "damaged values"
    with traffic.of("reset to weights"):
        made.reset_to_weights()
    for name in ("first diagnosis of finite values", "diagnosis of finite values"):
        with traffic.of(name):
            found["finite"] = pipe.first_nonfinite(batches[6])
    pipe.by_path["d1/bias"].assign([float("inf")] * UNITS)
    with traffic.of("diagnosis"):
        found["not finite"] = pipe.first_nonfinite(batches[6])
    with traffic.of("explanation"):
        cause = tf.errors.InternalError(None, None, "none")
        found["cause"] = str(pipe.explain(cause, batches[6]))
    last = os.path.join(folder, "last")
    kept = checkpoints.Checkpoints(last, made.variables, "class: x\n", thread=thread)
    kept.save(7)
    made.update([batches[6]])  # changes the values while those before are written
    thread.close()
    found["traffic"] = traffic.by_name
    for name, num_replicas in (("read", 1), ("read in parts", 2)):
        traffic = Traffic(devices)
        found[name] = reading.run(devices, traffic.of, num_replicas)
        found[f"traffic of {name}"] = traffic.by_name
    found["variables"] = len(made.variables)
    found["packs"] = len({packing.unit(v) for v in made.variables.values()})
    found["field bytes"] = field_bytes(batches[0])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
