"""T(L, H, A): the translation model of Huang et al. 2019, section 5, as a flat list of layers.

It has L encoder and L decoder layers, feed-forward parts with H hidden units, A heads of 64
features, and pre-norm with final norms. Each layer writes its own name and reads the names that it
needs. For every cut, the encoder's output, source and target go directly to the cells that read
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, TypeVar

from lingvo_gpipe import errors, hyperparams
from lingvo_gpipe import layers as core
from lingvo_gpipe.tasks.mt.model.block import Block
from lingvo_gpipe.tasks.mt.model.decoder import DecoderLayer
from lingvo_gpipe.tasks.mt.model.embedding import TokenEmbedding
from lingvo_gpipe.tasks.mt.model.encoder import EncoderLayer, TransparentEncoderLayer
from lingvo_gpipe.tasks.mt.model.softmax import TranslationSoftmax

_TABLE = "embedding/table"

_BlockParams = TypeVar("_BlockParams", bound=Block.Params)


class TranslationTransformer(hyperparams.Params):
    """Sizes and options of T(L, H, A)."""

    num_layers: int = hyperparams.required("L: encoder layers, and as many decoder layers.")
    hidden: int = hyperparams.required("H: hidden units of the feed-forward parts.")
    heads: int = hyperparams.required("A: attention heads.")
    vocabulary: int = hyperparams.required("Number of ids, shared by source and target.")
    units: int = hyperparams.field(1024, "Model dimension.")
    head_dim: int = hyperparams.field(64, "Features of a head.")
    tie: Literal["softmax", "all"] | None = hyperparams.field(
        None,
        "None: three tables; softmax: the softmax shares the target embedding's table; all: one "
        "table for all three.",
    )
    transparent: Literal["shared", "per_layer"] | None = hyperparams.field(
        None,
        "What decoder layers attend to. None: the last encoder layer's output; shared: one learned "
        "mixture of all encoder layers, whose running sum passes from layer to layer; per_layer: a "
        "mixture for each decoder layer, which reads every encoder layer's output.",
    )
    packed: bool = hyperparams.field(
        False,
        "Rows hold several sentences: the layers also read source_segment, source_position, "
        "target_segment and target_position.",
    )
    dropout: float = hyperparams.field(0.1, "Rate on embeddings and on each branch's output.")
    attention_dropout: float = hyperparams.field(0.0, "Rate on attention weights.")
    relu_dropout: float = hyperparams.field(0.0, "Rate on the feed-forward parts' hidden units.")
    shares_dropout: float = hyperparams.field(
        0.1, "Rate on the vectors from which transparent attention computes its mixtures."
    )
    ff_init_scale: float | None = hyperparams.field(
        None,
        "Factor on the initial weights of feed-forward parts; None: n^-0.5 for n = 2L layers "
        "(Zhang et al. 2019).",
    )
    logit_clip: float | None = hyperparams.field(
        50.0, "Training clips logits to ± this value; None: no clipping."
    )
    label_smoothing: float = hyperparams.field(
        0.1, "Probability that is spread evenly over the vocabulary."
    )
    languages: tuple[str, ...] = hyperparams.field(
        (),
        "Names by which loss and accuracy are also counted separately; the field `language` [B] "
        "indexes them. Empty: no separate counts.",
    )


def translation_transformer(params: TranslationTransformer) -> list[core.Layer.Params]:
    """Return the Params of the layers of T(L, H, A): 2L + 5, or 2L + 4 with `per_layer`.

    source: [B, S] ids, target and label: [B, T] ids, 0 is padding; weight: [B, T] → logits
    [B, T, V]. No position attends to padding. `weight` decides which labels count.

    Raises:
        LayerError: `num_layers` is less than 1.

    >>> params = TranslationTransformer(num_layers=1, hidden=16, heads=2, vocabulary=100)
    >>> [layer.name for layer in translation_transformer(params)]  # doctest: +ELLIPSIS
    ['source_embedding', 'encoder_0', 'encoder_norm', 'target_embedding', 'decoder_0', ...
    """
    p = params
    if p.num_layers < 1:
        raise errors.LayerError(
            f"translation_transformer: num_layers={p.num_layers}. Use 1 or more"
        )
    source, target = _embedding(p, "source"), _embedding(p, "target")
    encoder = _encoder(p)
    decoder = _decoder(p, encoder.memories)
    softmax = TranslationSoftmax.Params(
        name="softmax",
        vocabulary=p.vocabulary,
        label_smoothing=p.label_smoothing,
        logit_clip=p.logit_clip,
        reads=("decoder_norm", "label", "weight"),
        writes=("softmax",),
    )
    set_languages([softmax], p.languages)
    if p.tie is not None:
        owner = target if p.tie == "softmax" else source
        softmax.tie = {"kernel": f"{owner.name}/{_TABLE}"}
    if p.tie == "all":
        target.tie = {_TABLE: f"{source.name}/{_TABLE}"}
    decoder_norm = _norm("decoder_norm", decoder[-1].name)
    return [source, *encoder.layers, target, *decoder, decoder_norm, softmax]


def set_vocabulary(model_layers: Sequence[core.Layer.Params], size: int) -> None:
    """Set the vocabulary size of a `translation_transformer` to the data's."""
    for params in model_layers:
        if isinstance(params, (TokenEmbedding.Params, TranslationSoftmax.Params)):
            params.vocabulary = size


def is_packed(model_layers: Sequence[core.Layer.Params]) -> bool:
    """Return whether a `translation_transformer` takes rows of several sentences."""
    blocks = [params for params in model_layers if isinstance(params, Block.Params)]
    return all(params.packed for params in blocks)


def set_languages(model_layers: Sequence[core.Layer.Params], names: Sequence[str]) -> None:
    """Make a `translation_transformer` count by these languages; no names: not separately."""
    for params in model_layers:
        if isinstance(params, TranslationSoftmax.Params):
            reads = (*params.reads[:3], *(["language"] if names else []))
            params.set(languages=tuple(names), reads=reads)


@dataclasses.dataclass(frozen=True, slots=True)
class _Encoder:
    """The encoder's layers, and the names that decoder layers attend to."""

    layers: list[core.Layer.Params]
    memories: tuple[str, ...]


def _embedding(params: TranslationTransformer, text: str) -> TokenEmbedding.Params:
    """Return the embedding of `text`, "source" or "target"."""
    return TokenEmbedding.Params(
        name=f"{text}_embedding",
        vocabulary=params.vocabulary,
        units=params.units,
        dropout=params.dropout,
        reads=(text, f"{text}_position") if params.packed else (text,),
        writes=(f"{text}_embedding",),
    )


def _with_sizes(layer: _BlockParams, params: TranslationTransformer) -> _BlockParams:
    """Set the fields in which all encoder and decoder layers are equal."""
    scale = params.ff_init_scale
    return layer.set(
        units=params.units,
        heads=params.heads,
        head_dim=params.head_dim,
        hidden=params.hidden,
        dropout=params.dropout,
        attention_dropout=params.attention_dropout,
        relu_dropout=params.relu_dropout,
        ff_init_scale=(2 * params.num_layers) ** -0.5 if scale is None else scale,
        packed=params.packed,
    )


def _mask_names(params: TranslationTransformer) -> tuple[str, str]:
    """Return the names from which masks are computed, target first."""
    if params.packed:
        return ("target_segment", "source_segment")
    return ("target", "source")


def _encoder(params: TranslationTransformer) -> _Encoder:
    _, source = _mask_names(params)
    names = ["source_embedding", *(f"encoder_{n}" for n in range(params.num_layers))]
    if params.transparent == "shared":
        mixing = [_transparent_layer(number, params) for number in range(params.num_layers)]
        return _Encoder([*mixing, _norm("encoder_norm", mixing[-1].writes[-1])], ("encoder_norm",))
    encoder: list[core.Layer.Params] = [
        _with_sizes(
            EncoderLayer.Params(name=name, reads=(previous, source), writes=(name,)), params
        )
        for previous, name in itertools.pairwise(names)
    ]
    if params.transparent == "per_layer":
        return _Encoder(encoder, tuple(names))
    return _Encoder([*encoder, _norm("encoder_norm", names[-1])], ("encoder_norm",))


def _transparent_layer(
    number: int, params: TranslationTransformer
) -> TransparentEncoderLayer.Params:
    """Return encoder layer `number`, which passes on the running sum and the remaining shares."""
    _, source = _mask_names(params)
    reads: tuple[str, ...] = ("source_embedding", source)
    if number:
        previous = number - 1
        reads = (f"encoder_{previous}", source, f"mix_{previous}", f"shares_{previous}")
    writes: tuple[str, ...] = (f"mix_{number}",)
    if number < params.num_layers - 1:
        writes = (f"encoder_{number}", f"mix_{number}", f"shares_{number}")
    layer = TransparentEncoderLayer.Params(
        name=f"encoder_{number}",
        num_shares=params.num_layers + 1 - number,
        shares_dropout=params.shares_dropout,
        reads=reads,
        writes=writes,
    )
    return _with_sizes(layer, params)


def _decoder(
    params: TranslationTransformer, memories: tuple[str, ...]
) -> list[DecoderLayer.Params]:
    """Return the decoder layers, which attend to the outputs named `memories`."""
    names = ["target_embedding", *(f"decoder_{n}" for n in range(params.num_layers))]
    decoder = [
        _with_sizes(
            DecoderLayer.Params(
                name=name,
                shares_dropout=params.shares_dropout,
                reads=(previous, *memories, *_mask_names(params)),
                writes=(name,),
            ),
            params,
        )
        for previous, name in itertools.pairwise(names)
    ]
    if len(memories) > 1:
        # All share one final norm of the encoder, whose weights belong to the first decoder layer.
        for layer in decoder[1:]:
            layer.tie = {
                f"memory_norm/{part}": f"decoder_0/memory_norm/{part}" for part in ("gamma", "beta")
            }
    return decoder


def _norm(name: str, reads: str) -> core.LayerNorm.Params:
    return core.LayerNorm.Params(name=name, reads=(reads,), writes=(name,))
