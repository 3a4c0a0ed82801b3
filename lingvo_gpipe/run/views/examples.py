"""Examples of an evaluation, with what the network predicts for them.

Of each mini-batch, this process receives two numbers per example, its label, and the pictures of
those examples that are among the ones to show so far: never more than a fixed number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import pipelining
from lingvo_gpipe.input import Batch, Input
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import wiring

Array = np.ndarray[Any, np.dtype[Any]]
_PROBABILITIES = "probabilities"


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """An example, and the class that the network predicts for it.

    Attributes:
        label: number of its class.
        predicted: number of the class with the largest probability.
        confidence: that probability.
        picture: uint8 [H, W, C].
    """

    label: int
    predicted: int
    confidence: float
    picture: Array


class Examples:
    """Chooses the examples of an evaluation that are shown: the most confident mistakes.

    Where there are fewer mistakes, right predictions follow, the least confident ones first.
    """

    def __init__(self, pipe: pipelining.PipeliningLayer, source: Input, count: int) -> None:
        """Begin an evaluation.

        Args:
            pipe: the network.
            source: the input, which draws examples.
            count: number of examples that are shown.
        """
        self._pipe = pipe
        self._source = source
        self._count = count
        self._head = _head(pipe) if count else None
        self._is_drawn: bool | None = None
        self._kept: list[tuple[float, Example]] = []

    def reads_outputs(self, batch: Batch) -> bool:
        """Return whether it needs the network's outputs for a mini-batch.

        Not where the network does not classify examples, or its input draws none.
        """
        if self._head is None:
            return False
        if self._is_drawn is None:
            self._is_drawn = self._pictures(batch, [0]) != []
        return self._is_drawn

    def add(self, batch: Batch, outputs: Mapping[str, Nest]) -> None:
        """Look at a mini-batch, and keep those of its examples that are to be shown.

        Args:
            batch: the mini-batch, for which `reads_outputs` returns True.
            outputs: name → output of the network, wherever they were made.
        """
        if self._head is None:
            return
        labels = batch[self._head.label].numpy()
        best, confidence = self._head.predict(outputs, len(labels))
        scores = ranks(labels, best, confidence)
        if self._head.weights is not None:  # an example of weight 0 only fills the mini-batch
            scores[batch[self._head.weights].numpy() == 0] = -np.inf
        least = self._kept[-1][0] if len(self._kept) == self._count else -np.inf
        order = np.argsort(-scores, kind="stable")[: self._count]
        rows = [int(row) for row in order if scores[row] > least]
        for row, picture in zip(rows, self._pictures(batch, rows), strict=False):
            example = Example(int(labels[row]), int(best[row]), float(confidence[row]), picture)
            self._kept.append((float(scores[row]), example))
        self._kept.sort(key=lambda kept: -kept[0])
        del self._kept[self._count :]

    def chosen(self) -> tuple[Example, ...]:
        """Return the examples that are shown, in their order."""
        return tuple(example for _, example in self._kept)

    def _pictures(self, batch: Batch, rows: Sequence[int]) -> list[Array]:
        """Return examples of a mini-batch as the input draws them; none if it draws none."""
        params = self._pipe.params
        pictures: list[Array] = []
        while len(pictures) < len(rows):
            left = rows[len(pictures) :]  # an input draws a few at once

            def only(leaf: tf.Tensor, left: Sequence[int] = left) -> tf.Tensor:
                return tf.gather(leaf, left, axis=params.batch_dim)

            with self._pipe.executor.beside_input():
                part = {
                    name: value if name in params.unbatched else tf.nest.map_structure(only, value)
                    for name, value in batch.items()
                }
                drawn = next(iter(self._source.pictures(part).values()), None)
            if drawn is None or not len(drawn):
                break
            pictures += list(drawn.numpy())
        return pictures


def ranks(labels: Array, predicted: Array, confidence: Array) -> Array:
    """Return how much each example deserves to be shown, float64 [B].

    It is the confidence of mistakes, and less than 0 for right predictions: minus theirs. What is
    not finite comes last.

    >>> ranks(np.array([1, 1, 1]), np.array([1, 2, 0]), np.array([0.9, 0.6, np.nan])).tolist()
    [-0.9, 0.6, -inf]
    """
    scores = np.where(labels == predicted, -1.0, 1.0) * confidence.astype(np.float64)
    return np.where(np.isfinite(scores), scores, -np.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """The layer of a network that classifies whole examples.

    Attributes:
        params: its Params.
        output: name of its logits among the network's outputs.
        label: field of the mini-batch with the classes.
        weights: field with the weights of the examples; None: all count.
    """

    params: base.Layer.Params
    output: str
    label: str
    weights: str | None

    def predict(self, outputs: Mapping[str, Nest], num_examples: int) -> tuple[Array, Array]:
        """Return the best class and its probability, [B] each; crops of an example are averaged."""
        logits = outputs[self.output]
        with tf.device(logits.device):  # only two numbers of an example leave it
            shares = self.params.served(logits)[_PROBABILITIES]
            if shares.shape[0] != num_examples:
                shares = tf.reshape(shares, [num_examples, -1, shares.shape[-1]])
                shares = tf.reduce_mean(shares, 1)
            best, confidence = tf.argmax(shares, -1), tf.reduce_max(shares, -1)
        return best.numpy(), confidence.numpy()


def _head(pipe: pipelining.PipeliningLayer) -> _Head | None:
    """Return the layer that makes the only output, if it classifies examples by a field."""
    analysis = pipe.analysis
    if len(analysis.wiring.outputs) != 1:  # others may be large, or not of single examples
        return None
    ((output, version),) = analysis.wiring.outputs.items()
    producer, spec = analysis.wiring.versions[version].producer, analysis.specs[version]
    if producer == wiring.FIELD or not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 2:
        return None
    params = analysis.layers[producer].params
    label, weights = (*params.reads[1:3], None, None)[:2]
    if label is None:
        return None
    labels = analysis.fields.get(label)
    if (
        len(params.writes) != 1
        or not isinstance(labels, tf.TensorSpec)
        or labels.shape.rank != 1
        or not labels.dtype.is_integer
        or _PROBABILITIES not in params.served(tf.zeros([1, spec.shape[-1]], spec.dtype))
    ):
        return None
    return _Head(params, output, label, weights)
