"""The input of a run, read by the workers with the first cells in place of the chief.

Each replica's worker reads the examples that the replica computes. They are made in the worker's
process and stay there: the chief has references to their fields, and the step cuts them and sends
them where they are read. Of each mini-batch the chief receives one short answer from each worker:
how many examples could not be read, or why none can be. Where all first cells are on one worker, or
a field has no examples (`model.unbatched`), one worker reads whole mini-batches.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.cluster.remote import worker_function
from lingvo_gpipe.execution import placement
from lingvo_gpipe.execution.executor import Executor
from lingvo_gpipe.input import Batch, Input, Reading
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import parts
from lingvo_gpipe.network.parts import InParts, Part


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
        executor: runs the network; it learns on which devices the mini-batches are.
        report: receives a line if there are no workers.
    """
    if not own.params.on_worker:
        return own
    devices = [packing.host(of_replica[0]) for of_replica in executor.devices]
    if not placement.is_on_worker(devices[0]):
        report("input.on_worker does nothing in this run, which has no workers")
        return own
    params = executor.analysis.params
    if len(set(devices)) == 1 or params.unbatched:  # a field without examples has no parts
        executor.input_devices = (devices[0],)
        return WorkerInput(own, devices[0])
    executor.input_devices = tuple(devices)
    of_replicas = [parts.Part.of(params, replica) for replica in range(params.num_replicas)]
    return WorkerInput(own, devices, parts=of_replicas)


def next_batches(
    source: Iterator[Mapping[str, Nest]], count: int, position: int
) -> list[Mapping[str, Nest]]:
    """Return the next `count` mini-batches of training.

    Args:
        source: endless mini-batches.
        count: number of mini-batches to read.
        position: number of mini-batches that were read before them.

    Raises:
        InputError: they cannot be read, or there are no more.
    """
    batches = list(itertools.islice(source, count))
    if len(batches) < count:
        raise errors.InputError(
            f"the training data ended after {position + len(batches)} mini-batches. "
            "Input.batches must be endless: let it begin again at the end of the data"
        )
    return batches


class WorkerInput:
    """An input that workers read."""

    def __init__(
        self,
        own: Input,
        devices: str | Sequence[str],
        token: str = worker_function.TOKEN,
        *,
        parts: Sequence[Part] = (),
    ) -> None:
        """Read nothing yet.

        Args:
            own: the input of this process; each worker makes another one of its params.
            devices: CPU of the worker; with `parts`, of the worker of each.
            token: name of the workers' function.
            parts: which examples each worker reads; empty: one worker reads all.
        """
        self._own = own
        self._parts = tuple(parts)
        names = [devices] if isinstance(devices, str) else devices
        self._workers = [_Worker(device, token) for device in names]

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
        spec = own.element_spec(training=split is None)
        request = {"kind": kind, "input": own.params.to_text(), **asked}
        data = _Data({name: one.dtype for name, one in spec.items()}, own.fingerprint(split))
        numbers: list[dict[str, Any] | None] = [dataclasses.asdict(part) for part in self._parts]
        readers = [
            _WorkerReader(worker, {**request, "part": part}, data)
            for worker, part in zip(self._workers, numbers or [None], strict=True)
        ]
        return _WorkerReading(readers, self._parts)


class _Worker:
    """The worker that reads; it is named in errors."""

    def __init__(self, device: str, token: str) -> None:
        self._device = device
        self._token = token

    def request(self, asked: Mapping[str, Any]) -> tf.Tensor:
        """Return a request as a tensor of the worker."""
        with tf.device(self._device):
            return tf.constant(json.dumps(asked))

    def ask(self, request: tf.Tensor, dtypes: Sequence[tf.DType] = ()) -> list[tf.Tensor]:
        """Begin to ask; return the answer that the worker will have, and what comes with it."""
        return worker_function.call(self._device, request, [tf.string, *dtypes], self._token)

    def received(self, answer: tf.Tensor) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            UserError: what the worker's input has raised.
            RuntimeError: anything else that it has raised, with its traceback.
            tf.errors.OpError: the worker is lost.
        """
        found: dict[str, Any] = json.loads(answer.numpy())
        error = found.get("error")
        if error is None:
            return found
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """What the data is like in this process.

    Attributes:
        dtypes: of each field of a mini-batch.
        fingerprint: see `Input.fingerprint`.
    """

    dtypes: Mapping[str, tf.DType]
    fingerprint: Mapping[str, str]


class _WorkerReader:
    """Mini-batches, or a part of each, that a worker reads.

    Attributes:
        counts: see `Reading`.
        is_cut: see `Reading`.
        name: how messages call the worker; empty until it has answered.
    """

    def __init__(self, worker: _Worker, request: Mapping[str, Any], data: _Data) -> None:
        """Let the worker begin.

        Args:
            worker: the worker.
            request: what it is asked for.
            data: the data of this process.

        Raises:
            UserError: the worker cannot read the data, or has other data.
        """
        self.counts: dict[str, int] = {}
        self.is_cut = False
        self.name = ""
        self._worker = worker
        self._request = request
        self._data = data
        self._opened: int | None = self._open()

    def begin(self) -> tf.Tensor:
        """Begin to read, where the worker has begun if nobody has read there; see `ask`."""
        reader, self._opened = self._opened, None
        return self._worker.request(
            {
                "do": "next",
                "kind": self._request["kind"],
                "part": self._request["part"],
                "reader": self._open() if reader is None else reader,
                "fields": {name: dtype.name for name, dtype in self._data.dtypes.items()},
            }
        )

    def ask(self, begun: tf.Tensor) -> list[tf.Tensor]:
        """Let the worker read the next mini-batch; see `begin` and `received`."""
        return self._worker.ask(begun, list(self._data.dtypes.values()))

    def received(self, asked: Sequence[tf.Tensor]) -> Batch | None:
        """Wait for what was asked for; return it, or None after the last mini-batch."""
        answer, *tensors = asked
        found = self._worker.received(answer)
        self.counts, self.is_cut = found["counts"], found["is_cut"]
        self.name = self._worker.name(found)
        return None if found["end"] else dict(zip(self._data.dtypes, tensors, strict=True))

    def _open(self) -> int:
        """Let the worker begin; return the number of its reader."""
        worker = self._worker
        answer = worker.received(worker.ask(worker.request({"do": "open", **self._request}))[0])
        for name, own in self._data.fingerprint.items():
            found = answer["fingerprint"].get(name, "unknown")
            if found != own:
                raise errors.InputError(
                    f"{worker.name(answer)}, has other data than the chief: {name} is "
                    f"{found}, here {own}. Copy the same data to both hosts, or set "
                    "input.on_worker=False"
                )
        return int(answer["reader"])


class _WorkerReading(Reading):
    """Mini-batches that workers read, all at the same time."""

    def __init__(self, readers: Sequence[_WorkerReader], parts: Sequence[Part]) -> None:
        """Join what they read.

        Args:
            readers: one; or one for each part.
            parts: which examples each reads; empty: one reads all.
        """
        super().__init__()
        self._readers = tuple(readers)
        self._parts = parts

    def __iter__(self) -> Iterator[Mapping[str, tf.Tensor]]:
        """Begin to read.

        Raises:
            InputError: some end before others, or do not fit each other.
        """
        begun = [(reader, reader.begin()) for reader in self._readers]
        while True:
            asked = [reader.ask(request) for reader, request in begun]
            found = [r.received(tensors) for r, tensors in zip(self._readers, asked, strict=True)]
            self.counts.update(self._counted())
            batches = [batch for batch in found if batch is not None]
            if not batches:
                return
            if len(batches) < len(found):
                raise self._different(["ended" if b is None else "goes on" for b in found])
            yield self._joined(batches)

    def _counted(self) -> dict[str, int]:
        """Return the counts of all readers.

        Raises:
            InputError: some that read whole mini-batches could not read other examples.
        """
        first = self._readers[0]
        if first.is_cut:
            if any(other.counts != first.counts for other in self._readers):
                raise self._different([_shown(reader.counts) for reader in self._readers])
            return first.counts
        total: collections.Counter[str] = collections.Counter()
        for reader in self._readers:
            total.update(reader.counts)
        return dict(total)

    def _joined(self, batches: list[Batch]) -> Mapping[str, tf.Tensor]:
        """Return a mini-batch of its parts.

        Raises:
            InputError: they do not fit each other.
        """
        if not self._parts:
            return batches[0]
        dim = self._parts[0].batch_dim
        sizes = [parts.num_examples(batch, dim) for batch in batches]
        if sizes != [len(part.examples(sum(sizes))) for part in self._parts]:
            raise self._different([f"{size} examples" for size in sizes])
        return InParts([b for b, size in zip(batches, sizes, strict=True) if size], dim)

    def _different(self, found: Sequence[str]) -> errors.InputError:
        names = [reader.name for reader in self._readers]
        listed = "; ".join(f"{name}: {text}" for name, text in zip(names, found, strict=True))
        return errors.InputError(
            f"the workers do not read the same mini-batches ({listed}). Copy the same data to all "
            "hosts, or set input.on_worker=False"
        )


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} examples {name}" for name, count in counts.items()) or "all read"
