"""Transformer-L: the language model of the GPipe paper's Table 1, as a flat list of layers."""

from __future__ import annotations

from lingvo_gpipe import errors, layers


def language_model(
    num_layers: int,
    *,
    units: int = 2048,
    heads: int = 32,
    hidden: int = 8192,
    vocabulary: int = 32_000,
    dropout: float = 0.0,
) -> list[layers.Layer.Params]:
    """Return the layers of a decoder-only Transformer: L + 3, or L + 4 with dropout.

    target, label: [B, T] ids; weight: [B, T] → logits [B, T, V]. Pre-norm, separate tables
    of embedding and softmax, positions without weights, no final norm: with the defaults exactly
    the paper's parameters, L(12d² + 13d) + 2Vd + V.

    Args:
        num_layers: L.
        units: d, model dimension.
        heads: heads of each attention.
        hidden: hidden units of feed-forward parts.
        vocabulary: V.
        dropout: rate on embeddings, on each branch's output, and on the hidden units of
            feed-forward parts.

    Raises:
        LayerError: `num_layers` is less than 1.

    >>> [params.name for params in language_model(2)]
    ['embedding', 'position', 'layer_0', 'layer_1', 'softmax']
    """
    if num_layers < 1:
        raise errors.LayerError(f"language_model: num_layers={num_layers}. Use 1 or more")
    flat: list[layers.Layer.Params] = [
        layers.Embedding.Params(
            name="embedding", vocabulary=vocabulary, units=units, scale=True, reads=("target",)
        ),
        layers.PositionalEncoding.Params(name="position"),
    ]
    if dropout:
        flat.append(layers.Dropout.Params(name="dropout", rate=dropout))
    flat += [
        layers.TransformerLayer.Params(
            name=f"layer_{number}",
            units=units,
            heads=heads,
            hidden=hidden,
            causal=True,
            dropout=dropout,
        )
        for number in range(num_layers)
    ]
    softmax = layers.SequenceSoftmax.Params(
        name="softmax", vocabulary=vocabulary, reads=("x", "label", "weight")
    )
    return [*flat, softmax]
