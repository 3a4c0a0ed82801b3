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
from lingvo_gpipe.input import Input
from lingvo_gpipe.layers import KerasMetric, Loss
from lingvo_gpipe.layers.heads import Classifier, Head
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import Analysis, parts

Array = np.ndarray[Any, np.dtype[Any]]


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

    If there are fewer mistakes, right predictions follow, the least confident ones first.
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
        self._head = _head(pipe.analysis) if count else None
        self._has_pictures: bool | None = None
        self._chosen: list[tuple[float, Example]] = []

    def reads_outputs(self, batch: Mapping[str, Nest]) -> bool:
        """Return whether it needs the network's outputs for a mini-batch.

        Not if the network does not classify examples, or its input draws none.
        """
        if self._head is None:
            return False
        if self._has_pictures is None:
            self._has_pictures = self._pictures(batch, [0]) != []
        return self._has_pictures

    def add(self, batch: Mapping[str, Nest], outputs: Mapping[str, Nest]) -> None:
        """Look at a mini-batch, and keep those of its examples that are to be shown.

        Args:
            batch: the mini-batch, for which `reads_outputs` returns True.
            outputs: name → output of the network, on any devices.
        """
        head = self._head
        if head is None:
            return
        labels = head.labels(batch)
        best, confidence = head.predict(outputs)
        scores = ranks(labels, best, confidence)
        scores[labels < 0] = -np.inf  # a class that the loss leaves out
        if head.weights is not None:  # an example of weight 0 only fills the mini-batch
            scores[batch[head.weights].numpy().reshape(-1) == 0] = -np.inf
        least = self._chosen[-1][0] if len(self._chosen) == self._count else -np.inf
        order = np.argsort(-scores, kind="stable")[: self._count]
        rows = [int(row) for row in order if scores[row] > least]
        for row, picture in zip(rows, self._pictures(batch, rows), strict=False):
            example = Example(int(labels[row]), int(best[row]), float(confidence[row]), picture)
            self._chosen.append((float(scores[row]), example))
        self._chosen.sort(key=lambda chosen: -chosen[0])
        del self._chosen[self._count :]

    def chosen(self) -> tuple[Example, ...]:
        """Return the examples that are shown, in their order."""
        return tuple(example for _, example in self._chosen)

    def _pictures(self, batch: Mapping[str, Nest], rows: Sequence[int]) -> list[Array]:
        """Return examples of a mini-batch as the input draws them; none if it draws none."""
        pictures: list[Array] = []
        while len(pictures) < len(rows):
            left = rows[len(pictures) :]  # an input draws a few at once
            with self._pipe.executor.on_input_device():
                few = parts.take(batch, left)
                drawn = next(iter(self._source.pictures(few).values()), None)
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
    """What compares whole examples with their classes in a network.

    Attributes:
        output: name of the predictions among the network's outputs.
        label: field of the mini-batch with the classes.
        weights: field with the weights of the examples; None: all count.
        classifier: reads the classes of both.
    """

    output: str
    label: str
    weights: str | None
    classifier: Classifier

    def labels(self, batch: Mapping[str, Nest]) -> Array:
        """Return the class of each example of a mini-batch, [B]."""
        field = batch[self.label]
        with tf.device(field.device):
            return np.asarray(self.classifier.classes(field))

    def predict(self, outputs: Mapping[str, Nest]) -> tuple[Array, Array]:
        """Return the best class and its probability, [B] each."""
        predictions = outputs[self.output]
        with tf.device(predictions.device):  # only two numbers of an example leave it
            shares = self.classifier.probabilities(predictions)
            best, confidence = tf.argmax(shares, -1), tf.reduce_max(shares, -1)
        return best.numpy(), confidence.numpy()


def _head(analysis: Analysis) -> _Head | None:
    """Return what classifies examples by a field, from the network's only output."""
    if len(analysis.wiring.outputs) != 1:  # others may be large, or not of single examples
        return None
    ((output, version),) = analysis.wiring.outputs.items()
    read_by: dict[int, int] = {}  # version that a layer passes on → the one that it read
    heads: dict[int, _Head] = {}
    for layer, reads, writes in zip(
        analysis.layers, analysis.wiring.reads, analysis.wiring.writes, strict=True
    ):
        params = layer.params
        if isinstance(params, Loss.Params | KerasMetric.Params):
            read_by[writes[0]] = read_by.get(reads[0], reads[0])
        if isinstance(params, Head.Params) and len(params.reads) > 1:
            predicted = read_by.get(writes[0], writes[0])
            label, *weights = params.reads[1:]
            specs = analysis.specs[predicted], analysis.fields.get(label)
            if all(isinstance(spec, tf.TensorSpec) for spec in specs):
                classifier = params.classifier(*specs)
                if classifier is not None:
                    heads.setdefault(
                        predicted, _Head(output, label, next(iter(weights), None), classifier)
                    )
    return heads.get(read_by.get(version, version))
