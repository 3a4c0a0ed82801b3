"""Keras masks of a model's outputs, computed from its inputs without running its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers import function
from lingvo_gpipe.keras_layers.model import (
    first_argument,
    graph_of,
    has_mask_argument,
    inputs_of,
    nodes_of,
    unmasked_by,
)


def has_output_masks(model: Functional) -> bool:
    """Return whether an output of a functional model has a Keras mask."""
    return any(getattr(tensor, "_keras_mask", None) is not None for tensor in model.outputs)


def output_masks(model: Functional, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    """Return the Keras mask of each output of a functional model; None: it has none.

    Args:
        model: the model.
        inputs: its flat inputs.

    Raises:
        LayerError: a mask depends on what a layer computes.
    """
    return _masks(model, list(inputs), [None] * len(inputs))


def with_masks(model: Functional, inputs: Sequence[tf.Tensor], outputs: Any) -> Any:
    """Return outputs of a functional model with their Keras masks, as Keras returns them.

    Args:
        model: the model.
        inputs: its flat inputs.
        outputs: its outputs without masks, in their structure.
    """
    if not has_output_masks(model):
        return outputs
    flat = list(map(function.copied, keras.tree.flatten(outputs)))
    for tensor, mask in zip(flat, output_masks(model, inputs), strict=True):
        if mask is not None:
            tensor._keras_mask = mask
    return keras.tree.pack_sequence_as(outputs, flat)


def _masks(
    graph: Functional, values: Sequence[Any], masks: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Return the masks of a graph's outputs.

    Args:
        graph: a functional model.
        values: its inputs; a symbolic tensor where a value is unknown.
        masks: masks of its inputs.
    """
    value_of = {id(t): value for t, value in zip(graph.inputs, values, strict=True)}
    mask_of = {id(t): mask for t, mask in zip(graph.inputs, masks, strict=True)}
    symbolic = dict(mask_of)  # as Keras found them when the model was made
    for node in nodes_of(graph):
        operation, inner = node.operation, graph_of(node.operation)
        if inner is not None:
            reads = inputs_of(inner, node)
            known = [value_of.get(id(t), t) for t in reads]
            computed = found = _masks(inner, known, [mask_of.get(id(t)) for t in reads])
        elif getattr(operation, "supports_masking", False):
            found = _computed(node, value_of, symbolic)
            computed = found if has_mask_argument(node) else _computed(node, value_of, mask_of)
        else:
            computed = found = []
        mask_of.update(zip(map(id, node.outputs), computed, strict=False))
        symbolic.update(zip(map(id, node.outputs), found, strict=False))
        for mask in computed:
            if isinstance(mask, keras.KerasTensor):
                raise errors.LayerError(
                    f"the mask of an output depends on what is computed before {operation.name}. "
                    "Call that layer on a keras.Input"
                )
        for tensor in unmasked_by(node):
            mask_of[id(tensor)] = None
    return [mask_of.get(id(tensor)) for tensor in graph.outputs]


def _computed(
    node: Any, value_of: Mapping[int, Any], mask_of: Mapping[int, tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Return the masks of a node's outputs, by the values and masks of what it is called on."""
    operation, first = node.operation, first_argument(node)
    values = keras.tree.map_structure(lambda t: value_of.get(id(t), t), first)
    masks = keras.tree.map_structure(lambda t: mask_of.get(id(t)), first)
    if isinstance(operation, keras.layers.Concatenate):
        values = _of_their_shapes(values, masks, operation.axis)
    flat: list[tf.Tensor | None] = keras.tree.flatten(operation.compute_mask(values, masks))
    return flat


def _of_their_shapes(
    tensors: Sequence[Any], masks: Sequence[tf.Tensor | None], axis: int
) -> list[Any]:
    """Return zeros of the shapes of tensors that a Concatenate is called on: all it needs.

    Where a shape is unknown, the symbolic tensor stays.

    Args:
        tensors: symbolic where a value is unknown.
        masks: of each.
        axis: along which they are concatenated.
    """
    any_mask = next((mask for mask in masks if mask is not None), None)
    shaped = []
    for tensor, mask in zip(tensors, masks, strict=True):
        along_time = axis in (1, 1 - len(tensor.shape))
        like = any_mask if mask is None and not along_time else mask
        sizes = list(tensor.shape)
        if like is not None:
            sizes[:2] = tf.unstack(tf.shape(like))
        elif any_mask is not None:
            sizes[0] = tf.shape(any_mask)[0]
        shaped.append(tensor if None in sizes else tf.zeros(sizes))
    return shaped
