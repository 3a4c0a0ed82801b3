"""Decoding token by token: what was computed for earlier ones is kept, not computed again.

A layer that looks at other positions has, beside `fprop`, two pure functions more:

- `begin(theta, inputs, rows, length, ctx)` → its cache before the first token, for so many rows and
  at most `length` tokens. Inputs that come token by token are None.
- `extend(theta, cache, inputs, ctx)` → (outputs, cache) for one token more, inputs [B, 1, ...].
  Inputs that do not come token by token are None: what is needed of them is in the cache.

A cache is a dictionary of tensors. The first side of those that the layer names in `of_source` is
that of the sources, since all hypotheses of a sentence share them; the first side of the others is
that of the hypotheses, by which a beam gathers them. Other layers compute each position on its own;
those are listed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, network, precision, seeds
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base

# Layers whose `fprop` computes each position on its own.
_BY_POSITION = (core.LayerNorm, core.SequenceSoftmax, core.Dense, core.Dropout, core.Activation)

State = dict[str, dict[str, tf.Tensor]]  # layer → its cache
Theta = dict[str, dict[str, Any]]  # layer → its weights by its own names, nested by child


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A layer that decoding runs.

    Attributes:
        name: of the layer.
        layer: itself.
        paths: its own variable path → path in the network.
        dtypes: its own variable path → dtype in which it reads it.
        reads: names that it reads.
        writes: names that it writes.
        by_token: those of `reads` that come token by token; none: it runs once for a sentence.
    """

    name: str
    layer: Any
    paths: dict[str, str]
    dtypes: dict[str, tf.DType]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    by_token: frozenset[str]


def steps(analysis: network.Analysis) -> dict[int, Step]:
    """Return the layers that decoding runs by their number, in the form that inference has.

    Raises:
        LayerError: a layer behind the target looks at other positions and keeps no cache.
    """
    available, by_token = {"source", "target"}, {"target"}
    found: dict[int, Step] = {}
    for number, info in enumerate(analysis.layers):
        own = info.params.inference(available)
        if own is None or not set(own.reads) <= available:
            continue
        reads, writes = tuple(own.reads), tuple(own.writes)
        step = Step(
            info.name,
            own.instantiate(),
            info.paths,
            {spec.path: spec.read_dtype for spec in info.meta.variables},
            reads,
            writes,
            frozenset(by_token & set(reads)),
        )
        available.update(writes)
        if step.by_token:
            if not (hasattr(step.layer, "extend") or isinstance(step.layer, _BY_POSITION)):
                raise errors.LayerError(
                    f"{base.describe(info.params)} cannot compute token by token. Give it begin "
                    "and extend; see tasks/mt/incremental.py"
                )
            by_token.update(writes)
        found[number] = step
    return found


class Part:
    """Consecutive layers of a translation model, decoding: those of a cell, or all.

    It is made of layers alone and has no variables: `begin`, `extend` and `reorder` are pure, and
    may be traced.

    Attributes:
        begin_reads: names that `begin` needs.
        begin_writes: names that it gives.
        extend_reads: names that `extend` needs.
        extend_writes: names that it gives.
        begin_layers: whose weights `begin` needs.
        extend_layers: whose weights `extend` needs.
    """

    def __init__(self, own: Iterable[Step]) -> None:
        """Take the layers, in order."""
        own = tuple(own)
        self._before = [step for step in own if not step.by_token]
        self._stepped = [step for step in own if step.by_token]
        keeping = [step for step in self._stepped if hasattr(step.layer, "begin")]
        self.begin_writes = tuple(name for step in self._before for name in step.writes)
        self.begin_reads = _missing(
            (set(step.reads) - step.by_token, step.writes) for step in (*self._before, *keeping)
        )
        self.extend_writes = tuple(name for step in self._stepped for name in step.writes)
        self.extend_reads = _missing((step.by_token, step.writes) for step in self._stepped)
        self.begin_layers = tuple(step.name for step in (*self._before, *keeping))
        self.extend_layers = tuple(step.name for step in self._stepped)

    def read(self, weights: Mapping[str, tf.Tensor]) -> Theta:
        """Return the weights of all layers, as these read them: once, not for every token.

        Args:
            weights: of the network by path, variables or tensors.
        """
        return {step.name: _theta(step, weights) for step in (*self._before, *self._stepped)}

    def begin(
        self, theta: Theta, given: Mapping[str, Any], rows: Any, length: int
    ) -> tuple[State, dict[str, Any]]:
        """Run what runs once for a sentence.

        Args:
            theta: of `begin_layers`.
            given: `begin_reads` by name, of the sentences.
            rows: hypotheses of all sentences, those of one behind each other.
            length: target tokens at most.

        Returns:
            The caches of no token by layer, and `begin_writes` by name.
        """
        stream = dict(given)
        for step in self._before:
            value = step.layer.run(theta[step.name], _read(step, stream), _context(step))
            _write(step, value, stream)
        state = {}
        for step in self._stepped:
            if hasattr(step.layer, "begin"):
                state[step.name] = step.layer.begin(
                    theta[step.name], _read(step, stream), rows, length, _context(step)
                )
        return state, {name: stream[name] for name in self.begin_writes}

    def extend(
        self, theta: Theta, state: State, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], State]:
        """Add a token to every hypothesis.

        Args:
            theta: of `extend_layers`.
            state: what `begin`, `extend` or `reorder` gave.
            given: `extend_reads` by name, such as target [rows, 1].

        Returns:
            `extend_writes` by name, and the new caches.
        """
        stream = dict(given)
        caches = dict(state)
        for step in self._stepped:
            own, read = theta[step.name], _read(step, stream)
            if hasattr(step.layer, "extend"):
                value, caches[step.name] = step.layer.extend(
                    own, state[step.name], read, _context(step)
                )
            else:
                value = step.layer.run(own, read, _context(step))
            _write(step, value, stream)
        return {name: stream[name] for name in self.extend_writes}, caches

    def reorder(self, state: State, parents: tf.Tensor) -> State:
        """Return the caches of hypotheses that go on from others, within their sentences.

        Args:
            state: the caches.
            parents: [rows] int32, the row that each goes on from.
        """
        shared = {step.name: getattr(step.layer, "of_source", ()) for step in self._stepped}
        return {
            layer: {
                name: value if name in shared[layer] else tf.gather(value, parents)
                for name, value in cache.items()
            }
            for layer, cache in state.items()
        }


class Incremental:
    """The plain network of a translation model, run one target token at a time, on one device.

    Attributes:
        length: target tokens at most.
    """

    def __init__(self, analysis: network.Analysis, length: int) -> None:
        """Make the layers in the form that inference has.

        Args:
            analysis: of the model, as trained.
            length: target tokens at most.

        Raises:
            LayerError: a layer behind the target looks at other positions and keeps no cache.
        """
        self.length = length
        self._part = Part(steps(analysis).values())

    def read(self, weights: Mapping[str, tf.Tensor]) -> Theta:
        """See `Part.read`."""
        return self._part.read(weights)

    def begin(self, theta: Theta, source: tf.Tensor, beam: int = 1) -> State:
        """Encode source [B, S]; return the caches of B · beam hypotheses, before the first token.

        Args:
            theta: what `read` gave.
            source: ids, 0 is padding.
            beam: hypotheses of a sentence.
        """
        rows = tf.shape(source)[0] * beam
        state, _ = self._part.begin(theta, {"source": source}, rows, self.length)
        return state

    def extend(self, theta: Theta, state: State, target: tf.Tensor) -> tuple[tf.Tensor, State]:
        """Return the logits [rows, V] behind target [rows], and the new caches.

        Args:
            theta: what `read` gave.
            state: what `begin`, `extend` or `reorder` gave.
            target: ids of the tokens that are added, <s> first.
        """
        written, caches = self._part.extend(theta, state, {"target": target[:, tf.newaxis]})
        return written[self._part.extend_writes[-1]][:, 0], caches

    def reorder(self, state: State, parents: tf.Tensor) -> State:
        """See `Part.reorder`."""
        return self._part.reorder(state, parents)


def _missing(
    read_and_written: Iterable[tuple[Collection[str], Collection[str]]],
) -> tuple[str, ...]:
    """Return the names that are read before they are written, sorted."""
    there: set[str] = set()
    missing: set[str] = set()
    for reads, writes in read_and_written:
        missing.update(set(reads) - there)
        there.update(writes)
    return tuple(sorted(missing))


def _theta(step: Step, weights: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Return the layer's weights by its own names, nested by child, in the dtypes it reads."""
    theta: dict[str, Any] = {}
    for own, path in step.paths.items():
        *parents, last = own.split("/")
        node = theta
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = precision.cast(tf.convert_to_tensor(weights[path]), step.dtypes[own])
    return theta


def _read(step: Step, stream: Mapping[str, Any]) -> Any:
    values = tuple(stream.get(name) for name in step.reads)
    return values if len(values) > 1 else values[0]


def _write(step: Step, value: Any, stream: dict[str, Any]) -> None:
    values = value if len(step.writes) > 1 else (value,)
    stream.update(zip(step.writes, values, strict=True))


def _context(step: Step) -> core.Context:
    return core.Context(
        training=False,
        step=tf.zeros([], tf.int64),
        root_seed=seeds.base_seed(0),
        state={},
        path=step.name,
    )
