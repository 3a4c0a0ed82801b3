"""The input of a run, read by the workers with the first cells in place of the chief.

Each replica's worker reads the examples that the replica computes. They are made in the worker's
process and stay there: the chief has references to their fields, and the step cuts them and sends
them where they are read. Of each mini-batch the chief receives one short answer from each worker:
how many examples could not be read, or why none can be. Where all first cells are on one worker, it
reads whole mini-batches.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, packing
from lingvo_gpipe.execution import placement
from lingvo_gpipe.execution.executor import Executor
from lingvo_gpipe.input import Input, Reading
from lingvo_gpipe.network import parts
from lingvo_gpipe.network.parts import InParts, ReplicaPart
from lingvo_gpipe.run import worker


def source_of(source: Input, executor: Executor, report: Callable[[str], None]) -> Source:
    """Return where the mini-batches of a network come from, by `input.on_worker`.

    Args:
        source: the input of this process.
        executor: runs the network; it learns on which devices the mini-batches are.
        report: receives a line if there are no workers.
    """
    if not source.params.on_worker:
        return source
    devices = [packing.host(of_replica[0]) for of_replica in executor.devices]
    if not placement.is_on_worker(devices[0]):
        report("input.on_worker does nothing in this run, which has no workers")
        return source
    params = executor.analysis.params
    if len(set(devices)) == 1:
        executor.input_devices = (devices[0],)
        return WorkerInput(source, devices[:1])
    executor.input_devices = tuple(devices)
    of_replicas = [ReplicaPart.of(params, replica) for replica in range(params.num_replicas)]
    return WorkerInput(source, devices, of_replicas)


class WorkerInput:
    """An input that workers read.

    Attributes:
        devices: CPU of each worker.
        parts: which examples each worker reads; empty: one worker reads all.
        token: name of the workers' function.
    """

    def __init__(
        self,
        source: Input,
        devices: Sequence[str],
        parts: Sequence[ReplicaPart] = (),
        token: str = worker.TOKEN,
    ) -> None:
        """Read nothing yet.

        Args:
            source: the input of this process; each worker makes another one of its params.
            devices: CPU of each worker.
            parts: which examples each worker reads; empty: one worker reads all.
            token: name of the workers' function.
        """
        self._input = source
        self.devices = devices
        self.parts = parts
        self.token = token

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return the endless mini-batches of training from number `position` on."""
        return self._reading("training", {"split": None, "seed": seed, "position": position})

    def evaluation(self, split: str) -> Reading:
        """Return mini-batches with every example of `split` once; the last may be smaller."""
        return self._reading("evaluation", {"split": split})

    def _reading(self, kind: str, which: Mapping[str, Any]) -> Reading:
        source, split = self._input, which["split"]
        spec = source.element_spec(training=split is None)
        request = {
            "kind": kind,
            "input": source.params.to_text(),
            "fields": {name: field.dtype.name for name, field in spec.items()},
            "fingerprint": dict(source.fingerprint(split)),
            **which,
        }
        return _WorkerReading(request, self)


Source: TypeAlias = "Input | WorkerInput"
"""Where mini-batches come from."""
_LOOPS = itertools.count(1)


class _WorkerReading(Reading):
    """Mini-batches that workers read, all at the same time."""

    def __init__(self, request: Mapping[str, Any], source: WorkerInput) -> None:
        """Read nothing yet.

        Args:
            request: what all workers are asked; see `worker`.
            source: who reads which part.
        """
        super().__init__()
        self._request = request
        self._source = source

    def __iter__(self) -> Iterator[Mapping[str, tf.Tensor]]:
        """Begin to read.

        Raises:
            UserError: what the input of a worker has raised.
            InputError: some workers end before others, or what they read does not fit together.
            RuntimeError: anything else that a worker has raised, with its traceback.
            tf.errors.OpError: a worker is lost.
        """
        loop = next(_LOOPS)
        fields = self._request["fields"]
        dtypes = [tf.dtypes.as_dtype(name) for name in fields.values()]
        requests = []
        of_devices: Sequence[ReplicaPart | None] = self._source.parts or [None]
        for device, part in zip(self._source.devices, of_devices, strict=True):
            numbers = None if part is None else dataclasses.asdict(part)
            with tf.device(device):
                text = json.dumps({**self._request, "loop": loop, "part": numbers})
                requests.append(tf.constant(text))
        while True:
            results = [
                worker.call(device, request, dtypes, self._source.token)
                for device, request in zip(self._source.devices, requests, strict=True)
            ]
            answers = [
                _received(device, result[0])
                for device, result in zip(self._source.devices, results, strict=True)
            ]
            self.counts.update(_counted(answers))
            if all(answer["end"] for answer in answers):
                return
            if any(answer["end"] for answer in answers):
                raise _different(answers, ["ended" if a["end"] else "goes on" for a in answers])
            batches = [dict(zip(fields, result[1:], strict=True)) for result in results]
            yield self._joined(batches, answers)

    def _joined(
        self, batches: list[dict[str, tf.Tensor]], answers: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, tf.Tensor]:
        """Return a mini-batch of its parts."""
        if not self._source.parts:
            return batches[0]
        sizes = [parts.num_examples(batch) for batch in batches]
        if sizes != [len(part.examples(sum(sizes))) for part in self._source.parts]:
            raise _different(answers, [f"{size} examples" for size in sizes])
        return InParts([b for b, size in zip(batches, sizes, strict=True) if size])


def _received(device: str, answer: tf.Tensor) -> dict[str, Any]:
    """Wait for an answer; return it, with the name by which messages call the worker."""
    values: dict[str, Any] = json.loads(answer.numpy())
    number = tf.DeviceSpec.from_string(device).task or 0
    values["name"] = f"worker {number} ({values['host']}), which reads the input"
    if "error" not in values:
        return values
    kind = vars(errors).get(values["error"]["kind"], RuntimeError)
    raise kind(f"{values['name']}: {values['error']['text']}")


def _counted(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    """Return how many examples of the whole mini-batches could not be read.

    Raises:
        InputError: workers that read whole mini-batches could not read other examples.
    """
    counts = [answer["counts"] for answer in answers]
    if not answers[0]["is_cut"]:
        total = collections.Counter[str]()
        for each in counts:
            total.update(each)
        return total
    if any(other != counts[0] for other in counts):
        shown = [", ".join(f"{n} examples {what}" for what, n in each.items()) for each in counts]
        raise _different(answers, [text or "all read" for text in shown])
    first: Mapping[str, int] = counts[0]
    return first


def _different(
    answers: Sequence[Mapping[str, Any]], differences: Sequence[str]
) -> errors.InputError:
    names = [answer["name"] for answer in answers]
    listed = "; ".join(f"{name}: {what}" for name, what in zip(names, differences, strict=True))
    return errors.InputError(
        f"the workers do not read the same mini-batches ({listed}). Copy the same data to all "
        "hosts, or set input.on_worker=False"
    )
