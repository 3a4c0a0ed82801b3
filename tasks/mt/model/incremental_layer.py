"""The interface of layers that decode token by token; `decoding.incremental` calls it."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import tensorflow as tf

from lingvo_gpipe import layers as core
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest

Cache: TypeAlias = "dict[str, tf.Tensor]"


@runtime_checkable
class IncrementalLayer(Protocol):
    """A layer that depends on earlier tokens and caches what it needs from them.

    The first axis of a cached tensor counts hypotheses, by which a beam gathers them. In tensors
    named in `per_source` it counts sources: all hypotheses of a sentence share them.
    """

    per_source: tuple[str, ...]

    def begin(
        self, theta: Theta, inputs: Nest, rows: int | tf.Tensor, length: int, ctx: core.Context
    ) -> Cache:
        """Return the cache before the first token.

        Args:
            theta: theta of the layer.
            inputs: what the layer reads; None for inputs that come token by token.
            rows: number of hypotheses.
            length: maximum number of target tokens.
            ctx: context of the layer.
        """

    def extend(
        self, theta: Theta, cache: Cache, inputs: Nest, ctx: core.Context
    ) -> tuple[Nest, Cache]:
        """Return the outputs for the next token, [B, 1, ...], and the new cache.

        Args:
            theta: theta of the layer.
            cache: cache of the tokens before.
            inputs: what the layer reads of the token; None for inputs that do not come token by
                token: the cache holds what is needed from them.
            ctx: context of the layer.
        """
