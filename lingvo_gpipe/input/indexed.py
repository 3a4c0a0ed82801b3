"""Inputs whose examples are found by number: any position is reached without reading others.

Example number g of a run is in epoch g // n, and its place there is looked up in that epoch's
permutation. A batch may span two epochs: every example is seen once per epoch and none is dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.input.base import Input, check_split
from lingvo_gpipe.input.part import InputPart
from lingvo_gpipe.input.reading import Batches, Reading, Repair, as_written
from lingvo_gpipe.network.parts import Part

# Rounds of the permutation's block cipher; with 8, even 3 examples are permuted uniformly.
_SHUFFLE_ROUNDS = 8
_PREFETCH = 2


class Indexed(Input):
    """Base of inputs whose examples are found by number; subclasses define how they are read."""

    training_fields = (*Input.training_fields, "shuffle")

    class Params(Input.Params):
        """Fields of Indexed."""

        shuffle: bool = hyperparams.field(True, "A new order of the examples in each epoch.")
        train_split: str = hyperparams.field("train", "Part of the data that is trained on.")

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

    def explain(self, split: str, indices: np.ndarray[Any, Any]) -> str | None:
        """Return which of these examples cannot be read, and why; None: not known."""
        del split, indices
        return None

    def repair(self, split: str, seed: int | None) -> Repair | None:
        """Return what replaces examples that cannot be read; see `read`. None: they end a run."""
        del split, seed
        return None

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

        @as_written
        def rows_of(number: tf.Tensor) -> dict[str, tf.Tensor]:
            numbers = number * size + tf.range(places.start, places.stop, dtype=tf.int64)
            epoch = numbers // count
            return {"index": _permute(numbers % count, epoch, count, shuffle_seed), "epoch": epoch}

        rows = tf.data.Dataset.range(position, tf.int64.max).map(rows_of)
        return self._batches(rows, split, len(places), seed, position)

    def part(self, numbers: Mapping[str, Any]) -> InputPart:
        """Return what reads a part of each mini-batch; in training, only these examples."""
        return _IndexedPart(self, Part(**numbers))

    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; the last may be smaller."""
        size = batch_size or self.params.eval_batch_size or self.params.batch_size
        rows = tf.data.Dataset.range(self._counted(split)).batch(size)
        rows = rows.map(as_written(lambda index: {"index": index, "epoch": tf.zeros_like(index)}))
        return self._batches(rows, split, size, None)

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

    def _batches(
        self, rows: tf.data.Dataset, split: str, size: int, seed: int | None, first: int = 0
    ) -> Batches:
        def explain(number: int) -> str | None:
            row = rows.skip(number).take(1)
            return next((self.explain(split, each["index"].numpy()) for each in row), None)

        dataset = self.read(rows, split, size, seed).prefetch(_PREFETCH)
        return Batches(dataset, explain, self.repair(split, seed), first=first)


class _IndexedPart(InputPart):
    """The part of each mini-batch that one replica computes; in training, it reads no other."""

    whole: Indexed

    def batches(self, seed: int, position: int = 0) -> Reading:
        """Return its part of the mini-batches of training; see `Input.batches`."""
        specs = self.whole.example_spec().values()
        places = self.part.examples(self.whole.params.batch_size)
        if not all(spec.shape.is_fully_defined() for spec in specs):
            return super().batches(seed, position)  # padded alike, where a batch is padded
        return self.whole.training(seed, position, places)


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
        fields = self._split(split)
        for name, spec in self.example_spec().items():
            problem = _contradiction(spec, fields.get(name))
            if problem is not None:
                raise errors.InputError(
                    f"{type(self).__name__}: field {name!r} of split {split!r} {problem}. Correct "
                    "arrays(), or example_spec()"
                )
        lengths = {name: len(array) for name, array in fields.items()}
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
        with tf.device("CPU:0"):
            fields = {
                name: tf.convert_to_tensor(self._split(split)[name], spec.dtype)
                for name, spec in self.example_spec().items()
            }
        return rows.map(
            as_written(
                lambda row: {name: tf.gather(array, row["index"]) for name, array in fields.items()}
            )
        )

    def _split(self, split: str) -> Mapping[str, np.ndarray[Any, Any]]:
        splits = self.arrays()
        check_split(type(self).__name__, split, splits)
        return splits[split]


def _contradiction(spec: tf.TensorSpec, array: Any) -> str | None:
    """Return how the array of a field contradicts the spec of one example; None: it fits."""
    if array is None:
        return "has no array"
    try:
        found = np.asarray(array)
    except ValueError:
        return "is not an array: its rows differ in length"
    expected = f"expected {spec.dtype.name} {['n', *spec.shape]}".replace("'", "")
    got = f"is {found.dtype} {list(found.shape)}, {expected}"
    if not found.ndim or not spec.shape.is_compatible_with(found.shape[1:]):
        return got
    wanted = spec.dtype.as_numpy_dtype
    if spec.dtype == tf.string:
        return None if found.dtype.kind in "OSU" else got
    if found.dtype == wanted:
        return None
    if found.dtype.kind in "iu" and spec.dtype.is_integer:
        limits = np.iinfo(wanted)
        least, most = found.min(initial=0), found.max(initial=0)
        outside = most if most > limits.max else least
        fits = limits.min <= least and most <= limits.max
        return None if fits else f"has the value {outside}, which {spec.dtype.name} cannot hold"
    return None if np.can_cast(found.dtype, wanted, "same_kind") else got


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
