"""T(L, H, A): the translation model of Huang et al. 2019, section 5, as a flat list of layers.

L encoder and L decoder layers, a feed-forward part of H, A heads of 64 channels; pre-norm with
final norms. Each layer writes the name that it is called by, and reads those it needs: wherever the
list is cut, encoder output, source and target go straight to the cells that read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from lingvo_gpipe import errors
from lingvo_gpipe import layers as core
from lingvo_gpipe.tasks.mt.model import layers

Tie = Literal["softmax", "all"]
Transparent = Literal["shared", "per_layer"]

_TABLE = "embedding/table"


def translation_transformer(
    num_layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    units: int = 1024,
    head_dim: int = 64,
    tie: Tie | None = None,
    transparent: Transparent | None = None,
    packed: bool = False,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    relu_dropout: float = 0.0,
    shares_dropout: float = 0.1,
    ff_init_scale: float | None = None,
    logit_clip: float | None = 50.0,
    label_smoothing: float = 0.1,
    languages: Sequence[str] = (),
) -> list[Any]:
    """Return the layers of T(L, H, A), 2L + 5 of them (2L + 4 with `per_layer`).

    source: [B, S], target, label: [B, T] ids, 0 for padding; weight: [B, T] → logits [B, T, V].
    Padding is never attended to, and `weight` says what counts.

    Args:
        num_layers: L, encoder layers and decoder layers each.
        hidden: H.
        heads: A.
        vocabulary: V, shared by source and target.
        units: model dimension.
        head_dim: channels of a head.
        tie: None: three tables; "softmax": the softmax has the target embedding's; "all": one.
        transparent: what decoders attend to: None, the last encoder layer's output; "shared", a
            learned mixture of all of them, one for all decoder layers, whose running sum travels
            from layer to layer; "per_layer", one for each, to which every output is sent.
        packed: rows hold several sentences: also reads source_segment, source_position,
            target_segment, target_position.
        dropout: rate on embeddings and on what each branch adds.
        attention_dropout: rate on attention shares.
        relu_dropout: rate in the middle of feed-forward parts.
        shares_dropout: rate on the vectors of transparent attention.
        ff_init_scale: factor on the initial weights of the feed-forward parts; None: n^-½ for
            n = 2L layers, after Zhang et al. 2019.
        logit_clip: logits are clipped at ± this in training, hard; None: never.
        label_smoothing: spread evenly over all V.
        languages: names by which loss and accuracy are counted apart, as the field `language`,
            [B], tells; none: not.

    Raises:
        LayerError: there is no layer, or no such tie or transparent attention.

    >>> [params.name for params in translation_transformer(1, 16, 2, 100)]  # doctest: +ELLIPSIS
    ['source_embedding', 'encoder_0', 'encoder_norm', 'target_embedding', 'decoder_0', ...
    """
    _check(num_layers, tie, transparent)
    block = {
        "units": units,
        "heads": heads,
        "head_dim": head_dim,
        "hidden": hidden,
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "relu_dropout": relu_dropout,
        "ff_init_scale": (2 * num_layers) ** -0.5 if ff_init_scale is None else ff_init_scale,
        "packed": packed,
    }
    source, target = (
        layers.TokenEmbedding.Params(
            name=f"{side}_embedding",
            vocabulary=vocabulary,
            units=units,
            dropout=dropout,
            reads=(side, f"{side}_position") if packed else (side,),
            writes=(f"{side}_embedding",),
        )
        for side in ("source", "target")
    )
    softmax = layers.TranslationSoftmax.Params(
        name="softmax",
        vocabulary=vocabulary,
        label_smoothing=label_smoothing,
        logit_clip=logit_clip,
        reads=("decoder_norm", "label", "weight"),
        writes=("softmax",),
    )
    set_languages([softmax], languages)
    if tie is not None:
        owner = target if tie == "softmax" else source
        softmax.tie = {"kernel": f"{owner.name}/{_TABLE}"}
    if tie == "all":
        target.tie = {_TABLE: f"{source.name}/{_TABLE}"}
    told = ("target_segment", "source_segment") if packed else ("target", "source")
    encoder, memories = _encoder(num_layers, block, told[1], transparent, shares_dropout)
    decoder = _decoder(num_layers, block, told, memories, shares_dropout)
    return [source, *encoder, target, *decoder, _norm("decoder_norm", decoder[-1].name), softmax]


def set_vocabulary(model_layers: Sequence[Any], size: int) -> None:
    """Give the model of `translation_transformer` another number of ids, that of the data."""
    for params in model_layers:
        if isinstance(params, (layers.TokenEmbedding.Params, layers.TranslationSoftmax.Params)):
            params.vocabulary = size


def is_packed(model_layers: Sequence[Any]) -> bool:
    """Tell whether the model of `translation_transformer` takes rows of several sentences."""
    blocks = [params for params in model_layers if isinstance(params, layers.Block.Params)]
    return all(params.packed for params in blocks)


def set_languages(model_layers: Sequence[Any], names: Sequence[str]) -> None:
    """Have the model of `translation_transformer` count by these languages; none: not."""
    for params in model_layers:
        if isinstance(params, layers.TranslationSoftmax.Params):
            reads = (*params.reads[:3], *(["language"] if names else []))
            params.set(languages=tuple(names), reads=reads)


def _check(num_layers: int, tie: str | None, transparent: str | None) -> None:
    if num_layers < 1:
        raise errors.LayerError(f"translation_transformer: num_layers={num_layers}. Use 1 or more")
    for name, value, known in (
        ("tie", tie, ("softmax", "all")),
        ("transparent", transparent, ("shared", "per_layer")),
    ):
        if value not in (None, *known):
            near = errors.nearest(str(value), known) or known
            raise errors.LayerError(
                f"translation_transformer: {name}={value!r} is not known; nearest {near[0]!r}. "
                f"Use None, {known[0]!r} or {known[1]!r}"
            )


def _encoder(
    num_layers: int,
    block: dict[str, Any],
    source: str,
    transparent: str | None,
    shares_dropout: float,
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the encoder's layers and the names that decoder layers attend to."""
    names = ["source_embedding", *(f"encoder_{n}" for n in range(num_layers))]
    if transparent == "shared":
        encoder = [
            _transparent(n, num_layers, block, source, shares_dropout) for n in range(num_layers)
        ]
        return [*encoder, _norm("encoder_norm", encoder[-1].writes[-1])], ("encoder_norm",)
    encoder = [
        layers.EncoderLayer.Params(name=name, reads=(before, source), writes=(name,), **block)
        for before, name in itertools.pairwise(names)
    ]
    if transparent == "per_layer":
        return encoder, tuple(names)
    return [*encoder, _norm("encoder_norm", names[-1])], ("encoder_norm",)


def _transparent(
    number: int, num_layers: int, block: dict[str, Any], source: str, shares_dropout: float
) -> Any:
    """Return encoder layer `number` with the sum and the shares that travel."""
    reads: tuple[str, ...] = ("source_embedding", source)
    if number:
        before = number - 1
        reads = (f"encoder_{before}", source, f"mix_{before}", f"shares_{before}")
    writes: tuple[str, ...] = (f"mix_{number}",)
    if number < num_layers - 1:
        writes = (f"encoder_{number}", f"mix_{number}", f"shares_{number}")
    return layers.TransparentEncoderLayer.Params(
        name=f"encoder_{number}",
        num_shares=num_layers + 1 - number,
        shares_dropout=shares_dropout,
        reads=reads,
        writes=writes,
        **block,
    )


def _decoder(
    num_layers: int,
    block: dict[str, Any],
    told: tuple[str, str],
    memories: tuple[str, ...],
    shares_dropout: float,
) -> list[Any]:
    names = ["target_embedding", *(f"decoder_{n}" for n in range(num_layers))]
    decoder = [
        layers.DecoderLayer.Params(
            name=name,
            shares_dropout=shares_dropout,
            reads=(before, *memories, *told),
            writes=(name,),
            **block,
        )
        for before, name in itertools.pairwise(names)
    ]
    if len(memories) > 1:
        # One final norm of the encoder, whose weights the first decoder layer owns.
        for params in decoder[1:]:
            params.tie = {
                f"memory_norm/{part}": f"decoder_0/memory_norm/{part}" for part in ("gamma", "beta")
            }
    return decoder


def _norm(name: str, reads: str) -> Any:
    return core.LayerNorm.Params(name=name, reads=(reads,), writes=(name,))
