"""The process of a worker: it serves its devices to one chief, and reads data for it.

`python -m lingvo_gpipe.run.worker`, started by a supervisor. It imports TensorFlow at once, waits
for the supervisor's line with the cluster, opens its port, and ends with its supervisor.

Beside TensorFlow's own server, it has a Python function that the chief calls by an operation on the
worker's device and that reads a mini-batch. What the function returns stays here until an operation
reads it elsewhere. (A `tf.numpy_function` would run in the process that calls, whatever its
device.) A request is a JSON object, and so is the first value of each answer:

    {"kind": "training", "loop": 3, "input": "class: …", "seed": 1, "position": 20,
     "fields": {"image": "float32"}, …}       reads a mini-batch, whose fields are the other values
            → {"host": "node17", "end": false, "counts": {"replaced": 0}, "is_cut": false}
    what could not be done
            → {"host": "node17", "error": {"kind": "InputError", "text": "…"}}, and empty fields
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.cluster import child, worker_supervisor
from lingvo_gpipe.execution import placement
from lingvo_gpipe.input import Input, Reading
from lingvo_gpipe.input.reading import CutOut
from lingvo_gpipe.network.parts import ReplicaPart

TOKEN = "pyfunc_0"
"""TensorFlow's name of the first function that a process registers; a worker registers no other."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Mini-batches in the middle of being read.

    Attributes:
        loop: number of the chief's loop that reads them.
        reading: the mini-batches, for their counts.
        batches: those that are left.
    """

    loop: int
    reading: Reading
    batches: Iterator[Mapping[str, Any]]


class Requests:
    """Answers requests, one at a time, on whichever threads of TensorFlow they arrive."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._lock = threading.Lock()
        self._source: tuple[str, Input] | None = None
        self._readers: dict[tuple[str, int], _Reader] = {}

    def __call__(self, request: bytes) -> list[Any]:
        """Answer a request; raises nothing but what ends the process.

        Returns:
            The answer as JSON, then for "read" an array for each field: empty ones after the last
            mini-batch, and after an error.
        """
        asked = json.loads(request)
        answer: dict[str, Any] = {"host": socket.gethostname()}
        arrays: list[np.ndarray[Any, Any]] = []
        with self._lock:
            try:
                reading, arrays = self._read(asked)
                answer |= {"end": not arrays, "is_cut": reading.is_cut}
                answer |= {"counts": dict(reading.counts)}
            except Exception as error:  # noqa: BLE001 - it is the chief's to raise.
                answer["error"] = _described(error)
        if not arrays:
            dtypes = map(tf.dtypes.as_dtype, asked.get("fields", {}).values())
            arrays = [np.zeros([0], dtype.as_numpy_dtype) for dtype in dtypes]
        return [json.dumps(answer).encode(), *arrays]

    def _read(self, asked: Mapping[str, Any]) -> tuple[Reading, list[np.ndarray[Any, Any]]]:
        """Return what is read, and the fields of its next mini-batch; none at its end."""
        key = asked["kind"], asked["part"]["replica"] if asked["part"] else 0
        reader = self._readers.get(key)
        if reader is None or reader.loop < asked["loop"]:
            reading = self._begin(asked)
            reader = self._readers[key] = _Reader(asked["loop"], reading, iter(reading))
        if reader.loop > asked["loop"]:
            raise errors.InputError(
                f"the mini-batches of {asked['kind']} were begun again meanwhile. Read them in one "
                "loop at a time"
            )
        batch = next(reader.batches, None)
        if batch is None:
            return reader.reading, []
        return reader.reading, [np.asarray(batch[name]) for name in asked["fields"]]

    def _begin(self, asked: Mapping[str, Any]) -> Reading:
        """Return the mini-batches that are asked for, of the chief's data."""
        if self._source is None or self._source[0] != asked["input"]:
            self._source = asked["input"], hyperparams.from_text(asked["input"]).instantiate()
        source, split = self._source[1], asked["split"]
        fingerprint = source.fingerprint(split)
        for name, expected in asked["fingerprint"].items():
            if (value := fingerprint.get(name, "unknown")) != expected:
                raise errors.InputError(
                    f"other data than the chief's: {name} is {value}, the chief's {expected}. Copy "
                    "the same data to both hosts, or set input.on_worker=False"
                )
        part = None if asked["part"] is None else ReplicaPart(**asked["part"])
        if split is not None:
            whole = source.evaluation(split)
            return whole if part is None else CutOut(whole, part)
        if part is None:
            return source.batches(asked["seed"], asked["position"])
        return source.part(part, asked["seed"], asked["position"])


def _described(error: Exception) -> dict[str, str]:
    """Return an error as the chief raises it; a bug has its traceback."""
    if isinstance(error, errors.UserError):
        kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return {"kind": next(kinds).__name__, "text": str(error)}
    if isinstance(error, OSError) and error.filename is not None:  # most often, a file is not there
        text = f"{error.filename}: {error.strerror}. Put the data there, under the same path"
        return {"kind": errors.InputError.__name__, "text": text}
    trace = "".join(traceback.format_exception(error)).rstrip()
    return {"kind": "", "text": f"{type(error).__name__}: {error}\n{trace}"}


def register(function: Callable[[bytes], Sequence[Any]]) -> tuple[str, tf.Graph]:
    """Let operations on the devices of this process call a function, on threads of TensorFlow.

    Args:
        function: a request → arrays, or bytes, as many as the caller expects.

    Returns:
        TensorFlow's name of it in this process, and a graph: operations can call the function as
        long as the graph lives.
    """
    graph = tf.Graph()
    with graph.as_default():
        result = tf.numpy_function(function, [tf.constant(b"")], [tf.string])
    return tf.nest.flatten(result)[0].op.get_attr("token").decode(), graph


def call(
    device: str, request: tf.Tensor, dtypes: Sequence[tf.DType] = (), token: str = TOKEN
) -> list[tf.Tensor]:
    """Call the function of a worker's process eagerly, without waiting for what it returns.

    Args:
        device: a device of that process; what the function returns stays there.
        request: scalar string, JSON.
        dtypes: of the fields that are returned after the answer.
        token: name of the function.

    Returns:
        The answer, a scalar string, and the fields.

    Raises:
        tf.errors.OpError: the process is gone.
    """
    with tf.device(device):
        result = tf.raw_ops.PyFuncStateless(input=[request], token=token, Tout=[tf.string, *dtypes])
    return list(result)


def main() -> int:
    """Serve until the supervisor ends; return the exit code."""
    channel = child.channel()
    if channel is None:
        sys.stderr.write("this program is started by a worker: trainer --job=worker\n")
        return 1
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    settings = channel.wait()
    if not settings:
        return 0
    values = json.loads(settings)
    for name in values["packages"]:  # whose classes the text of an input may name
        hyperparams.register_package(name)
    devices, task = int(values["devices"]), values["task"]
    inter_op_threads, intra_op_threads = placement.thread_counts(devices, placement.num_cores())
    # What reads is not on the devices that the server has, whose memory is the cells'.
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=intra_op_threads,
        inter_op_parallelism_threads=inter_op_threads,
        device_count={"CPU": devices},
    )
    # A thread that waits for other workers would take its only core from the cells.
    config.experimental.disable_thread_spinning = True
    config.gpu_options.allow_growth = True
    token, registered = register(Requests())
    if token != TOKEN:
        raise RuntimeError(f"the worker's function is {token}, not the first of its process")
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(values["cluster"]),
            task["type"],
            task["index"],
            protocol="grpc",
            config=config,
        )
    except tf.errors.OpError as error:
        channel.write(f"its server does not start: {error.message}")
        return 1
    channel.write(worker_supervisor.SERVES)
    while channel.wait():
        pass
    del server, registered
    os._exit(0)  # the server has no end of its own


if __name__ == "__main__":
    sys.exit(main())
