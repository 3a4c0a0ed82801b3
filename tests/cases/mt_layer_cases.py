"""Layers of the translation model as rows of `layer_cases`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.tasks.mt.model.decoder import DecoderLayer
from lingvo_gpipe.tasks.mt.model.embedding import (
    EmbeddingPositions,
    TokenEmbedding,
    TokenEmbeddingSlice,
)
from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer, MixtureEnd, TransparentEncoderLayer
from lingvo_gpipe.tasks.mt.model.mixture import Mixture
from lingvo_gpipe.tasks.mt.model.softmax import TranslationLoss, TranslationSoftmax
from tests.cases.layer_cases import SUMS, Case

SOURCE = tf.TensorSpec((3, 5), tf.int32)  # ids or sentences, 0 to 2
TARGET = tf.TensorSpec((3, 4), tf.int32)
STATE = tf.TensorSpec((3, 5, 6))
X = tf.TensorSpec((3, 4, 6))
SHARE = tf.TensorSpec((1,))
BLOCK: dict[str, Any] = {"units": 6, "heads": 2, "head_dim": 4, "hidden": 7}
DROPOUT: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1, "relu_dropout": 0.3}


def _transparent(
    num_shares: int, reads: tuple[str, ...], writes: tuple[str, ...], **fields: Any
) -> Any:
    return TransparentEncoderLayer.Params(
        **BLOCK, num_shares=num_shares, shares_dropout=0.4, reads=reads, writes=writes, **fields
    )


CASES = (
    Case("token_embedding", TokenEmbedding.Params(vocabulary=5, units=6, dropout=0.3), (SOURCE,)),
    Case(
        "token_embedding_given",
        TokenEmbedding.Params(vocabulary=5, units=6, reads=("ids", "position")),
        (SOURCE, SOURCE),
    ),
    Case(
        "token_embedding_slice",
        TokenEmbeddingSlice.Params(
            slice=layers.EmbeddingSlice.Params(vocabulary=5, units=6, first=1, rows=4),
            reads=("ids", "sum"),
        ),
        (SOURCE, STATE),
    ),
    Case(
        "embedding_positions",
        EmbeddingPositions.Params(dropout=0.3, reads=("x", "position")),
        (STATE, SOURCE),
    ),
    Case("encoder_layer", EncoderLayer.Params(**BLOCK, **DROPOUT), (STATE, SOURCE)),
    Case("encoder_layer_packed", EncoderLayer.Params(**BLOCK, packed=True), (STATE, SOURCE)),
    Case(
        "transparent_first",
        _transparent(12, ("x", "source"), ("x", "mix", "shares")),
        (STATE, SOURCE),
    ),
    Case(
        "transparent_middle",
        _transparent(3, ("x", "source", "mix", "shares"), ("x", "mix", "shares")),
        (STATE, SOURCE, STATE, tf.TensorSpec((3,))),
    ),
    Case(
        "transparent_last",
        _transparent(2, ("x", "source", "mix", "shares"), ("mix",)),
        (STATE, SOURCE, STATE, tf.TensorSpec((2,))),
    ),
    Case(
        "transparent_at_norm",
        _transparent(
            3, ("x", "source", "mix", "shares"), ("x", "y", "mix", "shares"), ends_at_norm=True
        ),
        (STATE, SOURCE, STATE, tf.TensorSpec((3,))),
    ),
    Case(
        "mixture_end",
        MixtureEnd.Params(rate=0.2, reads=("x", "y", "mix", "shares")),
        (STATE, STATE, STATE, SHARE),
    ),
    Case("mixture", Mixture.Params(shares_dropout=0.4, reads=tuple("abcdefghijkl")), (STATE,) * 12),
    Case("decoder_layer", DecoderLayer.Params(**BLOCK, **DROPOUT), (X, STATE, TARGET, SOURCE)),
    Case(
        "decoder_layer_at_norm",
        DecoderLayer.Params(**BLOCK, ends_at_norm=True, writes=("x", "y")),
        (X, STATE, TARGET, SOURCE),
    ),
    Case(
        "decoder_layer_mixing",
        DecoderLayer.Params(
            **BLOCK, packed=True, shares_dropout=0.0, reads=("x", "a", "b", "target", "source")
        ),
        (X, STATE, STATE, TARGET, SOURCE),
    ),
    Case(
        "translation_softmax",
        TranslationSoftmax.Params(
            vocabulary=7,
            logit_clip=0.5,
            languages=("de", "fr", "cs"),
            label_smoothing=0.1,
            reads=("x", "label", "weight", "language"),
        ),
        (X, TARGET, tf.TensorSpec((3, 4)), tf.TensorSpec((3,), tf.int32)),
    ),
    Case(
        "translation_loss",
        TranslationLoss.Params(
            vocabulary=7,
            logits=("a", "b"),
            languages=("de", "fr", "cs"),
            label_smoothing=0.1,
            reads=("sums", "label", "weight", "language"),
        ),
        (SUMS, SOURCE, tf.TensorSpec((3, 5)), tf.TensorSpec((3,), tf.int32)),
    ),
)
