"""Decoding token by token: what was computed for earlier ones is kept, not computed again.

A layer that looks at other positions has, beside `fprop`, two pure functions more:

- `begin(theta, inputs, rows, length, ctx)` → its cache before the first token, for so many rows and
  at most `length` tokens. Inputs that come token by token are None.
- `extend(theta, cache, inputs, ctx)` → (outputs, cache) for one token more, inputs [B, 1, ...].
  Inputs that do not come token by token are None: what is needed of them is in the cache.

A cache is a nest of tensors whose first side is that of the rows: a beam is put into another order
by gathering all of them. Other layers compute each position on its own; those are listed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, network, precision, seeds
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base

# Layers whose `fprop` computes each position on its own.
_BY_POSITION = (core.LayerNorm, core.SequenceSoftmax, core.Dense, core.Dropout, core.Activation)

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """A layer of the decoder: its name, the layer, and which names it reads and writes."""

    name: str
    layer: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Incremental:
    """The plain network of a translation model, run one target token at a time, on one device.

    It is made of layers alone and has no variables: `begin` and `extend` are pure, and may be
    traced.
    """

    def __init__(self, analysis: network.Analysis, length: int) -> None:
        """Make the layers in the form that inference has.

        Args:
            analysis: of the model, as trained.
            length: target tokens at most.

        Raises:
            LayerError: a layer behind the target looks at other positions and keeps no cache.
        """
        self._length = length
        self._paths = {info.name: info.paths for info in analysis.layers}
        self._before: list[_Step] = []
        self._stepped: list[_Step] = []
        available, stepped = {"source", "target"}, {"target"}
        for info in analysis.layers:
            own = info.params.owner.inference(info.params, available)
            if own is None or not set(own.reads) <= available:
                continue
            step = _Step(info.name, own.instantiate(), tuple(own.reads), tuple(own.writes))
            available.update(step.writes)
            if stepped.isdisjoint(step.reads):
                self._before.append(step)
                continue
            if not (hasattr(step.layer, "extend") or isinstance(step.layer, _BY_POSITION)):
                raise errors.LayerError(
                    f"{base.describe(info.params)} cannot compute token by token. Give it begin "
                    "and extend; see tasks/mt/incremental.py"
                )
            stepped.update(step.writes)
            self._stepped.append(step)

    def begin(self, weights: Mapping[str, tf.Tensor], source: tf.Tensor) -> State:
        """Encode source [B, S]; return the caches by layer, before the first target token.

        Args:
            weights: of the network by path, variables or tensors.
            source: ids, 0 is padding.
        """
        stream: dict[str, Any] = {"source": source}
        for step in self._before:
            value = step.layer.run(self._theta(step, weights), _read(step, stream), _context(step))
            _write(step, value, stream)
        rows = tf.shape(source)[0]
        caches = {}
        for step in self._stepped:
            if hasattr(step.layer, "begin"):
                theta, read = self._theta(step, weights), _read(step, stream)
                caches[step.name] = step.layer.begin(
                    theta, read, rows, self._length, _context(step)
                )
        return caches

    def extend(
        self, weights: Mapping[str, tf.Tensor], state: State, target: tf.Tensor
    ) -> tuple[tf.Tensor, State]:
        """Return the logits [B, V] behind target [B], and the new caches.

        Args:
            weights: of the network by path.
            state: what `begin` or `extend` gave.
            target: ids of the tokens that are added, <s> first.
        """
        stream: dict[str, Any] = {"target": target[:, tf.newaxis]}
        caches = dict(state)
        for step in self._stepped:
            theta = self._theta(step, weights)
            read = _read(step, stream)
            if hasattr(step.layer, "extend"):
                value, caches[step.name] = step.layer.extend(
                    theta, state[step.name], read, _context(step)
                )
            else:
                value = step.layer.run(theta, read, _context(step))
            _write(step, value, stream)
        (last,) = self._stepped[-1].writes
        return stream[last][:, 0], caches

    def _theta(self, step: _Step, weights: Mapping[str, tf.Tensor]) -> dict[str, Any]:
        """Return the layer's weights by its own names, nested by child, in its compute dtype."""
        theta: dict[str, Any] = {}
        for own, path in self._paths[step.name].items():
            *parents, last = own.split("/")
            node = theta
            for parent in parents:
                node = node.setdefault(parent, {})
            value = tf.convert_to_tensor(weights[path])
            node[last] = precision.cast(value, step.layer.policy.compute)
        return theta


def _read(step: _Step, stream: Mapping[str, Any]) -> Any:
    values = tuple(stream.get(name) for name in step.reads)
    return values if len(values) > 1 else values[0]


def _write(step: _Step, value: Any, stream: dict[str, Any]) -> None:
    values = value if len(step.writes) > 1 else (value,)
    stream.update(zip(step.writes, values, strict=True))


def _context(step: _Step) -> core.Context:
    return core.Context(
        training=False,
        step=tf.zeros([], tf.int64),
        root_seed=seeds.base_seed(0),
        state={},
        path=step.name,
    )
