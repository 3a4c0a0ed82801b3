"""Candidates of the next token: the best of each slice of a softmax, without all logits.

Each slice's cell sends a few logits of each hypothesis, their ids, and what the others need to turn
logits into log p. The search continues with these as with all logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from lingvo_gpipe import layers as core
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.tasks.mt.text.vocabulary import END


class Candidates(NamedTuple):
    """Candidates for the next token of each hypothesis; a nest of tensors.

    Attributes:
        ids: [rows, n] int32, ascending.
        logits: [rows, n] float32; −∞ for a symbol that translations cannot contain.
        largest: [rows] float32, the largest logit of the vocabulary.
        total: [rows] float32, the sum of exp(logit − largest) over the vocabulary.
    """

    ids: tf.Tensor
    logits: tf.Tensor
    largest: tf.Tensor
    total: tf.Tensor

    def log_p(self) -> tf.Tensor:
        """Return log p of the candidates, [rows, n]; −∞ for symbols."""
        return self.logits - self.largest[:, tf.newaxis] - tf.math.log(self.total)[:, tf.newaxis]


@dataclasses.dataclass(frozen=True, slots=True)
class Shortlist:
    """Which tokens of a slice are candidates.

    Attributes:
        count: maximum number for each hypothesis.
        controls: see `search.begin`.
    """

    count: int
    controls: int


def is_token(ids: tf.Tensor, controls: int | tf.Tensor) -> tf.Tensor:
    """Return which ids a translation may contain: </s> and those after the control symbols."""
    return (ids == END) | (ids > END + controls)


def best_of(logits: tf.Tensor, first: int, shortlist: Shortlist) -> Candidates:
    """Return the candidates of a slice.

    Args:
        logits: [rows, n] floating.
        first: first id of the slice.
        shortlist: which tokens are candidates; of equal logits, lower ids.
    """
    logits = tf.cast(logits, tf.float32)
    ids = tf.range(logits.shape[-1]) + first
    largest = tf.reduce_max(logits, -1)
    total = tf.reduce_sum(tf.exp(logits - largest[:, tf.newaxis]), -1)
    allowed = tf.where(is_token(ids, shortlist.controls), logits, -float("inf"))
    _, best = tf.math.top_k(allowed, min(shortlist.count, logits.shape[-1]))
    # By id: of equal candidates the search prefers the first.
    best = tf.sort(best, -1)
    return Candidates(best + first, tf.gather(allowed, best, batch_dims=1), largest, total)


def merged(slices: Sequence[Candidates]) -> Candidates:
    """Return the candidates of all slices, which are in the order of their ids."""
    largest = tf.reduce_max(tf.stack([part.largest for part in slices]), 0)
    totals = [part.total * tf.exp(part.largest - largest) for part in slices]
    return Candidates(
        tf.concat([part.ids for part in slices], -1),
        tf.concat([part.logits for part in slices], -1),
        largest,
        tf.add_n(totals),
    )


class CandidateSlice:
    """x: [rows, 1, D] floating → the candidates of a slice of a softmax."""

    def __init__(self, layer: core.SoftmaxSlice, shortlist: Shortlist) -> None:
        """Take the candidates from the logits of a layer."""
        self._layer, self._shortlist = layer, shortlist

    def run(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.run`."""
        logits = self._layer.run(theta, inputs, ctx)
        return best_of(logits[:, 0], self._layer.params.first, self._shortlist)


class MergedCandidates:
    """Candidates of slices → those of all."""

    def run(self, theta: Theta, inputs: Nest, ctx: core.Context) -> Nest:
        """See `Layer.run`."""
        del theta, ctx
        return merged([inputs] if isinstance(inputs, Candidates) else inputs)


DecodedLayer: TypeAlias = core.Layer | CandidateSlice | MergedCandidates


def shortlisted(layer: core.Layer, shortlist: Shortlist) -> DecodedLayer:
    """Return a layer of decoding; slices of a softmax and what joins them pass on candidates."""
    if isinstance(layer, core.SoftmaxSlice):
        return CandidateSlice(layer, shortlist)
    return MergedCandidates() if isinstance(layer, core.JoinedLogits) else layer
