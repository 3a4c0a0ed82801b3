"""The input of a run, read by the worker of the first cell in place of the chief.

A mini-batch is made in the worker's process and stays there: the chief has references to its
fields, and the step cuts them and sends them where they are read. Of each mini-batch the chief
receives one short answer: how many examples could not be read, or why none can be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.cluster.remote import worker_function
from lingvo_gpipe.execution import placement
from lingvo_gpipe.execution.executor import Executor
from lingvo_gpipe.input import Batch, Input, Reading


class Source(Protocol):
    """Where mini-batches come from: an `Input`, or a worker that has one."""

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return the endless mini-batches of training from number `position` on."""

    def evaluation(self, split: str) -> Reading:
        """Return mini-batches with every example of `split` once; the last may be smaller."""


def source_of(own: Input, executor: Executor, report: Callable[[str], None]) -> Source:
    """Return where the mini-batches of a network come from, by `input.on_worker`.

    Args:
        own: the input of this process.
        executor: runs the network; it learns on which device the mini-batches are.
        report: receives a line if there are no workers.
    """
    if not own.params.on_worker:
        return own
    device = packing.host(executor.devices[0][0])
    if not placement.is_on_worker(device):
        report("input.on_worker does nothing in this run, which has no workers")
        return own
    executor.input_device = device
    return WorkerInput(own, device)


class WorkerInput:
    """An input that a worker reads."""

    def __init__(self, own: Input, device: str, token: str = worker_function.TOKEN) -> None:
        """Read nothing yet.

        Args:
            own: the input of this process; the worker makes another one of its params.
            device: CPU of the worker.
            token: name of the worker's function.
        """
        self._own = own
        self._worker = _Worker(device, token)

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return the endless mini-batches of training from number `position` on.

        Raises:
            UserError: the worker cannot read the data, or has other data.
        """
        return self._reading("training", {"split": None, "seed": seed, "position": position})

    def evaluation(self, split: str) -> Reading:
        """Return mini-batches with every example of `split` once; the last may be smaller.

        Raises:
            UserError: the worker cannot read the data, or has other data.
        """
        return self._reading("evaluation", {"split": split})

    def _reading(self, kind: str, asked: Mapping[str, Any]) -> Reading:
        own, split = self._own, asked["split"]
        opened = {"do": "open", "kind": kind, "input": own.params.to_text(), **asked}
        spec = own.element_spec(training=split is None)
        return _WorkerReading(self._worker, opened, spec, own.fingerprint(split))


class _Worker:
    """The worker that reads; it is named in errors."""

    def __init__(self, device: str, token: str) -> None:
        self._device = device
        self._token = token

    def request(self, asked: Mapping[str, Any]) -> tf.Tensor:
        """Return a request as a tensor of the worker."""
        with tf.device(self._device):
            return tf.constant(json.dumps(asked))

    def ask(
        self, request: tf.Tensor, dtypes: Mapping[str, tf.DType]
    ) -> tuple[dict[str, Any], list[tf.Tensor]]:
        """Return the answer to a request, and what comes with it, on the worker.

        Raises:
            UserError: what the worker's input has raised.
            RuntimeError: anything else that it has raised, with its traceback.
            tf.errors.OpError: the worker is lost.
        """
        answer, *tensors = worker_function.call(
            self._device, request, [tf.string, *dtypes.values()], self._token
        )
        found: dict[str, Any] = json.loads(answer.numpy())
        error = found.get("error")
        if error is None:
            return found, tensors
        raise _kind(error["kind"])(f"{self.name(found)}: {error['text']}")

    def name(self, answer: Mapping[str, Any]) -> str:
        """Return how messages name the worker that has answered."""
        number = tf.DeviceSpec.from_string(self._device).task or 0
        return f"worker {number} ({answer['host']}), which reads the input"


def _kind(name: str) -> type[Exception]:
    """Return the class of an error that users meet; `RuntimeError` for any other name."""
    found = vars(errors).get(name)
    if isinstance(found, type) and issubclass(found, errors.UserError):
        return found
    return RuntimeError


class _WorkerReading(Reading):
    """Mini-batches that a worker reads."""

    def __init__(
        self,
        worker: _Worker,
        opened: Mapping[str, Any],
        spec: Mapping[str, tf.TensorSpec],
        fingerprint: Mapping[str, str],
    ) -> None:
        """Let the worker begin.

        Args:
            worker: the worker.
            opened: the request to begin.
            spec: fields of a mini-batch.
            fingerprint: that of this process's data.

        Raises:
            UserError: the worker cannot read the data, or has other data.
        """
        super().__init__()
        self._worker = worker
        self._opened = opened
        self._dtypes = {name: one.dtype for name, one in spec.items()}
        self._fingerprint = fingerprint
        self._reader: int | None = self._open()

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read: where the worker has begun, if nobody has read there."""
        reader, self._reader = self._reader, None
        request = self._worker.request(
            {
                "do": "next",
                "kind": self._opened["kind"],
                "reader": self._open() if reader is None else reader,
                "fields": {name: dtype.name for name, dtype in self._dtypes.items()},
            }
        )
        while True:
            answer, tensors = self._worker.ask(request, self._dtypes)
            self.counts.update(answer["counts"])
            if answer["end"]:
                return
            yield dict(zip(self._dtypes, tensors, strict=True))

    def _open(self) -> int:
        """Let the worker begin; return the number of its reader."""
        answer, _ = self._worker.ask(self._worker.request(self._opened), {})
        for name, own in self._fingerprint.items():
            found = answer["fingerprint"].get(name, "unknown")
            if found != own:
                raise errors.InputError(
                    f"{self._worker.name(answer)}, has other data than the chief: {name} is "
                    f"{found}, here {own}. Copy the same data to both hosts, or set "
                    "input.on_worker=False"
                )
        return int(answer["reader"])
