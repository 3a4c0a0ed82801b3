"""Decoding token by token: results of earlier tokens are cached, not computed again.

A layer that depends on other positions is an `IncrementalLayer`. All other layers must compute each
position separately; those are listed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, network, precision, seeds
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.tasks.mt.decoding.candidates import DecodedLayer, Shortlist, shortlisted
from lingvo_gpipe.tasks.mt.model.embedding import TokenEmbeddingSlice
from lingvo_gpipe.tasks.mt.model.incremental_layer import Cache, IncrementalLayer

# Layers whose `fprop` computes each position separately.
_BY_POSITION = (
    core.Activation,
    core.Dense,
    core.Dropout,
    core.JoinedLogits,
    core.LayerNorm,
    core.SequenceSoftmax,
    core.SoftmaxSlice,
    TokenEmbeddingSlice,
)

Caches: TypeAlias = dict[str, Cache]  # by layer
LayerThetas: TypeAlias = dict[str, Theta]  # by layer


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingLayer:
    """A layer as decoding runs it.

    Attributes:
        name: name of the layer.
        layer: the layer.
        paths: variable path in the layer → path in the network.
        dtypes: variable path in the layer → dtype in which the layer reads it.
        reads: names that it reads.
        writes: names that it writes.
        by_token: those of `reads` that come token by token. Without any, the layer runs once for a
            sentence.
    """

    name: str
    layer: DecodedLayer
    paths: dict[str, str]
    dtypes: dict[str, tf.DType]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    by_token: frozenset[str]


def decoding_layers(
    analysis: network.Analysis, shortlist: Shortlist | None = None
) -> dict[int, DecodingLayer]:
    """Return the layers that decoding runs, in the form for inference, by number.

    Args:
        analysis: analysis of the model, as trained.
        shortlist: slices of a softmax return candidates, not logits; None: logits.

    Raises:
        LayerError: a layer after the target depends on other positions and has no cache.
    """
    available, by_token = {"source", "target"}, {"target"}
    layers: dict[int, DecodingLayer] = {}
    for number, info in enumerate(analysis.layers):
        params = info.params.inference()
        if params is None or not set(params.reads) <= available:
            continue
        reads, writes, trained = tuple(params.reads), tuple(params.writes), params.instantiate()
        layer = DecodingLayer(
            info.name,
            trained if shortlist is None else shortlisted(trained, shortlist),
            info.paths,
            {spec.path: spec.read_dtype for spec in info.meta.variables},
            reads,
            writes,
            frozenset(by_token & set(reads)),
        )
        available.update(writes)
        if layer.by_token:
            if not isinstance(trained, IncrementalLayer) and not _by_position(trained):
                raise errors.LayerError(
                    f"{base.describe(info.params)} cannot compute token by token. Make it an "
                    "IncrementalLayer; see tasks/mt/model/incremental_layer.py"
                )
            by_token.update(writes)
        layers[number] = layer
    return layers


def _by_position(layer: core.Layer) -> bool:
    """Return whether a layer computes each position separately."""
    if isinstance(layer, (core.FeedForwardEnd, core.FeedForwardSlice, core.Sequential)):
        return all(map(_by_position, layer.children.values()))
    return isinstance(layer, _BY_POSITION)


class DecodingPart:
    """Consecutive layers of a translation model while decoding: those of a cell, or all.

    It has no variables: `begin`, `extend` and `reorder` are pure and can be traced.

    Attributes:
        begin_reads: names that `begin` needs.
        begin_writes: names that it returns.
        extend_reads: names that `extend` needs.
        extend_writes: names that it returns.
        begin_layers: layers whose weights `begin` needs.
        extend_layers: layers whose weights `extend` needs.
    """

    def __init__(self, layers: Iterable[DecodingLayer]) -> None:
        """Combine the layers, in order."""
        layers = tuple(layers)
        self._per_source = [layer for layer in layers if not layer.by_token]
        self._per_token = [layer for layer in layers if layer.by_token]
        cached = [layer for layer in self._per_token if isinstance(layer.layer, IncrementalLayer)]
        self.begin_writes = tuple(name for layer in self._per_source for name in layer.writes)
        self.begin_reads = _missing(
            (set(layer.reads) - layer.by_token, layer.writes)
            for layer in (*self._per_source, *cached)
        )
        self.extend_writes = tuple(name for layer in self._per_token for name in layer.writes)
        self.extend_reads = _missing((layer.by_token, layer.writes) for layer in self._per_token)
        self.begin_layers = tuple(layer.name for layer in (*self._per_source, *cached))
        self.extend_layers = tuple(layer.name for layer in self._per_token)

    def read(self, weights: Mapping[str, tf.Tensor]) -> LayerThetas:
        """Return the weights of all layers as they read them; called once, not for every token.

        Args:
            weights: weights of the network by path, variables or tensors.
        """
        layers = (*self._per_source, *self._per_token)
        return {layer.name: _theta(layer, weights) for layer in layers}

    def begin(
        self,
        theta: LayerThetas,
        inputs: Mapping[str, tf.Tensor],
        rows: int | tf.Tensor,
        length: int,
    ) -> tuple[Caches, dict[str, tf.Tensor]]:
        """Run the layers that run once for a sentence.

        Args:
            theta: theta of `begin_layers`.
            inputs: `begin_reads` by name, for all sentences.
            rows: number of hypotheses; those of one sentence are consecutive.
            length: maximum number of target tokens.

        Returns:
            The caches before the first token by layer; `begin_writes` by name.
        """
        stream = dict(inputs)
        for layer in self._per_source:
            value = layer.layer.run(theta[layer.name], _read(layer, stream), _context(layer))
            _write(layer, value, stream)
        caches: Caches = {}
        for layer in self._per_token:
            if isinstance(layer.layer, IncrementalLayer):
                caches[layer.name] = layer.layer.begin(
                    theta[layer.name], _read(layer, stream), rows, length, _context(layer)
                )
        return caches, {name: stream[name] for name in self.begin_writes}

    def extend(
        self, theta: LayerThetas, caches: Caches, inputs: Mapping[str, tf.Tensor]
    ) -> tuple[dict[str, tf.Tensor], Caches]:
        """Add a token to every hypothesis.

        Args:
            theta: theta of `extend_layers`.
            caches: from `begin`, `extend` or `reorder`.
            inputs: `extend_reads` by name, such as target [rows, 1].

        Returns:
            `extend_writes` by name; the new caches.
        """
        stream = dict(inputs)
        new = dict(caches)
        for layer in self._per_token:
            values, ctx = _read(layer, stream), _context(layer)
            if isinstance(layer.layer, IncrementalLayer):
                outputs, new[layer.name] = layer.layer.extend(
                    theta[layer.name], caches[layer.name], values, ctx
                )
            else:
                outputs = layer.layer.run(theta[layer.name], values, ctx)
            _write(layer, outputs, stream)
        return {name: stream[name] for name in self.extend_writes}, new

    def reorder(self, caches: Caches, parents: tf.Tensor) -> Caches:
        """Return the caches of hypotheses that continue others of the same sentence.

        Args:
            caches: before.
            parents: [rows] int32, the row that each hypothesis continues.
        """
        per_source = {
            layer.name: layer.layer.per_source
            for layer in self._per_token
            if isinstance(layer.layer, IncrementalLayer)
        }
        return {
            layer: {
                name: value if name in per_source[layer] else tf.gather(value, parents)
                for name, value in cache.items()
            }
            for layer, cache in caches.items()
        }


class Incremental:
    """A translation model on one device that computes one target token at a time.

    Attributes:
        length: maximum number of target tokens.
    """

    def __init__(self, analysis: network.Analysis, length: int) -> None:
        """Make the layers in the form for inference.

        Args:
            analysis: analysis of the model, as trained.
            length: maximum number of target tokens.

        Raises:
            LayerError: a layer after the target depends on other positions and has no cache.
        """
        self.length = length
        self._part = DecodingPart(decoding_layers(analysis).values())

    def read(self, weights: Mapping[str, tf.Tensor]) -> LayerThetas:
        """See `DecodingPart.read`."""
        return self._part.read(weights)

    def begin(self, theta: LayerThetas, source: tf.Tensor, beam: int = 1) -> Caches:
        """Encode source [B, S]; return the caches of B · beam hypotheses before the first token.

        Args:
            theta: from `read`.
            source: ids, 0 is padding.
            beam: hypotheses of a sentence.
        """
        rows = tf.shape(source)[0] * beam
        caches, _ = self._part.begin(theta, {"source": source}, rows, self.length)
        return caches

    def extend(
        self, theta: LayerThetas, caches: Caches, target: tf.Tensor
    ) -> tuple[tf.Tensor, Caches]:
        """Return the logits [rows, V] of the token after target [rows], and the new caches.

        Args:
            theta: from `read`.
            caches: from `begin`, `extend` or `reorder`.
            target: ids of the latest tokens, <s> at first.
        """
        outputs, new = self._part.extend(theta, caches, {"target": target[:, tf.newaxis]})
        return outputs[self._part.extend_writes[-1]][:, 0], new

    def reorder(self, caches: Caches, parents: tf.Tensor) -> Caches:
        """See `DecodingPart.reorder`."""
        return self._part.reorder(caches, parents)


def _missing(
    read_and_written: Iterable[tuple[Collection[str], Collection[str]]],
) -> tuple[str, ...]:
    """Return the names that are read before they are written, sorted."""
    available: set[str] = set()
    missing: set[str] = set()
    for reads, writes in read_and_written:
        missing.update(set(reads) - available)
        available.update(writes)
    return tuple(sorted(missing))


def _theta(layer: DecodingLayer, weights: Mapping[str, tf.Tensor]) -> Theta:
    """Return the layer's weights by their names in it, nested by child, in the dtypes it reads."""
    theta: Theta = {}
    for name, path in layer.paths.items():
        *parents, last = name.split("/")
        node = theta
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = precision.cast(tf.convert_to_tensor(weights[path]), layer.dtypes[name])
    return theta


def _read(layer: DecodingLayer, stream: Mapping[str, tf.Tensor]) -> Nest:
    values = tuple(stream.get(name) for name in layer.reads)
    return values if len(values) > 1 else values[0]


def _write(layer: DecodingLayer, outputs: Nest, stream: dict[str, tf.Tensor]) -> None:
    values = outputs if len(layer.writes) > 1 else (outputs,)
    stream.update(zip(layer.writes, values, strict=True))


def _context(layer: DecodingLayer) -> core.Context:
    return core.Context(
        training=False,
        step=tf.zeros([], tf.int64),
        root_seed=seeds.base_seed(0),
        state={},
        path=layer.name,
    )
