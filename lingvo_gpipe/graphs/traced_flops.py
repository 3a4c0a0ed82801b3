"""FLOPs of a traced function, counted on its graph: an estimate for layers without a formula.

A multiply-add counts 2 FLOPs. Every other operation that computes counts 1 per element of its
largest tensor; an operation that only moves or renames data counts none. A loop's body counts as
often as it may run; of several branches, the largest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

_MOVES = """
    Const Placeholder Identity IdentityN StopGradient PreventGradient NoOp Reshape Squeeze
    ExpandDims Shape ShapeN Size Rank Cast Pack Unpack ConcatV2 ConcatOffset Slice
    StridedSlice Split SplitV Transpose Tile Fill ZerosLike OnesLike Range BroadcastTo
    BroadcastGradientArgs ConjugateTranspose InvertPermutation
"""
_FREE = frozenset(_MOVES.split())
LOOPS = frozenset(["While", "StatelessWhile"])
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_BRANCHES = frozenset(["If", "StatelessIf", "Case", "StatelessCase"])
# Which input is the tensor of output's size, and which the filter, in convolutions' gradients.
_CONVOLUTION_GRADIENTS = ("BackpropInput", "BackpropFilter")


def flops(operations: Iterable[tf.Operation], graph: tf.Graph) -> int:
    """Return the FLOPs of some operations.

    Args:
        operations: operations of a traced function's graph.
        graph: holds the functions that they call.
    """
    return sum(_operation_flops(op, graph) for op in operations)


def _operation_flops(op: tf.Operation, graph: tf.Graph) -> int:
    kind = op.type
    if kind in _FREE or kind.startswith(("TensorList", "EmptyTensorList")):
        return 0
    if kind in _CALLS:
        return _function_flops(op.get_attr("f").name, graph)
    if kind in LOOPS:
        return iterations(op) * _function_flops(op.get_attr("body").name, graph)
    if kind in _BRANCHES:
        return max(_function_flops(branch.name, graph) for branch in _branches(op))
    product = _product_flops(op)
    if product is not None:
        return product
    return max((num_elements(t) for t in (*op.outputs, *op.inputs)), default=0)


def _branches(op: tf.Operation) -> list[Any]:
    """Return the functions of which a conditional calls one."""
    if op.type.endswith("Case"):
        return list(op.get_attr("branches"))
    return [op.get_attr(name) for name in ("then_branch", "else_branch")]


def _product_flops(op: tf.Operation) -> int | None:
    """Return the FLOPs of a matrix product or convolution; None for other operations."""
    kind = op.type
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        flag = "transpose_a" if kind == "MatMul" else "adj_x"
        inner = op.inputs[0].shape[-2 if op.get_attr(flag) else -1]
        return 2 * num_elements(op.outputs[0]) * int(inner or 0)
    if kind == "Einsum":
        return _einsum_flops(op)
    if not kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2dNative")):
        return None
    small = op.outputs[0]
    weights = op.inputs[1]
    if any(part in kind for part in _CONVOLUTION_GRADIENTS):
        small = op.inputs[2]
        weights = op.outputs[0] if "BackpropFilter" in kind else op.inputs[1]
    shape = weights.shape.as_list()
    per_output = shape[:-2] if kind.startswith("Depthwise") else shape[:-1]
    return 2 * num_elements(small) * math.prod(size or 0 for size in per_output)


def _einsum_flops(op: tf.Operation) -> int:
    terms, _, result = op.get_attr("equation").decode().partition("->")
    size_of: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), op.inputs, strict=True):
        labels = [label for label in term if label != "."]
        shape = tensor.shape.as_list()
        if "." in term:  # broadcast axes are counted with the result's
            at = term.index(".")
            shape = shape[:at] + shape[len(shape) - (len(labels) - at) :]
        size_of.update(zip(labels, (size or 0 for size in shape), strict=True))
    contracted = math.prod(size for label, size in size_of.items() if label not in result)
    return 2 * num_elements(op.outputs[0]) * contracted


def _function_flops(name: str, graph: tf.Graph) -> int:
    called = body(name, graph)
    return flops(called.get_operations(), called)


def num_elements(tensor: tf.Tensor) -> int:
    """Return the number of elements; dimensions of unknown size count as none."""
    return int(tensor.shape.num_elements() or 0) if tensor.shape.rank is not None else 0


def body(name: str, graph: tf.Graph) -> tf.Graph:
    """Return the graph of a function that an operation of `graph` calls; of an old kind, none.

    The loops of tf.nn.ctc_loss are of such a kind: their operations are not counted.
    """
    found: tf.Graph | None = getattr(graph._functions[name], "graph", None)
    return tf.Graph() if found is None else found


def iterations(op: tf.Operation) -> int:
    """Return how often a loop runs; 1 where its graph does not say.

    That is its constant limit, the length of the tensors that it unstacks, or as often as the loop
    that it is the gradient of: such a loop reads the other's number of rounds.
    """
    _, limit, rounds, *_ = op.inputs
    known = tf.get_static_value(limit)
    if known is not None and known > 0:
        return int(known)
    unstacked = [each.op.inputs[0] for each in op.inputs if each.op.type == "TensorListFromTensor"]
    if unstacked:
        return max(int(tensor.shape[0] or 1) for tensor in unstacked)
    return iterations(rounds.op) if rounds.op.type in LOOPS else 1
