"""The input of a run, read in the process of a worker at the requests of the chief.

A request is a JSON object, and so is the first value of each answer; after it come the fields of a
mini-batch, where one was asked for.

    {"do": "open", "kind": "training", "input": "class: …", "seed": 1, "position": 20, …}
            → {"host": "node17", "reader": 1, "fingerprint": {"examples": "1347"}}
    {"do": "next", "kind": "training", "reader": 1, "fields": {"image": "float32"}}
            → {"host": "node17", "end": false, "counts": {"replaced": 0}, "is_cut": false}, and
            the field
    whatever could not be done
            → {"host": "node17", "error": {"kind": "InputError", "text": "…"}}, and empty fields

With "part", the reader returns the examples of one replica. There is one reader of each kind and
replica: opening another one ends it.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams


class Reading(Protocol):
    """Mini-batches that are read one after the other; see `input.Reading`."""

    counts: dict[str, int]
    is_cut: bool

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Begin to read."""


class Batches(Protocol):
    """Mini-batches, or a part of each; see `input.Input`."""

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return the mini-batches of training."""

    def evaluation(self, split: str, batch_size: int | None = None) -> Reading:
        """Return the mini-batches of an evaluation."""


class Source(Batches, Protocol):
    """What is read; see `input.Input`."""

    def part(self, numbers: Mapping[str, Any]) -> Batches:
        """Return a part of each mini-batch."""

    def fingerprint(self, split: str | None = None) -> Mapping[str, str]:
        """Return what copies of the data have in common."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Mini-batches in the middle of being read.

    Attributes:
        number: number of the reader in this process.
        reading: the mini-batches, for their counts.
        batches: the mini-batches that are left.
    """

    number: int
    reading: Reading
    batches: Iterator[Mapping[str, Any]]


class InputServer:
    """Answers requests, one at a time, on whichever threads of TensorFlow they arrive."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._readers: dict[_Key, _Reader] = {}
        self._sources: dict[str, Source] = {}
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, asked: Mapping[str, Any]) -> list[Any]:
        """Answer a request; raises nothing but what ends the process.

        Returns:
            The answer as JSON, then for "next" an array for each field: empty ones after the last
            mini-batch, and after an error.
        """
        with self._lock:
            return self._answered(asked)

    def _answered(self, asked: Mapping[str, Any]) -> list[Any]:
        answer: dict[str, Any] = {"host": socket.gethostname()}
        arrays: list[np.ndarray[Any, Any]] = []
        try:
            if asked["do"] == "open":
                answer |= self._open(asked)
            else:
                reading, arrays = self._next(asked)
                counts = {"counts": dict(reading.counts), "is_cut": reading.is_cut}
                answer |= {"end": not arrays, **counts}
        except Exception as error:  # noqa: BLE001 - it is the chief's to raise.
            answer["error"] = _described(error)
        if asked["do"] == "next" and not arrays:
            self._readers.pop(_key(asked), None)
            dtypes = map(tf.dtypes.as_dtype, asked["fields"].values())
            arrays = [np.zeros([0], dtype.as_numpy_dtype) for dtype in dtypes]
        return [json.dumps(answer).encode(), *arrays]

    def _open(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to read; return the reader's number, and the fingerprint of the data."""
        self._readers.pop(_key(asked), None)
        source = self._source(asked["input"])
        split, part = asked["split"], asked["part"]
        batches = source if part is None else source.part(part)
        if split is None:
            reading = batches.batches(asked["seed"], asked["position"])
        else:
            reading = batches.evaluation(split)
        self._count += 1
        self._readers[_key(asked)] = _Reader(self._count, reading, iter(reading))
        return {"reader": self._count, "fingerprint": dict(source.fingerprint(split))}

    def _next(self, asked: Mapping[str, Any]) -> tuple[Reading, list[np.ndarray[Any, Any]]]:
        """Return what is read and the fields of its next mini-batch; none at its end."""
        reader = self._readers.get(_key(asked))
        if reader is None or reader.number != asked["reader"]:
            raise errors.InputError(
                f"the mini-batches of {asked['kind']} were begun again meanwhile. Read them in one "
                "loop at a time"
            )
        batch = next(reader.batches, None)
        arrays = [] if batch is None else _arrays(batch, asked["fields"])
        return reader.reading, arrays

    def _source(self, text: str) -> Source:
        """Return the input of a text; the last one is kept."""
        if text not in self._sources:
            self._sources.clear()
            source: Source = hyperparams.from_text(text).instantiate()
            self._sources[text] = source
        return self._sources[text]


_Key: TypeAlias = "tuple[str, int]"
"""Kind of a reader, and number of the replica whose examples it returns."""


def _key(asked: Mapping[str, Any]) -> _Key:
    """Return which reader a request is for."""
    part = asked.get("part")
    return asked["kind"], 0 if part is None else part["replica"]


def _arrays(batch: Mapping[str, Any], fields: Mapping[str, str]) -> list[np.ndarray[Any, Any]]:
    """Return the fields of a mini-batch in the order of `fields`, without copying them.

    Raises:
        InputError: one is missing, or has another dtype than the input declares.
    """
    arrays = []
    for name, dtype in fields.items():
        if name not in batch:
            raise errors.InputError(
                f"the mini-batch has no field {name!r}, which element_spec() declares; it has "
                f"{', '.join(sorted(batch)) or 'none'}. Correct the input"
            )
        value = tf.convert_to_tensor(batch[name])
        if value.dtype.name != dtype:
            raise errors.InputError(
                f"field {name!r} of the mini-batch is {value.dtype.name}, but element_spec() "
                f"declares {dtype}. Correct the input"
            )
        arrays.append(np.asarray(value))
    return arrays


def _described(error: Exception) -> dict[str, str]:
    """Return an error as the chief raises it; a bug has its traceback."""
    if isinstance(error, errors.UserError):
        known = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return {"kind": next(known).__name__, "text": str(error)}
    if isinstance(error, OSError) and error.filename is not None:  # most often, a file is not there
        text = f"{error.filename}: {error.strerror}. Put the data there, under the same path"
        return {"kind": errors.InputError.__name__, "text": text}
    trace = "".join(traceback.format_exception(error)).rstrip()
    return {"kind": "", "text": f"{type(error).__name__}: {error}\n{trace}"}


def prepare(packages: Sequence[str], intra_op_threads: int) -> None:
    """Prepare the process of a worker, before TensorFlow's first operation.

    Args:
        packages: packages whose classes the text of an input may name.
        intra_op_threads: threads inside an operation that reads, as inside those of the cells.
    """
    for name in packages:
        hyperparams.register_package(name)
    # What reads is not on the devices that the process serves, whose memory is the cells'.
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
