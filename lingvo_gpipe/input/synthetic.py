"""Synthetic examples in place of data, to rehearse a run before its data is there (`--data=made`).

`Input.Params.synthetic` returns the params of an input whose examples have the shapes and ranges of
the real ones. They are a function of its params alone, so such a run is resumed, and repeated, as
any other. Its folder, and an exported model, hold `FILE`; and its params name the synthetic input,
so that it is not continued with real data.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, network
from lingvo_gpipe.input.base import Input
from lingvo_gpipe.input.indexed import Indexed
from lingvo_gpipe.input.serving import Program, Serving
from lingvo_gpipe.nests import Batch
from lingvo_gpipe.network import value_ranges

if TYPE_CHECKING:
    from lingvo_gpipe.task import Task

FILE = "made_data.txt"
NOTICE = (
    "the examples of this run are made up (--data=made): its numbers say nothing about the model"
)
_TRAINING_BATCHES, _HELD_OUT_BATCHES = 16, 2
_CLASSES = 10  # where the recipe takes their number from its data
_DISTINCT = 32  # examples; so few that a network can learn them
_Task = TypeVar("_Task", bound="Task.Params")


class Synthetic(Input):
    """Comes before the input whose examples are synthetic; a run's folder says that they are."""

    asset_names: tuple[str, ...] = (FILE,)

    class Params(Input.Params):
        """Params of Synthetic."""

    def assets(self) -> dict[str, bytes]:
        """Return a notice, and what the input has."""
        return {**super().assets(), FILE: f"{NOTICE}\n".encode()}


def task(params: _Task) -> _Task:
    """Return a copy of a task with a synthetic input; one that has it already stays as it is.

    Raises:
        InputError: there are no synthetic examples for its input.
    """
    rehearsal = params.copy()
    if not is_synthetic(params):
        rehearsal.input = params.input.synthetic(rehearsal)
    return rehearsal


def is_synthetic(params: Task.Params) -> bool:
    """Return whether the examples of a task are synthetic."""
    return issubclass(cast(type, params.input.owner), Synthetic)


def notices(params: Task.Params) -> tuple[str, ...]:
    """Return what the user of a run must know of its data: nothing where it is real."""
    return (NOTICE,) if is_synthetic(params) else ()


class SyntheticExamples(Synthetic, Indexed):
    """Examples with the fields of another input: random numbers, in the range that layers take.

    An input has others where its `Params.synthetic` returns them.
    """

    class Params(Synthetic.Params, Indexed.Params):
        """Params of SyntheticExamples."""

        like: Input.Params = hyperparams.required("The input whose fields these have.")
        ranges: dict[str, int] = hyperparams.field(
            {}, "Field → number of values that its integers have; one that is not named holds 0."
        )

    params: Params

    @classmethod
    def of(cls, params: Input.Params, task_params: Task.Params) -> Params:
        """Return the params for an input; see `Input.Params.synthetic`."""
        model = task_params.model
        for path, value, declared in list(model.iter_paths()):
            if declared.name == "classes" and value is None:
                model.set_path(path, _CLASSES)
        wired = network.analyze(network.uncut(model), params.instantiate().element_spec())
        ranges: dict[str, int] = {}
        for field_range in value_ranges.of_fields(wired.layers, wired.wiring):
            size = field_range.values.size
            ranges[field_range.field] = min(size, ranges.get(field_range.field, size))
        shared = {name: params.get(name) for name in cls.Params.fields() if name in params.fields()}
        return cls.Params(**{**shared, "like": params, "ranges": ranges})

    @functools.cached_property
    def _like(self) -> Input:
        source: Input = self.params.like.instantiate()
        return source

    def example_spec(self) -> dict[str, tf.TensorSpec]:
        """Return the fields of one example, from params alone."""
        kind, size = self.params.like.class_name(), self.params.like.batch_size
        specs = {}
        for name, spec in self._like.element_spec(training=True).items():
            if spec.shape.rank == 0 or spec.shape[0] != size or spec.dtype == tf.string:
                raise errors.InputError(
                    f"{kind} has no synthetic examples, since its field {name!r} is not "
                    "[input.batch_size, …] of numbers. Define Params.synthetic in it"
                )
            specs[name] = tf.TensorSpec(spec.shape[1:], spec.dtype)
        return specs

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split, whose last mini-batch is smaller."""
        if split == self.params.train_split:
            size, count = self.params.batch_size, _TRAINING_BATCHES
        else:
            size = self.params.eval_batch_size or self.params.batch_size
            count = _HELD_OUT_BATCHES
        return count * size + (size + 1) // 2

    def read(
        self, rows: tf.data.Dataset, split: str, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return mini-batches for `rows`; see `Indexed.read`. All splits have the same examples."""
        del split, seed
        specs = self.example_spec()

        @tf.autograph.experimental.do_not_convert
        def example(row: Mapping[str, tf.Tensor]) -> Batch:
            fields = {}
            for number, (name, spec) in enumerate(specs.items()):
                seed = tf.stack([row["index"] % _DISTINCT, tf.constant(number, tf.int64)])
                size = self.params.ranges.get(name, 1)
                if spec.dtype.is_floating:
                    field = tf.random.stateless_uniform(spec.shape, seed)
                else:
                    field = tf.random.stateless_uniform(spec.shape, seed, 0, size, tf.int32)
                fields[name] = tf.cast(field, spec.dtype)
            return fields

        return rows.unbatch().map(example, num_parallel_calls=2).batch(batch_size)

    def serving(self) -> Serving | Program:
        """Return how an exported model is called: as with the data."""
        return self._like.serving()

    def pictures(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Return samples of a mini-batch, as the input shows them."""
        return self._like.pictures(batch)
