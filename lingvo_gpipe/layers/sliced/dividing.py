"""Which layers can be divided into slices, and which of their fields says so."""

from __future__ import annotations

from lingvo_gpipe import errors
from lingvo_gpipe.hyperparams import REQUIRED
from lingvo_gpipe.layers import base, sequence
from lingvo_gpipe.layers.base import Layer
from lingvo_gpipe.layers.objectives import heads
from lingvo_gpipe.layers.sliced import embedding, slices, softmax

_FIELDS = ("slices", "feed_forward_slices")
# Layers without such a field, and those that are the same in slices.
_SLICED: dict[type[Layer.Params], type[slices.Sliced.Params]] = {
    sequence.Embedding.Params: embedding.SlicedEmbedding.Params,
    heads.SequenceSoftmax.Params: softmax.SlicedSoftmax.Params,
}


def can_be_divided(params: Layer.Params) -> bool:
    """Return whether a layer directly in a network can be several layers."""
    return type(params) in _SLICED or _field(params) is not None


def in_slices(params: Layer.Params, number: int | tuple[int, ...]) -> Layer.Params:
    """Return a layer's Params in slices.

    Args:
        params: params of the layer.
        number: number of equal slices, or the size of each.

    Raises:
        LayerError: the layer cannot be divided.
    """
    field = _field(params)
    if field is not None:
        return params.copy().set(**{field: number})
    if type(params) not in _SLICED:
        raise errors.LayerError(
            f"{base.describe(params)}: it cannot be divided into slices. Embeddings, softmaxes "
            "over sequences, and layers with a feed-forward part can"
        )
    return params if number == 1 else _sliced(params, number)


def undivided(params: Layer.Params) -> Layer.Params:
    """Return Params that are equal for all slices of one layer, to compare two of them."""
    if type(params) in _SLICED:
        return _sliced(params, 1)
    return in_slices(params, 1) if can_be_divided(params) else params


def _sliced(params: Layer.Params, number: int | tuple[int, ...]) -> Layer.Params:
    sliced = _SLICED[type(params)](slices=number)
    values = {path: value for path, value, _ in params.iter_paths()}
    return sliced.set({path: value for path, value in values.items() if value is not REQUIRED})


def _field(params: Layer.Params) -> str | None:
    """Return the field that holds the number of slices; None for a layer without such a field."""
    if not isinstance(params, slices.HasSlices):
        return None
    return next((field for field in _FIELDS if field in params.fields()), None)
