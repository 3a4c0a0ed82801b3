"""What encoder and decoder layers have in common: branches, masks, feed-forward part.

Integers [B, S] decide what may be attended to; 0 is padding. They are ids or, if several sentences
share a row (`packed`), numbers of sentences. They are fields of the mini-batch: every cell receives
them directly from the input, and no mask crosses a cut.
"""

from __future__ import annotations

import abc
from collections.abc import Collection
from typing import Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks, composite
from lingvo_gpipe.layers.feed_forward import BlockParams
from lingvo_gpipe.nests import Nest, SpecNest


class Block(core.Composite):
    """Base of encoder and decoder layers: x + branch(norm(x)), one branch after the other.

    Children: {branch}_norm, {branch}, {branch}_dropout. Subclasses define `branches` and what the
    attention branches read besides x. The feed-forward part may be in slices; see `BlockParams`.
    """

    class Params(BlockParams):
        units: int = hyperparams.required("Features of x and of the output.")
        heads: int = hyperparams.required("Number of attention heads.")
        head_dim: int = hyperparams.field(64, "Features of a head.")
        hidden: int = hyperparams.required("Hidden units of the feed-forward part.")
        dropout: float = hyperparams.field(0.0, "Rate on each branch's output.")
        attention_dropout: float = hyperparams.field(0.0, "Rate on attention weights.")
        relu_dropout: float = hyperparams.field(0.0, "Rate on the feed-forward's hidden units.")
        ff_init_scale: float = hyperparams.field(
            1.0, "Factor on the initial weights of the feed-forward part."
        )
        packed: bool = hyperparams.field(
            False,
            "The integers [B, S] that it reads are numbers of sentences within a row, not ids.",
        )

        @property
        @abc.abstractmethod
        def branches(self) -> tuple[str, ...]:
            """Names of the branches, in the order in which they run."""

        def parts(self) -> dict[str, core.Layer.Params]:
            """See `Composite`; the branches are in the order in which they run."""
            parts: dict[str, core.Layer.Params] = {}
            for branch in self.branches:
                parts[f"{branch}_norm"] = core.LayerNorm.Params()
                parts[branch] = self._branch(branch)
                parts[f"{branch}_dropout"] = core.Dropout.Params(rate=self.dropout)
            return self.without_the_part(parts)

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`.

            Args:
                call: see there.
                *inputs: x; then for each branch, in order, a tuple of its other inputs.
            """
            x, *others = inputs
            x = call.cast(x)
            for branch, more in zip(self.branches, others, strict=True):
                y = call(f"{branch}_norm", x)
                if branch not in call.names:
                    return x, y
                y = call(branch, y, *more)
                x = call.add(x, call(f"{branch}_dropout", y))
            return x

        def _branch(self, branch: str) -> core.Layer.Params:
            return self._feed_forward() if branch == "feed_forward" else self._attention()

        def _attention(self) -> core.MultiHeadAttention.Params:
            """Return self-attention with a mask."""
            return core.MultiHeadAttention.Params(
                units=self.units,
                heads=self.heads,
                head_dim=self.head_dim,
                dropout=self.attention_dropout,
                reads=("x", "mask"),
            )

        def _feed_forward(self) -> core.Sequential.Params:
            # VarianceScaling takes the factor on Xavier's variance, not on the weights.
            init = {
                "scale": self.ff_init_scale**2,
                "mode": "fan_avg",
                "distribution": "uniform",
            }
            middle = core.Dense.Params(
                name="middle",
                units=self.hidden,
                activation="relu",
                kernel_init="VarianceScaling",
                kernel_init_args=init,
            )
            output = middle.copy().set(name="output", units=self.units, activation="linear")
            dropout = core.Dropout.Params(name="dropout", rate=self.relu_dropout)
            return core.Sequential.Params(layers=[middle, dropout, output])

        def _inference(self, available: Collection[str]) -> Self:
            """Read ids if inference does not provide numbers of sentences."""
            served = self.copy()
            if served.packed and not set(served.reads) <= set(available):
                served.packed = False
                served.reads = tuple(name.removesuffix("_segment") for name in served.reads)
            return served

        def _mask_spec(self, keys: SpecNest, x: tf.TensorSpec) -> tf.TensorSpec:
            """Return the spec of `Block._mask` for `keys` and queries x."""
            rows, span = checks.any_shape(self, keys, "[B, S]", "Set its field reads")
            if not keys.dtype.is_integer:
                raise errors.LayerError(
                    f"{base.describe(self)}: expected ids or sentence numbers, got "
                    f"{keys.dtype.name}. Set its field reads"
                )
            shape = (rows, x.shape[1], span) if self.packed else (rows, span)
            return tf.TensorSpec(shape, tf.bool)

    params: Params

    def _mask(self, keys: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
        """Return where `queries` [B, T] may attend to `keys` [B, S]: [B, S], or [B, T, S]."""
        real = keys != 0
        if not self.params.packed:
            return real
        return real[:, tf.newaxis] & (queries[:, :, tf.newaxis] == keys[:, tf.newaxis])
