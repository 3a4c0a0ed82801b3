"""Cost of a traced layer, counted on its graph: an estimate where formulas of our own have none.

A product counts 2 operations per multiply-add; everything else that computes counts 1 per element
of its largest tensor; what only moves or renames data counts none. A loop counts its body as many
times as it may run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

_MOVES = """
    Const Placeholder Identity IdentityN StopGradient PreventGradient NoOp Reshape Squeeze
    ExpandDims Shape ShapeN Size Rank Cast Pack Unpack ConcatV2 ConcatOffset Slice
    StridedSlice Split SplitV Transpose Tile Fill ZerosLike OnesLike Range BroadcastTo
    BroadcastGradientArgs ConjugateTranspose InvertPermutation
"""
_FREE = frozenset(_MOVES.split())
_VIEWS = frozenset(["Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"])
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_LOOPS = frozenset(["While", "StatelessWhile"])
_BRANCHES = frozenset(["If", "StatelessIf", "Case", "StatelessCase"])
# Which input is the tensor of output's size, and which the filter, in convolutions' gradients.
_CONVOLUTION_GRADIENTS = ("BackpropInput", "BackpropFilter")


def flops(operations: Iterable[Any], graph: Any) -> int:
    """Return the operations that a traced function computes.

    Args:
        operations: of its graph.
        graph: where called functions are found.
    """
    return sum(_operation_flops(op, graph) for op in operations)


def kept_bytes(forward: Collection[Any], backward: Iterable[Any], graph: Any) -> int:
    """Return the bytes of what a backward pass reads of its forward pass.

    Args:
        forward: operations of the forward pass.
        backward: operations of its gradient, in the same graph.
        graph: where called functions are found.
    """
    own = {op.name for op in forward}
    kept: dict[str, int] = {}
    for op in backward:
        for tensor in op.inputs:
            source = tensor
            while source.op.type in _VIEWS:
                source = source.op.inputs[0]
            if source.op.name not in own or source.op.type in ("Const", "Placeholder"):
                continue
            if source.dtype == tf.variant:
                kept[source.op.name] = _stacked_bytes(source.op, graph)
            else:
                kept[source.name] = _elements(source) * max(source.dtype.size, 1)
    return sum(kept.values())


def _elements(tensor: Any) -> int:
    return int(tensor.shape.num_elements() or 0) if tensor.shape.rank is not None else 0


def _operation_flops(op: Any, graph: Any) -> int:
    kind = op.type
    if kind in _FREE or kind.startswith(("TensorList", "EmptyTensorList")):
        return 0
    if kind in _CALLS:
        return _function_flops(op.get_attr("f").name, graph)
    if kind in _LOOPS:
        return _turns(op) * _function_flops(op.get_attr("body").name, graph)
    if kind in _BRANCHES:
        names = ("then_branch", "else_branch") if kind.endswith("If") else ()
        return max((_function_flops(op.get_attr(n).name, graph) for n in names), default=0)
    product = _product_flops(op)
    if product is not None:
        return product
    return max((_elements(t) for t in (*op.outputs, *op.inputs)), default=0)


def _product_flops(op: Any) -> int | None:
    """Return the operations of a matrix product or convolution; None: it is neither."""
    kind = op.type
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        flag = "transpose_a" if kind == "MatMul" else "adj_x"
        inner = op.inputs[0].shape[-2 if op.get_attr(flag) else -1]
        return 2 * _elements(op.outputs[0]) * int(inner or 0)
    if kind == "Einsum":
        return _einsum_flops(op)
    if not kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2dNative")):
        return None
    small = op.outputs[0]
    weights = op.inputs[1]
    if any(part in kind for part in _CONVOLUTION_GRADIENTS):
        small = op.inputs[2]
        weights = op.outputs[0] if "BackpropFilter" in kind else op.inputs[1]
    sides = weights.shape.as_list()
    per_output = sides[:-2] if kind.startswith("Depthwise") else sides[:-1]
    return 2 * _elements(small) * math.prod(side or 0 for side in per_output)


def _einsum_flops(op: Any) -> int:
    terms, _, result = op.get_attr("equation").decode().partition("->")
    sides: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), op.inputs, strict=True):
        labels = [label for label in term if label != "."]
        given = tensor.shape.as_list()
        if "." in term:  # broadcast sides are counted with the result's
            at = term.index(".")
            given = given[:at] + given[len(given) - (len(labels) - at) :]
        sides.update(zip(labels, (side or 0 for side in given), strict=True))
    contracted = math.prod(side for label, side in sides.items() if label not in result)
    return 2 * _elements(op.outputs[0]) * contracted


def _function_flops(name: str, graph: Any) -> int:
    body = _function_graph(name, graph)
    return 0 if body is None else flops(body.get_operations(), body)


def _function_graph(name: str, graph: Any) -> Any:
    while graph is not None:
        found = graph._functions.get(name)
        if found is not None:
            return found.graph
        graph = getattr(graph, "outer_graph", None)
    return None


def _turns(op: Any) -> int:
    """Return how often a loop runs: over what it unstacks, or as the loop before its gradient."""
    turns = 1
    for tensor in op.inputs:
        source = tensor.op
        if source.type in _LOOPS:
            turns = max(turns, _turns(source))
        elif source.type == "TensorListFromTensor":
            turns = max(turns, int(source.inputs[0].shape[0] or 1))
    return turns


def _stacked_bytes(op: Any, graph: Any) -> int:
    """Return the bytes of all intermediates that a loop stacks up for its gradient."""
    if op.type not in _LOOPS:
        return 0
    body = _function_graph(op.get_attr("body").name, graph)
    if body is None:
        return 0
    pushed = [o.inputs[1] for o in body.get_operations() if o.type == "TensorListPushBack"]
    return _turns(op) * sum(_elements(t) * max(t.dtype.size, 1) for t in pushed)
