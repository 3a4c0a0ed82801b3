"""The metrics that `compile` was given, computed in the last cell, one micro-batch after the other.

The outputs of a whole mini-batch, such as the logits of a language model, may need more memory than
all else on a device. But nearly all metrics keep sums over examples: of correct answers, or the
counts of a curve. Then a micro-batch adds what its examples add, and no output leaves its cell.
Metrics that keep anything else read the outputs of the whole mini-batch, as in Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileMetrics

from lingvo_gpipe import hyperparams
from lingvo_gpipe.fitting.objective import PARTS, Names, Values, at
from lingvo_gpipe.keras_layers import masks

_KNOWN = ("keras.", "keras_hub.")  # a user's own class may keep more than its variables


class MetricSums(hyperparams.Opaque):
    """The metrics of `compile`, for mini-batches of one structure."""

    def __init__(self, model: Functional, compiled: CompileMetrics, names: Names) -> None:
        """Keep what computes them.

        Args:
            model: whose outputs are measured.
            compiled: the metrics; Keras has to have called them before.
            names: of what they compare.
        """
        self._model = model
        self._compiled = compiled
        self._names = names

    def of(self, values: Values) -> dict[str, tf.Tensor]:
        """Return what examples add to each variable, by its number."""
        zeros = [tf.zeros(v.shape, v.dtype) for v in self._compiled.variables]
        return {f"{number:03d}": v for number, v in enumerate(self._after(zeros, values))}

    def add(self, sums: dict[str, tf.Tensor]) -> None:
        """Add to the variables what `of` has returned for all examples of a mini-batch."""
        for variable, key in zip(self._compiled.variables, sorted(sums), strict=True):
            variable.assign(variable.value + sums[key])

    def are_sums(self, trials: Iterator[Values]) -> bool:
        """Return whether what a mini-batch adds is the sum of what its parts add.

        Args:
            trials: yields examples to try it with; the later ones if metrics refuse the earlier.
        """
        if all(type(m).__module__.startswith(_KNOWN) for m in self._compiled.metrics):
            for values in trials:
                with contextlib.suppress(Exception):  # what a metric raises, Keras raises later
                    return self._add_up(values)
        return False

    def _add_up(self, values: Values) -> bool:
        whole = list(self.of(values).values())
        parts = [
            self.of({name: value[part] for name, value in values.items()}).values()
            for part in PARTS
        ]
        apart = [sum(same) for same in zip(*parts, strict=True)]
        again = [
            after - before for after, before in zip(self._after(whole, values), whole, strict=True)
        ]
        return all(
            np.allclose(value, expected, rtol=1e-4, atol=1e-5)
            for added in (apart, again)
            for value, expected in zip(added, whole, strict=True)
        )

    def _after(self, state: list[tf.Tensor], values: Values) -> list[tf.Tensor]:
        """Return the variables after examples, which were `state` before."""
        names = self._names
        predictions = masks.with_masks(
            self._model,
            [values[name] for name in names.inputs],
            at(names.outputs, values),
        )
        labels, weights = at(names.labels, values), at(names.weights, values)
        after = self._compiled.stateless_update_state(state, labels, predictions, weights)
        return [tf.convert_to_tensor(value) for value in after]
