"""The metrics that `compile` was given, computed in the last cell, one micro-batch after the other.

The outputs of a whole mini-batch, such as the logits of a language model, may need more memory than
all else on a device. But nearly all metrics keep sums over examples: of correct answers, or the
counts of a curve. Then a micro-batch adds what its examples add, and no output leaves its cell.
Metrics that keep anything else read the outputs of the whole mini-batch, as in Keras.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from lingvo_gpipe import hyperparams
from lingvo_gpipe.fitting.objective import Names
from lingvo_gpipe.layers import base, trials
from lingvo_gpipe.layers.trials import Values

_KNOWN = ("keras.", "keras_hub.")  # a user's own class may keep more than its variables
_TOLERANCE = 1e-4


class MetricSums(hyperparams.Opaque):
    """The metrics of `compile`, for mini-batches of one structure."""

    def __init__(self, compiled: CompileMetrics, names: Names) -> None:
        """Keep what computes them.

        Args:
            compiled: the metrics; Keras has to have called them before.
            names: of what they compare.
        """
        self._compiled = compiled
        self._names = names

    def specs(self) -> tuple[base.MetricSpec, ...]:
        """Return a spec of each metric."""
        return tuple(
            base.MetricSpec(name, functools.partial(_result, metric))
            for name, metric in self._by_name()
        )

    def of(self, values: Values) -> dict[str, dict[str, tf.Tensor]]:
        """Return what examples add: name of a metric → number of its variable → value."""
        after = iter(self._after(self._zeros(), values))
        return {
            name: {f"{number:03d}": next(after) for number in range(len(metric.variables))}
            for name, metric in self._by_name()
        }

    def add(self, sums: Mapping[str, Mapping[str, tf.Tensor]]) -> None:
        """Add to the variables what `of` has returned for all examples of a mini-batch."""
        for name, metric in self._by_name():
            for variable, (_, added) in zip(
                metric.variables, sorted(sums[name].items()), strict=True
            ):
                variable.assign(variable.value + added)

    def are_sums(self, values: Mapping[str, tf.Tensor | tf.TensorSpec]) -> bool:
        """Return whether what a mini-batch adds is the sum of what its parts add.

        Args:
            values: see `trials.on_examples`.
        """
        metrics = self._compiled.metrics
        is_known = all(type(metric).__module__.startswith(_KNOWN) for metric in metrics)
        if is_known and len(set(map(id, metrics))) == len(metrics):  # one may serve two outputs
            with contextlib.suppress(Exception):  # what a metric raises, Keras raises later
                return trials.on_examples(self._add_up, values)
        return False

    def _add_up(self, values: Values) -> bool:
        zeros = self._zeros()
        once = self._after(zeros, values)
        twice = self._after(once, values)
        return trials.adds_up(
            lambda part: self._after(zeros, part), values, absolute=_TOLERANCE
        ) and all(
            np.allclose(after - before, before, _TOLERANCE, _TOLERANCE)
            for before, after in zip(once, twice, strict=True)
        )

    def _by_name(self) -> Iterator[tuple[str, keras.Metric]]:
        """Yield each metric with its name in the network."""
        return ((f"metric_{n}", metric) for n, metric in enumerate(self._compiled.metrics))

    def _zeros(self) -> list[tf.Tensor]:
        return [tf.zeros(v.shape, v.dtype) for v in self._compiled.variables]

    def _after(self, state: list[tf.Tensor], values: Values) -> list[tf.Tensor]:
        """Return the variables after examples, which were `state` before."""
        after = self._compiled.stateless_update_state(state, *self._names.arguments(values))
        return [tf.convert_to_tensor(value) for value in after]


def _result(metric: keras.Metric, sums: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return a metric of the examples whose sums these are."""
    return metric.stateless_result([value for _, value in sorted(sums.items())])
