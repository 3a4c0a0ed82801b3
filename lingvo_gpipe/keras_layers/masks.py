"""Keras masks of a model's outputs, computed from its inputs without running its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers.model import first_argument, graph_of, inputs_of, nodes_of


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
    flat = [tf.identity(tensor) for tensor in keras.tree.flatten(outputs)]
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
    for node in nodes_of(graph):
        operation, inner = node.operation, graph_of(node.operation)
        if inner is not None:
            reads = inputs_of(inner, node)
            known = [value_of.get(id(t), t) for t in reads]
            computed = _masks(inner, known, [mask_of.get(id(t)) for t in reads])
        elif getattr(operation, "supports_masking", False):
            first = first_argument(node)
            computed = keras.tree.flatten(
                operation.compute_mask(
                    keras.tree.map_structure(lambda t: value_of.get(id(t), t), first),
                    keras.tree.map_structure(lambda t: mask_of.get(id(t)), first),
                )
            )
        else:
            computed = []
        for tensor, mask in zip(node.outputs, computed, strict=False):
            if isinstance(mask, keras.KerasTensor):
                raise errors.LayerError(
                    f"the mask of an output depends on what is computed before {operation.name}. "
                    "Call that layer on a keras.Input"
                )
            mask_of[id(tensor)] = mask
    return [mask_of.get(id(tensor)) for tensor in graph.outputs]
