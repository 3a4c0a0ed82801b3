"""Inputs whose examples are found by number: any position is reached without reading others.

Example number g of a run is in epoch g // n, and its place there is looked up in that epoch's
permutation. A batch may span two epochs: every example is seen once per epoch and none is dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input.base import Input, check_split
from lingvo_gpipe.input.reading import Batches, Reading
from lingvo_gpipe.nests import Batch
from lingvo_gpipe.network.parts import ReplicaPart

# Rounds of the permutation's block cipher; with 8, even 3 examples are permuted uniformly.
_SHUFFLE_ROUNDS = 8
_PREFETCH = 2

# AutoGraph would convert nothing in these functions, and writes a temporary file for each.
_as_graph = tf.autograph.experimental.do_not_convert


class Indexed(Input):
    """Base of inputs whose examples are found by number; subclasses define how they are read."""

    class Params(Input.Params):
        """Fields of Indexed."""

        shuffle: bool = hyperparams.field(True, "A new order of the examples in each epoch.")
        train_split: str = hyperparams.field("train", "Part of the data that is trained on.")

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._unreadable: dict[str, set[int]] = {}  # by split

    @abc.abstractmethod
    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""

    @abc.abstractmethod
    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split.

        Raises:
            InputError: there is no such split.
        """

    @abc.abstractmethod
    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; each example depends on its own row alone.

        So a host may read only some rows of each mini-batch (`part`).

        Args:
            rows: per mini-batch {"index": int64 [B], "epoch": int64 [B]}, which examples.
            split: that they are in.
            batch_size: B; the last batch may be smaller.
            seed: seed of training, where examples may be distorted by (seed, epoch, index); None in
                evaluation.
        """

    def unreadable(self, split: str) -> set[int]:
        """Return the examples that were found unreadable so far; it grows as others are found."""
        return self._unreadable.setdefault(split, set())

    def find_unreadable(self, split: str, indices: Collection[int]) -> Collection[int]:
        """Return which of these examples cannot be read; called after a mini-batch failed.

        Training reads the next readable example in their place, evaluation leaves them out. An
        input that returns none, as here, ends the run.

        Raises:
            InputError: they end the run all the same; says why.
        """
        del split, indices
        return ()

    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Return the fields of one mini-batch, from params alone; evaluation's last may be less."""
        size = self.params.batch_size
        if not training:
            size = self.params.eval_batch_size or size
        return {
            name: tf.TensorSpec([size, *spec.shape], spec.dtype)
            for name, spec in self.example_spec().items()
        }

    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the endless mini-batches of training from number `position` on."""
        return self.training(seed, position, range(self.params.batch_size))

    def training(self, seed: int, position: int, places: range) -> Batches:
        """Return the examples at `places` of each mini-batch of training; see `batches`."""
        split, size = self.params.train_split, self.params.batch_size
        count = self._counted(split)
        shuffle_seed = seed if self.params.shuffle else None

        def rows(first: int) -> tf.data.Dataset:
            unreadable = self.unreadable(split)
            bad = np.array(sorted(unreadable), np.int64)
            good = np.array([_next_readable(n, unreadable, count) for n in bad], np.int64)

            @_as_graph
            def rows_of(number: tf.Tensor) -> dict[str, tf.Tensor]:
                numbers = number * size + tf.range(places.start, places.stop, dtype=tf.int64)
                epoch = numbers // count
                index = _permute(numbers % count, epoch, count, shuffle_seed)
                is_bad = index[:, tf.newaxis] == bad
                replaced = tf.reduce_any(is_bad, 1)
                instead = tf.reduce_sum(tf.where(is_bad, good, 0), 1)
                index = tf.where(replaced, instead, index)
                return {"index": index, "epoch": epoch, "replaced": replaced}

            return tf.data.Dataset.range(position + first, tf.int64.max).map(rows_of)

        return _Examples(self, split, rows, len(places), seed, position)

    def part(self, part: ReplicaPart, seed: int, position: int = 0) -> Reading:
        """Return a part of each mini-batch of `batches`; no other example is read."""
        if not all(spec.shape.is_fully_defined() for spec in self.example_spec().values()):
            return super().part(part, seed, position)  # padded alike, where a batch is padded
        return self.training(seed, position, part.examples(self.params.batch_size))

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; the last may be smaller."""
        size = batch_size or self.params.eval_batch_size or self.params.batch_size
        count = self._counted(split)

        def rows(first: int) -> tf.data.Dataset:
            readable = np.setdiff1d(np.arange(count), list(self.unreadable(split)))
            index = tf.data.Dataset.from_tensor_slices(readable[first * size :]).batch(size)
            return index.map(_as_graph(lambda n: {"index": n, "epoch": tf.zeros_like(n)}))

        return _Examples(self, split, rows, size, None)

    def fingerprint(self, split: str | None = None) -> dict[str, str]:
        """Return the number of examples, and what `Input.fingerprint` returns."""
        name = self.params.train_split if split is None else split
        counted = {f"number of examples in split {name!r}": str(self.num_examples(name))}
        return {**super().fingerprint(split), **counted}

    def _counted(self, split: str) -> int:
        count = self.num_examples(split)
        if count == 0:
            raise errors.InputError(f"{type(self).__name__}: split {split!r} has no examples")
        return count


class _Examples(Batches):
    """Mini-batches of an `Indexed` input, which is asked which examples cannot be read.

    The mini-batches are then made again from the one that failed: that an example is unreadable is
    a property of the data, so they remain a function of (seed, position).
    """

    def __init__(
        self,
        source: Indexed,
        split: str,
        rows: Callable[[int], tf.data.Dataset],
        size: int,
        seed: int | None,
        position: int = 0,
    ) -> None:
        """Begin at `position`.

        Args:
            source: the input.
            split: split of the examples.
            rows: number of a mini-batch from `position` on → the rows from it on.
            size: see `Indexed.read`.
            seed: see `Indexed.read`.
            position: of the first mini-batch.
        """
        self._source, self._split, self._rows = source, split, rows
        self._size, self._seed, self._position = size, seed, position
        super().__init__(self._dataset(0), first=position)

    def _dataset(self, first: int) -> tf.data.Dataset:
        """Return the mini-batches from number `first` on."""
        rows = self._rows(first)
        return self._source.read(rows, self._split, self._size, self._seed).prefetch(_PREFETCH)

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read."""
        unreadable = self._source.unreadable(self._split)
        dataset, done = self._dataset(0) if unreadable else self.dataset, 0
        while True:
            passed_over = set(unreadable)
            if self._seed is None and passed_over:
                self.counts["left_out"] = len(passed_over)
            rows = iter(self._rows(done)) if passed_over else None
            try:
                for batch in Batches(dataset, first=self._position + done):
                    if rows is not None and self._seed is not None:
                        replaced = int(tf.math.count_nonzero(next(rows)["replaced"]))
                        self.counts["replaced"] = self.counts.get("replaced", 0) + replaced
                    yield batch
                    done += 1
                return
            except errors.InputError:
                (row,) = self._rows(done).take(1)
                unreadable.update(
                    self._source.find_unreadable(self._split, row["index"].numpy().tolist())
                )
                if unreadable == passed_over:
                    raise
                dataset = self._dataset(done)


class InMemory(Indexed):
    """Base of inputs that are a few arrays in memory; subclasses define `arrays`."""

    class Params(Indexed.Params):
        """Fields of InMemory."""

    @abc.abstractmethod
    def arrays(self) -> Mapping[str, Mapping[str, np.ndarray[Any, Any]]]:
        """Return split → field → array, examples along its first axis."""

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split.

        Raises:
            InputError: there is no such split, or an array contradicts its spec.
        """
        arrays = self._split(split)
        for name, spec in self.example_spec().items():
            array = np.asarray(arrays.get(name))
            if not _fits(array, spec):
                expected = ", ".join(map(str, ["n", *spec.shape]))
                raise errors.InputError(
                    f"{type(self).__name__}: field {name!r} of split {split!r} is {array.dtype} "
                    f"{list(array.shape)}, expected {spec.dtype.name} [{expected}]. Correct "
                    "arrays(), or example_spec()"
                )
            if spec.dtype.is_integer and array.size:
                for value in (array.min(), array.max()):
                    if not spec.dtype.min <= value <= spec.dtype.max:
                        raise errors.InputError(
                            f"{type(self).__name__}: field {name!r} of split {split!r} has the "
                            f"value {value}, which {spec.dtype.name} cannot hold. Correct "
                            "arrays(), or example_spec()"
                        )
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise errors.InputError(
                f"{type(self).__name__}: fields of split {split!r} have different lengths: {listed}"
            )
        return next(iter(lengths.values()))

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`."""
        del batch_size, seed
        arrays = self._split(split)
        with tf.device("CPU:0"):
            fields = {
                name: tf.convert_to_tensor(arrays[name], spec.dtype)
                for name, spec in self.example_spec().items()
            }
        return rows.map(
            _as_graph(
                lambda row: {name: tf.gather(array, row["index"]) for name, array in fields.items()}
            )
        )

    def _split(self, split: str) -> Mapping[str, np.ndarray[Any, Any]]:
        splits = self.arrays()
        check_split(type(self).__name__, split, splits)
        return splits[split]


def _fits(array: np.ndarray[Any, Any], spec: tf.TensorSpec) -> bool:
    """Return whether an array holds examples of a spec along its first axis."""
    if not array.ndim or not spec.shape.is_compatible_with(array.shape[1:]):
        return False
    if spec.dtype == tf.string:
        return array.dtype.kind in "OSU"
    return np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind")


def _next_readable(index: int, unreadable: Collection[int], count: int) -> int:
    """Return the first example from `index` on, in a circle, that can be read."""
    for further in range(count):
        if (index + further) % count not in unreadable:
            return (index + further) % count
    raise errors.InputError(f"none of the {count} examples can be read")


def _permute(place: tf.Tensor, epoch: tf.Tensor, count: int, seed: int | None) -> tf.Tensor:
    """Return the example at `place` in the order of `epoch`; all int64 [B]."""
    if seed is None:
        return place
    # The permutation is only as random as its key, and epochs are 0, 1, 2, …
    state = _mix(_mix(tf.constant(seed % 2**64, tf.uint64)) + tf.cast(epoch, tf.uint64))
    key = [_mix(state + tf.constant(n, tf.uint64)) for n in range(3)]
    # tf.random.experimental.index_shuffle is this operation, but refuses a key per index.
    return tf.raw_ops.RandomIndexShuffle(
        index=place,
        seed=tf.stack(key, 1),
        max_index=tf.constant(count - 1, tf.int64),
        rounds=_SHUFFLE_ROUNDS,
    )


def _mix(number: tf.Tensor) -> tf.Tensor:
    """Return a uint64 in which every bit depends on every bit of `number`.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators (SplitMix64).
    """
    number += tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        shifted = tf.bitwise.right_shift(number, tf.constant(shift, tf.uint64))
        number = tf.bitwise.bitwise_xor(number, shifted) * tf.constant(factor, tf.uint64)
    return number
