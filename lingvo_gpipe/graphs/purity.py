"""Which operations of a traced graph only compute."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# Registered as stateful, although they only allocate memory or check a value.
_HARMLESS = frozenset(["Assert", "Empty"])


def is_pure(op: tf.Operation) -> bool:
    """Return whether an operation only computes: it neither reads nor writes any state."""
    if op.type == "Placeholder":
        return bool(op.outputs[0].dtype != tf.resource)
    return _computes(op.node_def, op.graph)


def _computes(node: Any, graph: tf.Graph) -> bool:
    """Return whether a node of a graph, or of a function that it calls, has no state."""
    op_def = op_def_registry.get(node.op)
    if op_def is None or not op_def.is_stateful or node.op in _HARMLESS:
        return True
    called = [value.func.name for value in node.attr.values() if value.HasField("func")]
    return bool(called) and all(
        _computes(inner, graph)
        for name in called
        for inner in graph._functions[name].definition.node_def
    )
