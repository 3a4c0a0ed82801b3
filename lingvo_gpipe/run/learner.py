"""One update as TensorFlow functions: a network, its updater and the number of updates."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import tensorflow as tf

from lingvo_gpipe import errors, optim, packing, pipelining
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.nests import Nest, SpecNest, differentiable
from lingvo_gpipe.network import micro_batches, parts
from lingvo_gpipe.network.wiring import FIELD
from lingvo_gpipe.run.checkpoints import keys
from lingvo_gpipe.task import Task

_Summed = TypeVar("_Summed")


class UpdateResult(NamedTuple):
    """Tensors that describe an update, over all of its mini-batches.

    Attributes:
        loss: as in `pipelining.Result`.
        losses: as in `pipelining.Result`.
        sums: as in `pipelining.Result`.
        weights: divisor of each loss, by name.
        scalars: as `Updater.apply` returns them.
    """

    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    sums: dict[str, Nest]
    weights: dict[str, tf.Tensor]
    scalars: dict[str, tf.Tensor]


class _Sums(NamedTuple):
    """What is summed over the mini-batches of an update, as in `pipelining.Result`."""

    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    sums: dict[str, Nest]
    moments: dict[str, Nest]


class NonfiniteField(NamedTuple):
    """Where a mini-batch has a value that is not finite.

    Attributes:
        batch: number of the mini-batch in the update.
        name: name of the field.
        row: number of the example.
    """

    batch: int
    name: str
    row: int


class LastBatch(NamedTuple):
    """The last mini-batch of an update.

    Attributes:
        begun_s: when it began, in seconds since 1970.
        num_batches: number of mini-batches of the update.
    """

    begun_s: float
    num_batches: int


class Learner:
    """A network in training.

    An update of one mini-batch is one graph. An update of several mini-batches runs one
    accumulating graph for each, then another graph for the weights: no graph grows with their
    number.

    Attributes:
        pipe: the network.
        updater: its slots, averages and loss scale.
        step: int64 variable, number of updates.
        last_batch: when the last mini-batch of the last update began.
    """

    def __init__(self, params: Task.Params, fields: Mapping[str, SpecNest]) -> None:
        """Make network and updater, each variable on its cell's device.

        Args:
            params: params of the task.
            fields: a mini-batch's fields, name → nest of `tf.TensorSpec`.
        """
        self.pipe: pipelining.PipeliningLayer = params.model.instantiate()
        self.pipe.build(fields)
        self.updater = optim.Updater(
            params.train,
            variables=self.pipe.weights,
            specs=self.pipe.analysis.variables,
            device_of=self.pipe.executor.device_of,
            layer_of=self.pipe.analysis.layer_of,
            state=self.pipe.state,
        )
        with tf.device("CPU:0"):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.last_batch = LastBatch(0.0, 1)
        self._params = params.train.copy().freeze()
        self._update_by_one = outer_function.OuterFunction(self._update_by_one_batch, assigns=True)
        self._loss_weights = outer_function.OuterFunction(self._loss_weights_of)
        self._accumulate = outer_function.OuterFunction(self._accumulate_batch)
        self._add_weights = outer_function.OuterFunction(_added)
        self._add_sums = outer_function.OuterFunction(self._added_sums)
        self._apply = outer_function.OuterFunction(self._apply_gradients, assigns=True)

    @property
    def variables(self) -> dict[str, packing.Variable]:
        """Every variable that a checkpoint holds, by key."""
        return keys.of_training(self.pipe.by_path, self.updater) | {keys.STEP: self.step}

    @functools.cached_property
    def saved_parts(self) -> dict[str, keys.Part]:
        """Where checkpoints hold the variables of layers in slices, by key."""
        analysis = self.pipe.analysis
        return keys.parts(analysis.params, analysis.fields, analysis.variables, self.updater)

    @property
    def num_traces(self) -> int:
        """Number of traces so far, of graphs and of the programs in them."""
        functions = (
            self._update_by_one,
            self._loss_weights,
            self._accumulate,
            self._add_weights,
            self._add_sums,
            self._apply,
        )
        programs = self.pipe.executor.num_traces + self.updater.num_traces
        return programs + sum(function.traces for function in functions)

    def update(self, batches: Sequence[Mapping[str, Nest]]) -> UpdateResult:
        """Do one update.

        Args:
            batches: the mini-batches of the update, each name → nest of tensors.
        """
        for batch in batches:
            self.pipe.analysis.check_values(*parts.of_batch(batch))
        try:
            return self._update(batches)
        except tf.errors.OpError as error:
            raise self._explained(error, batches) from error

    def first_nonfinite(self, batches: Sequence[Mapping[str, Nest]], step: int) -> str | None:
        """Name where a value of an update first stops being finite; None: nowhere.

        Args:
            batches: the mini-batches of the update.
            step: number of the update.
        """
        for batch, first in zip(batches, self._first_micro_batches(batches), strict=True):
            place = self.pipe.first_nonfinite(batch, step=step, first_micro_batch=first)
            if place != "nowhere":
                return place
        return None

    def nonfinite_field(self, batches: Sequence[Mapping[str, Nest]]) -> NonfiniteField | None:
        """Return the first value of mini-batches that is not finite; None: all are.

        Only fields that a layer reads count: values that nothing reads do no harm.

        Args:
            batches: the mini-batches of the update.
        """
        wiring = self.pipe.analysis.wiring
        versions = [wiring.versions[version] for reads in wiring.reads for version in reads]
        names = {version.name for version in versions if version.producer == FIELD}
        for number, batch in enumerate(batches):
            for name in sorted(names):
                for tensor in differentiable(batch[name]):
                    with tf.device(tensor.device):
                        places = tf.where(~tf.math.is_finite(tf.abs(tensor)))
                    if len(places):
                        return NonfiniteField(number, name, int(tf.reduce_min(places[:, 0])))
        return None

    def _first_micro_batches(self, batches: Sequence[Mapping[str, Nest]]) -> list[int]:
        """Return the number of each mini-batch's first micro-batch in the update."""
        counts = (
            len(micro_batches.sizes_of(self.pipe.params, *parts.of_batch(batch)))
            for batch in batches[:-1]
        )
        return list(itertools.accumulate(counts, initial=0))

    def _explained(
        self, error: tf.errors.OpError, batches: Sequence[Mapping[str, Nest]]
    ) -> errors.UserError:
        """Return the cause of an error: that of the first mini-batch that fails again."""
        for batch, first in zip(batches, self._first_micro_batches(batches), strict=True):
            cause = self.pipe.explain(
                error, batch, step=self.step.read_value(), first_micro_batch=first
            )
            if not isinstance(cause, errors.StepError) or cause.micro_batch is not None:
                break
        return cause

    def _update(self, batches: Sequence[Mapping[str, Nest]]) -> UpdateResult:
        if len(batches) == 1:
            self.last_batch = LastBatch(time.time(), 1)
            result: UpdateResult = self._update_by_one(parts.of_batch(batches[0]))
            return result
        weights: dict[str, tf.Tensor] | None = None
        for batch in batches:
            of_batch: dict[str, tf.Tensor] = self._loss_weights(parts.of_batch(batch))
            weights = of_batch if weights is None else self._add_weights(weights, of_batch)
        gradients = {path: self._zeros(path, v) for path, v in self.pipe.weights.items()}
        first = tf.constant(0)
        total: _Sums | None = None
        for batch in batches:
            self.last_batch = LastBatch(time.time(), len(batches))
            gradients, sums, first = self._accumulate(
                parts.of_batch(batch), gradients, weights, first
            )
            total = sums if total is None else self._add_sums(total, sums)
        result = self._apply(gradients, total, weights)
        return result

    def reset_to_weights(self) -> None:
        """Assign the current weights to averages, and to slots that begin as their weight."""
        outer_function.OuterFunction(self._reset, assigns=True)()

    def _reset(self) -> None:
        values = packing.read(self.pipe.by_path)
        specs = self.updater.optimizer.slots(self.pipe.analysis.variables.values())
        packing.assign(
            [(average, values[path]) for path, average in self.updater.averages.items()]
            + [
                (self.updater.slots[path, slot], values[path])
                for (path, slot), spec in specs.items()
                if spec.initial is None
            ]
        )

    def _zeros(self, path: str, variable: packing.Variable) -> tf.Tensor:
        with tf.device(self.pipe.executor.device_of(path)):
            return tf.zeros(variable.shape, variable.dtype)

    def _update_by_one_batch(self, batch: parts.Batch) -> UpdateResult:
        weights, step = self.pipe.loss_weights(batch), self.step.read_value()
        result = self.pipe.value_and_gradients(
            batch,
            step=step,
            loss_weights=weights,
            loss_scale=self.updater.loss_scale,
        )
        return self._updated(result.gradients, _sums(result), weights, step)

    def _loss_weights_of(self, batch: parts.Batch) -> dict[str, tf.Tensor]:
        return self.pipe.loss_weights(batch)

    def _accumulate_batch(
        self,
        batch: parts.Batch,
        gradients: dict[str, tf.Tensor],
        weights: dict[str, tf.Tensor],
        first: tf.Tensor,
    ) -> tuple[dict[str, tf.Tensor], _Sums, tf.Tensor]:
        """Add a mini-batch's gradients; `first` is the number of its first micro-batch."""
        result = self.pipe.value_and_gradients(
            batch,
            step=self.step.read_value(),
            loss_weights=weights,
            first_micro_batch=first,
            accumulators=gradients,
            loss_scale=self.updater.loss_scale,
        )
        return result.gradients, _sums(result), first + result.num_micro_batches

    def _added_sums(self, one: _Sums, other: _Sums) -> _Sums:
        return _Sums(
            one.loss + other.loss,
            _added(one.losses, other.losses),
            _added(one.sums, other.sums),
            self.pipe.add_moments(one.moments, other.moments),
        )

    def _apply_gradients(
        self, gradients: dict[str, tf.Tensor], sums: _Sums, weights: dict[str, tf.Tensor]
    ) -> UpdateResult:
        return self._updated(gradients, sums, weights, self.step.read_value())

    def _updated(
        self,
        gradients: dict[str, tf.Tensor],
        sums: _Sums,
        weights: dict[str, tf.Tensor],
        step: tf.Tensor,
    ) -> UpdateResult:
        """Assign what the update changes; `step` is the only value of the number that is read."""
        statistics = self.pipe.merge_moments(sums.moments)
        scalars = self.updater.apply(
            gradients,
            statistics,
            step=step,
            loss_scale=self.updater.loss_scale,
        )
        # An update that changed nothing does not count.
        counts = scalars["finite"] if self._params.finite_guard else tf.constant(True)
        self.step.assign(step + tf.cast(counts, tf.int64), read_value=False)
        return UpdateResult(sums.loss, sums.losses, sums.sums, weights, scalars)


def _sums(result: pipelining.Result) -> _Sums:
    return _Sums(result.loss, result.losses, result.sums, result.moments)


def _added(one: _Summed, other: _Summed) -> _Summed:
    total: _Summed = tf.nest.map_structure(tf.add, one, other)
    return total
