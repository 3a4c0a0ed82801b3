"""What encoder and decoder layers have in common: masks, attention, feed-forward part.

Integers [B, S] decide what may be attended to; 0 is padding. They are ids or, if several sentences
share a row (`packed`), numbers of sentences. They are fields of the mini-batch: every cell receives
them directly from the input, and no mask crosses a cut.
"""

from __future__ import annotations

from typing import Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.feed_forward import BlockParams
from lingvo_gpipe.nests import SpecNest


class Block(core.Composite):
    """Base of encoder and decoder layers; see `BlockParams`.

    Subclasses define `branches` and what the attention branches read besides x.
    """

    class Params(BlockParams):
        head_dim: int = hyperparams.field(64, "Features of a head.")
        relu_dropout: float = hyperparams.field(0.0, "Rate on the feed-forward's hidden units.")
        ff_init_scale: float = hyperparams.field(
            1.0, "Factor on the initial weights of the feed-forward part."
        )
        packed: bool = hyperparams.field(
            False,
            "The integers [B, S] that it reads are numbers of sentences within a row, not ids.",
        )

        def branch(self, name: str) -> core.Layer.Params:
            """See `BlockParams`."""
            return self._feed_forward() if name == "feed_forward" else self._attention()

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

        def _inference(self) -> Self:
            """Read ids: in inference each row is one sentence."""
            served = self.copy()
            if served.packed:
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
