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
    vocabulary_slices: int | tuple[int, ...] = 1,
    feed_forward_slices: int | tuple[int, ...] = 1,
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
        dropout: rate on embeddings and on each branch's output.
        vocabulary_slices: number of equal slices of embedding and softmax, which are layers of
            their own, or the size of each; 1: not sliced.
        feed_forward_slices: the same of each feed-forward part's hidden units.

    Raises:
        LayerError: `num_layers` is less than 1.

    >>> [params.name for params in language_model(2)]
    ['embedding', 'position', 'layer_0', 'layer_1', 'softmax']
    """
    if num_layers < 1:
        raise errors.LayerError(f"language_model: num_layers={num_layers}. Use 1 or more")
    embedding: layers.Layer.Params = layers.Embedding.Params(vocabulary=vocabulary, units=units)
    softmax: layers.Layer.Params = layers.SequenceSoftmax.Params(vocabulary=vocabulary)
    if vocabulary_slices != 1:
        embedding = layers.SlicedEmbedding.Params(
            vocabulary=vocabulary, units=units, slices=vocabulary_slices
        )
        softmax = layers.SlicedSoftmax.Params(vocabulary=vocabulary, slices=vocabulary_slices)
    flat: list[layers.Layer.Params] = [
        embedding.set(name="embedding", scale=True, reads=("target",)),
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
            feed_forward_slices=feed_forward_slices,
        )
        for number in range(num_layers)
    ]
    return [*flat, softmax.set(name="softmax", reads=("x", "label", "weight"))]
