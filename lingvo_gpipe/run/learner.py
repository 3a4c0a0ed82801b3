"""One update as TensorFlow functions: a network, its updater and the number of updates done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import optim, pipelining
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.run import keys


class Learner:
    """A network in training.

    An update of one mini-batch is one graph. One of several runs the same accumulating graph for
    each, and a last graph for the weights: it grows with no number of mini-batches.

    Attributes:
        pipe: the network.
        updater: its slots, averages and loss scale.
        step: int64 variable, updates done.
    """

    def __init__(self, params: Any, fields: Mapping[str, Any]) -> None:
        """Make network and updater, each variable on its cell's device.

        Args:
            params: a `Task.Params`.
            fields: a mini-batch's fields, name → nest of `tf.TensorSpec`.
        """
        self.pipe: pipelining.PipeliningLayer = params.model.instantiate()
        self.pipe.build(fields)
        self.updater = optim.Updater(
            params.train,
            variables=self.pipe.weights,
            specs=self.pipe.specs,
            device_of=self.pipe.device_of,
            layer_of=self.pipe.layer_of,
            state=self.pipe.state,
        )
        with tf.device("CPU:0"):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._guarded = params.train.finite_guard
        self._whole = outer_function.OuterFunction(self._update_by_one)
        self._weigh = outer_function.OuterFunction(self._weights)
        self._accumulate = outer_function.OuterFunction(self._gradients)
        self._add = outer_function.OuterFunction(self._sum)
        self._finish = outer_function.OuterFunction(self._apply)

    @property
    def objects(self) -> dict[str, tf.Variable]:
        """Every variable that a checkpoint holds, by key; named by paths alone."""
        return keys.of_training(self.pipe.by_path, self.updater) | {keys.STEP: self.step}

    @property
    def num_traces(self) -> int:
        """Traces of graphs and of the programs in them so far."""
        own = (self._whole, self._weigh, self._accumulate, self._add, self._finish)
        programs = self.pipe.trace_counts()["programs"] + self.updater.num_traces
        return programs + sum(function.traces for function in own)

    def update(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Do one update.

        Args:
            batches: the mini-batches of the update, each name → nest of tensors.

        Returns:
            Tensors: `loss`, `losses` and `sums` as of `pipelining.Result`, over all mini-batches;
            `weights`, by which the losses were divided, by name; and `update`, what
            `Updater.apply` tells.
        """
        if len(batches) == 1:
            return self._whole(dict(batches[0]))
        weights = self._weigh(dict(batches[0]))
        for batch in batches[1:]:
            weights = self._add(weights, self._weigh(dict(batch)))
        gradients = {path: self._zeros(path, v) for path, v in self.pipe.weights.items()}
        first = tf.constant(0)
        total: dict[str, Any] | None = None
        for batch in batches:
            gradients, told, first = self._accumulate(dict(batch), gradients, weights, first)
            total = told if total is None else self._add(total, told)
        return self._finish(gradients, total) | {"weights": weights}

    def begin_from_weights(self) -> None:
        """Let averages, and slots that begin as their weight, begin from the present weights."""
        for path, average in self.updater.averages.items():
            average.assign(self.pipe.by_path[path])
        for (path, slot), spec in self.updater.optimizer.slots(self.pipe.specs.values()).items():
            if spec.initial is None:
                self.updater.slots[path, slot].assign(self.pipe.by_path[path])

    def _zeros(self, path: str, variable: tf.Variable) -> tf.Tensor:
        with tf.device(self.pipe.device_of(path)):
            return tf.zeros(variable.shape, variable.dtype)

    def _update_by_one(self, batch: dict[str, Any]) -> dict[str, Any]:
        weights = self.pipe.loss_weights(batch)
        result = self.pipe.value_and_gradients(
            batch,
            step=self.step.read_value(),
            weights=weights,
            loss_scale=self.updater.loss_scale,
        )
        return self._apply(result.gradients, _told(result)) | {"weights": weights}

    def _weights(self, batch: dict[str, Any]) -> dict[str, tf.Tensor]:
        return self.pipe.loss_weights(batch)

    def _gradients(
        self,
        batch: dict[str, Any],
        gradients: dict[str, tf.Tensor],
        weights: dict[str, tf.Tensor],
        first: tf.Tensor,
    ) -> tuple[dict[str, tf.Tensor], dict[str, Any], tf.Tensor]:
        result = self.pipe.value_and_gradients(
            batch,
            step=self.step.read_value(),
            weights=weights,
            first_micro_batch=first,
            accumulators=gradients,
            loss_scale=self.updater.loss_scale,
        )
        return result.gradients, _told(result), first + result.num_micro_batches

    def _sum(self, one: Any, other: Any) -> Any:
        return tf.nest.map_structure(tf.add, one, other)

    def _apply(self, gradients: dict[str, tf.Tensor], told: dict[str, Any]) -> dict[str, Any]:
        statistics = self.pipe.merge_moments(told["moments"])
        done = self.updater.apply(
            gradients,
            statistics,
            step=self.step.read_value(),
            loss_scale=self.updater.loss_scale,
        )
        # An update that changed nothing is none.
        counts = done["finite"] if self._guarded else tf.constant(True)
        self.step.assign_add(tf.cast(counts, tf.int64), read_value=False)
        return {"update": done, **{name: told[name] for name in ("loss", "losses", "sums")}}


def _told(result: pipelining.Result) -> dict[str, Any]:
    """Return what adds up over the mini-batches of an update."""
    return {
        "loss": result.loss,
        "losses": result.losses,
        "sums": result.sums,
        "moments": result.moments,
    }
