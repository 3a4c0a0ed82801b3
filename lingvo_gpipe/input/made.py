"""Made-up examples in place of data, to rehearse a run before its data is there (`--data=made`).

`Input.Params.made` returns the params of an input whose examples have the shapes and ranges of the
real ones. They are a function of its params alone, so such a run is resumed, and repeated, as any
other. Its folder, and an exported model, hold `FILE`; and its params name the made input, so that
it is not continued with real data.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, network
from lingvo_gpipe.input import Batch, Indexed, Input, as_written
from lingvo_gpipe.input.serving import Program, Serving
from lingvo_gpipe.network import value_ranges

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

FILE = "made_data.txt"
NOTICE = "the examples of this run are made up (--data=made): "
_TEXT = f"{NOTICE}its numbers say nothing about the model\n"
"""What `FILE` holds; a run goes on only where it holds the same."""
_TRAINING_BATCHES, _HELD_OUT_BATCHES = 16, 2
_Task = TypeVar("_Task", bound="Task.Params")
_Params = TypeVar("_Params", bound=Input.Params)


class Made(Input):
    """Comes before the input whose examples are made; a run's folder says that they are."""

    asset_names: tuple[str, ...] = (FILE,)
    contents = "random numbers"
    """What its examples are, as a line for the user says it."""

    class Params(Input.Params):
        """Params of Made."""

    def check_there(self, split: str | None = None) -> None:
        """Nothing is missing."""
        del split

    def assets(self) -> dict[str, bytes]:
        """Return a notice, and what the input has."""
        return {**super().assets(), FILE: _TEXT.encode()}

    @classmethod
    def notice(cls) -> str:
        """Return what the user of a run must know of its data."""
        return f"{NOTICE}{cls.contents}. Its numbers say nothing about the model"


def task(params: _Task) -> _Task:
    """Return a copy of a task whose input makes up its examples; a task that does stays as it is.

    Raises:
        InputError: there are no made examples for its input.
    """
    made = params.copy()
    if not is_made(params):
        made.input = params.input.made(made)
    return made


def is_made(params: Task.Params) -> bool:
    """Return whether the examples of a task are made up."""
    return issubclass(cast(type, params.input.owner), Made)


def notices(params: Task.Params) -> Iterator[str]:
    """Yield what the user of a run must know of its data: nothing where it is not made."""
    if is_made(params):
        yield cast(type[Made], params.input.owner).notice()


def like(kind: type[_Params], params: Input.Params, **fields: Any) -> _Params:
    """Return params of class `kind` with those fields of `params` that it has.

    Args:
        kind: class of the result.
        params: of an input.
        fields: fields that are set otherwise.
    """
    shared = {name: getattr(params, name) for name in kind.fields() if name in params.fields()}
    return kind(**{**shared, **fields})


def num_examples(params: Input.Params) -> dict[str, int]:
    """Return fields `examples` and `held_out` for this mini-batch; the last of a split is smaller.

    >>> num_examples(Input.Params(batch_size=8))
    {'examples': 132, 'held_out': 20}
    """
    size = params.batch_size
    held_out = params.eval_batch_size or size
    return {
        "examples": _TRAINING_BATCHES * size + (size + 1) // 2,
        "held_out": _HELD_OUT_BATCHES * held_out + (held_out + 1) // 2,
    }


def size_of(task_params: Task.Params, field: str) -> int | None:
    """Return the smallest value of a field of the model's layers, such as `classes`."""
    paths = task_params.model.iter_paths()
    values = [value for _, value, declared in paths if declared.name == field]
    return min((value for value in values if isinstance(value, int)), default=None)


class MadeExamples(Made, Indexed):
    """Examples with the fields of another input: random numbers, in the range that layers take.

    An input has others where its `Params.made` returns them.
    """

    class Params(Made.Params, Indexed.Params):
        """Params of MadeExamples."""

        like: Input.Params = hyperparams.required("The input whose fields these have.")
        ranges: dict[str, int] = hyperparams.field(
            {}, "Field → number of values that its integers have; one that is not named holds 0."
        )
        examples: int = hyperparams.required("Examples to train on.")
        held_out: int = hyperparams.required("Examples of each other split.")

    params: Params

    @classmethod
    def of(cls, params: Input.Params, task_params: Task.Params) -> Params:
        """Return the params for an input; see `Input.Params.made`."""
        fields = params.instantiate().element_spec(training=True)
        wired = network.analyze(network.uncut(task_params.model), fields)
        ranges: dict[str, int] = {}
        for found in value_ranges.of_fields(wired.layers, wired.wiring):
            size = found.values.size
            ranges[found.field] = min(size, ranges.get(found.field, size))
        return like(cls.Params, params, like=params, ranges=ranges, **num_examples(params))

    @functools.cached_property
    def _like(self) -> Input:
        source: Input = self.params.like.instantiate()
        return source

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels."""
        return self._like.class_names

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""
        kind, size = self.params.like.class_name(), self.params.like.batch_size
        specs = {}
        for name, spec in self._like.element_spec(training=True).items():
            if spec.shape.rank == 0 or spec.shape[0] != size or spec.dtype == tf.string:
                raise errors.InputError(
                    f"{kind} has no made examples, since its field {name!r} is not "
                    f"[input.batch_size, …] of numbers. Define Params.made in it"
                )
            specs[name] = tf.TensorSpec(spec.shape[1:], spec.dtype)
        return specs

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split; each name is one."""
        is_training = split == self.params.train_split
        return self.params.examples if is_training else self.params.held_out

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`."""
        del seed
        specs, of_split = self.example_spec(), zlib.crc32(split.encode())

        @as_written
        def example(row: Mapping[str, tf.Tensor]) -> Batch:
            made = {}
            for number, (name, spec) in enumerate(specs.items()):
                key = tf.stack([row["index"], tf.constant(of_split + number, tf.int64)])
                made[name] = _random(spec, key, self.params.ranges.get(name, 1))
            return made

        return rows.unbatch().map(example, num_parallel_calls=2).batch(batch_size)

    def serving(self) -> Serving | Program:
        """Return how an exported model is called: as with the data."""
        return self._like.serving()

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return samples of a mini-batch, as the input shows them."""
        return self._like.pictures(batch)


def _random(spec: tf.TensorSpec, seed: tf.Tensor, size: int) -> tf.Tensor:
    """Return random numbers of a spec: of [0, 1), or integers of [0, size)."""
    if spec.dtype.is_floating:
        numbers = tf.random.stateless_uniform(spec.shape, seed)
        return tf.cast(numbers, spec.dtype)
    numbers = tf.random.stateless_uniform(spec.shape, seed, 0, size, tf.int32)
    return tf.cast(numbers, spec.dtype)
