"""Input: mini-batches as a pure function of (seed, position).

Position counts the mini-batches drawn since a run began; it is all that a checkpoint must hold of
the data. Example number g of a run is in epoch g // n, and its place there is looked up in that
epoch's permutation, so any position is reached without reading the examples before it. A batch
may span two epochs: every example is seen once per epoch and none is dropped.
"""

from __future__ import annotations

import abc
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe.nests import Batch
from lingvo_gpipe.serving import Program, Serving

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

# What those who write an input need, the names of other modules included.
__all__ = (
    "Batch",
    "Batches",
    "InMemory",
    "Indexed",
    "Input",
    "Program",
    "Reading",
    "Repair",
    "Serving",
    "as_written",
    "check_split",
    "plain",
)

# Rounds of the permutation's block cipher; with 8, even 3 examples are permuted uniformly.
_SHUFFLE_ROUNDS = 8
_PREFETCH = 2
_Function = TypeVar("_Function", bound=Callable[..., Any])


# (mini-batches as read, counts of a `Batches`, which it increases) → whole mini-batches.
Repair: TypeAlias = "Callable[[Iterator[Batch], dict[str, int]], Iterator[Batch]]"


class Reading(abc.ABC):
    """Mini-batches that are read one after the other; an error of reading is a user's mistake.

    Attributes:
        counts: examples that could not be read so far, by what became of them (`replaced`,
            `left_out`); empty where the input allows none.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Begin to read."""


class Batches(Reading):
    """Mini-batches of a `tf.data.Dataset`.

    Attributes:
        dataset: dicts of tensors as they are read, before unreadable examples are replaced.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        explain: Callable[[int], str | None],
        repair: Repair | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: dataset of mini-batches.
            explain: returns what is wrong with the batch of a number; None: not known.
            repair: replaces or leaves out examples that cannot be read, and counts them.
            first: position of its first mini-batch; `explain` counts from there.
        """
        super().__init__()
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False  # an iterator's end may wait for it, up to a minute
        self.dataset = dataset.with_options(options)
        self._explain = explain
        self._repair = repair
        self._first = first

    def __iter__(self) -> Iterator[Batch]:
        """Begin to read; unreadable examples are replaced or left out."""
        return self._read() if self._repair is None else self._repair(self._read(), self.counts)

    def _read(self) -> Iterator[Batch]:
        source = iter(self.dataset)
        number = 0
        while True:
            try:
                batch = next(source)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                text = self._explain(number) or plain(error)
                place = self._first + number
                raise errors.InputError(f"mini-batch {place} cannot be read: {text}") from error
            yield batch
            number += 1


class Input(hyperparams.Configurable, abc.ABC):
    """Base of every input: named fields of mini-batches.

    Attributes:
        asset_names: names of the files that a run keeps; see `assets`.
    """

    asset_names: tuple[str, ...] = ()

    class Params(hyperparams.Configurable.Params):
        """Fields that every input has."""

        batch_size: int = hyperparams.required("Examples in a mini-batch of training.")
        eval_batch_size: int | None = hyperparams.field(
            None, "Examples in a mini-batch of evaluation; None: those of training."
        )
        on_worker: bool = hyperparams.field(
            False, "The worker of the first cell reads the data, not the chief; it needs a copy."
        )

        def made(self, task_params: Task.Params) -> Input.Params:
            """Return params of an input with made-up examples in place of this one's.

            Args:
                task_params: the task, whose layers say which labels and ids they take.

            Raises:
                InputError: such examples cannot be made.
            """
            from lingvo_gpipe import made

            return made.MadeExamples.of(self, task_params)

    def __init__(self, params: Input.Params) -> None:
        super().__init__(params)
        for name in ("batch_size", "eval_batch_size"):
            size = getattr(params, name)
            if size is not None and size < 1:
                raise errors.InputError(f"input.{name}={size} is too small. Use 1 or more")

    @abc.abstractmethod
    def element_spec(self, training: bool = True) -> dict[str, tf.TensorSpec]:
        """Return the fields of one mini-batch, from params alone; evaluation's last may be less."""

    @abc.abstractmethod
    def batches(self, seed: int, position: int = 0) -> Batches:
        """Return the endless mini-batches of training from number `position` on."""

    @abc.abstractmethod
    def evaluation(self, split: str, batch_size: int | None = None) -> Batches:
        """Return mini-batches with every example of `split` once; the last may be smaller."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels; empty: not known."""
        return ()

    def complete(self, task_params: Task.Params) -> None:
        """Set the fields of a task that only the data determines, such as the number of classes.

        Raises:
            InputError: a field is set already and does not fit the data.
        """
        del task_params

    def check_there(self, split: str | None = None) -> None:
        """Refuse data that is missing, from a look at the disk that takes no time.

        The trainer calls it before it imports TensorFlow, so it should do without.

        Args:
            split: part of the data that will be read; None: that of training.

        Raises:
            InputError: the data cannot be read, and will not be made.
        """
        del split

    def is_there(self) -> bool:
        """Return whether `complete` finds what it needs on the disk, without making or reading it.

        If so, describe and plan show the sizes of the data in place of those declared.
        """
        return False

    def constants(self) -> Mapping[str, float]:
        """Return numbers of the data that are written to TensorBoard each time a run starts."""
        return {}

    def assets(self) -> Mapping[str, bytes]:
        """Return the files that define the model's ids: `asset_names` → content.

        They are kept in the run's folder, where different files of these names are refused, and
        exported with the model.
        """
        return {}

    def fingerprint(self, split: str | None = None) -> dict[str, str]:
        """Return what all copies of the data have in common: short texts by what they describe.

        Where a worker reads the data, a copy that differs from the chief's is refused.

        Args:
            split: part of the data that is read; None: that of training.
        """
        del split
        return {
            name: f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in self.assets().items()
        }

    def recall(self, assets: Mapping[str, bytes]) -> None:
        """Use what a run keeps in place of the data, which may be gone: serving needs no more.

        Args:
            assets: all of them, as `assets` returned them when the run began.
        """
        del assets

    def serving(self) -> Serving | Program:
        """Return how an exported model is called.

        Raises:
            InputError: this input cannot be served.
        """
        raise errors.InputError(
            f"a model on {type(self).__name__} cannot be exported: that input defines no serving. "
            "Add the method `serving` to its class"
        )

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return samples of a mini-batch as used in training: name → uint8 [n, H, W, C]."""
        del batch
        return {}


class Indexed(Input):
    """Base of inputs whose examples are found by number; subclasses define how they are read."""

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
        """Return mini-batches for `rows`.

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
        split, size = self.params.train_split, self.params.batch_size
        count = self._counted(split)
        shuffle_seed = seed if self.params.shuffle else None

        @as_written
        def rows_of(number: tf.Tensor) -> dict[str, tf.Tensor]:
            numbers = number * size + tf.range(size, dtype=tf.int64)
            epoch = numbers // count
            return {"index": _permute(numbers % count, epoch, count, shuffle_seed), "epoch": epoch}

        rows = tf.data.Dataset.range(position, tf.int64.max).map(rows_of)
        return self._batches(rows, split, size, seed, position)

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


def as_written(function: _Function) -> _Function:
    """Keep AutoGraph out of a function of a `tf.data.Dataset`.

    It would convert nothing, and writes each function that it converts to a temporary file, which
    a process that is killed leaves behind.
    """
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


def check_split(where: str, split: str, splits: Collection[str]) -> None:
    """Refuse a split that does not exist.

    Raises:
        InputError: names those that do, and the fields that choose one.
    """
    if split not in splits:
        raise errors.InputError(
            f"{where} has no split {split!r}; there are {', '.join(sorted(splits)) or 'none'}. Add "
            "it to the data, or name another by --params_override=eval.split=NAME, or "
            "input.train_split=NAME for training"
        )


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


# What TensorFlow says about its graphs, before and after the message itself.
_ABOUT_GRAPHS = re.compile(
    r"Graph execution error:|Detected at node |  File |<stack tr|\s*\[\[|\s*$"
)
_PREFIX = re.compile(r"Error in user-defined function passed to .*? with iterator: \S+: ")
_ASSERTION = re.compile(r"assertion failed: \[(.*?)\].*")


def plain(error: tf.errors.OpError) -> str:
    """Return the line of TensorFlow's message that says what is wrong."""
    lines = [line for line in error.message.splitlines() if not _ABOUT_GRAPHS.match(line)]
    line = errors.without_graph_names((lines or [error.message.strip()])[0])
    return _ASSERTION.sub(r"\1", _PREFIX.sub("", line)).strip().rstrip(".")
