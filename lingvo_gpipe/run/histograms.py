"""Histograms of weights and gradients: counts in buckets, made on the device of each weight.

Only the counts, the least and the largest value reach this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import packing, pipelining
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import parts

Array = np.ndarray[Any, np.dtype[Any]]
_BUCKETS = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """How often values occur.

    Attributes:
        edges: [buckets + 1], rising.
        counts: [buckets].
    """

    edges: Array
    counts: Array


class Histograms:
    """Counts the weights of a network, and their gradients for a mini-batch.

    It computes the gradients once more, apart from the update, which stays as it is. Where losses
    are scaled, the scale is divided out again: without it, gradients in float16 would vanish.
    """

    def __init__(
        self,
        pipe: pipelining.PipeliningLayer,
        loss_scale: Callable[[], tf.Tensor | None] = lambda: None,
    ) -> None:
        """Trace nothing yet.

        Args:
            pipe: the network.
            loss_scale: returns the present factor on its losses; None: there is no factor.
        """
        self._pipe = pipe
        self._loss_scale = loss_scale
        self._function = outer_function.OuterFunction(self._counts)

    def __call__(self, batch: Mapping[str, Nest], step: tf.Tensor) -> dict[str, Histogram]:
        """Return `weights/PATH` and `gradients/PATH` → histogram of the finite values.

        Args:
            batch: a mini-batch of training.
            step: number of the update, on which its randomness depends.
        """
        found = {}
        for name, (least, largest, counts) in self._function(parts.of_batch(batch), step).items():
            edges = np.linspace(float(least), float(largest), _BUCKETS + 1)
            found[name] = Histogram(edges, counts.numpy().astype(np.float64))
        return found

    def _counts(self, batch: parts.Batch, step: tf.Tensor) -> dict[str, tuple[tf.Tensor, ...]]:
        scale = self._loss_scale()
        gradients = self._pipe.value_and_gradients(batch, step=step, loss_scale=scale).gradients
        weights = packing.read(self._pipe.weights)
        counts = {}
        for path, weight in weights.items():
            with tf.device(self._pipe.executor.device_of(path)):
                counts[f"weights/{path}"] = _counted(weight)
                gradient = gradients[path]
                if scale is not None:
                    gradient /= tf.cast(scale, gradient.dtype)
                counts[f"gradients/{path}"] = _counted(gradient)
        return counts


def _counted(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the least and the largest finite value, and the counts of the buckets between."""
    flat = tf.reshape(tf.cast(values, tf.float32), [-1])
    is_finite = tf.math.is_finite(flat)
    least = tf.reduce_min(tf.where(is_finite, flat, flat.dtype.max))
    largest = tf.reduce_max(tf.where(is_finite, flat, flat.dtype.min))
    # Without a finite value, or with equal ones, there is still an interval.
    least, largest = tf.minimum(least, largest), tf.maximum(least, largest)
    largest = tf.maximum(largest, least + tf.maximum(tf.abs(least) * 1e-3, 1e-12))
    share = tf.where(is_finite, (flat - least) / (largest - least), -1.0)
    bucket = tf.clip_by_value(tf.cast(share * _BUCKETS, tf.int32), 0, _BUCKETS - 1)
    bucket = tf.where(is_finite, bucket, -1)  # which is counted nowhere
    return least, largest, tf.math.unsorted_segment_sum(tf.ones_like(bucket), bucket, _BUCKETS)
