"""What a traced program holds while it runs, read from its graph.

Formulas know what a layer computes; the graph knows what TensorFlow keeps of it, such as a copy of
an activation for each of two gradients. Nothing is run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

# Their output is their input: no bytes of its own.
_VIEWS = frozenset(
    ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")
)
# Kernels that write into an input of the same size, where nobody else needs it any more.
_IN_PLACE = frozenset(
    (
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Cast",
        "Div",
        "DivNoNan",
        "Elu",
        "EluGrad",
        "Erf",
        "Erfc",
        "Exp",
        "Log",
        "Log1p",
        "LogSoftmax",
        "Maximum",
        "Minimum",
        "Mul",
        "Neg",
        "Pow",
        "RealDiv",
        "Relu",
        "Relu6",
        "ReluGrad",
        "Rsqrt",
        "RsqrtGrad",
        "Select",
        "SelectV2",
        "Sigmoid",
        "SigmoidGrad",
        "Softmax",
        "Softplus",
        "SoftplusGrad",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
    )
)


def peak_bytes(graph: Any, first: int = 0) -> int:
    """Return the most bytes that a program holds at once, its arguments not counted.

    Operations run one after the other in the order of tracing; a tensor goes when its last reader
    has run; outputs stay.

    Args:
        graph: a traced function's graph (`ConcreteFunction.graph`), of static shapes.
        first: number of operations that are another program's; what they make counts as arguments.
    """
    others = set(graph.get_operations()[:first])
    order = [op for op in _order(graph) if op not in others]
    buffers = _buffers(graph, order)
    changes = [0] * (len(order) + 2)
    for buffer in set(buffers.values()):
        changes[buffer.start] += buffer.size
        changes[buffer.stop + 1] -= buffer.size
    return max(itertools.accumulate(changes))


def kept_bytes(graph: Any, count: int) -> int:
    """Return the bytes that the first operations of a graph make and the others read.

    The others are read whether an output needs them or not, as TensorFlow does when it splits a
    differentiated call in two: the gradient by a constant keeps an activation as well.

    Args:
        graph: a traced function's graph, of static shapes.
        count: how many operations the forward pass has, in the order of tracing.
    """
    order = graph.get_operations()
    first = set(order[:count])
    buffers = _buffers(graph, order)
    read = {
        buffers[tensor.ref()]
        for op in order[count:]
        for tensor in op.inputs
        if tensor.op in first and tensor.ref() in buffers
    }
    return sum(buffer.size for buffer in read)


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory of one or several tensors, from the operation that makes it to its last reader."""

    size: int
    start: int
    stop: int


def _order(graph: Any) -> list[Any]:
    """Return the operations that the outputs need, in the order of tracing."""
    needed: set[Any] = set()
    stack = [tensor.op for tensor in graph.outputs]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op in needed]


def _buffers(graph: Any, order: Sequence[Any]) -> dict[Any, _Buffer]:
    """Return the buffer of every tensor that is neither an argument nor a constant."""
    last_read = {
        tensor.ref(): position for position, op in enumerate(order) for tensor in op.inputs
    }
    last_read |= {tensor.ref(): len(order) for tensor in graph.outputs}
    whole = _whole_reads(order, last_read)
    buffers: dict[Any, _Buffer] = {}
    for position, op in enumerate(order):
        if op.type in ("Placeholder", "Const"):
            continue
        for index, tensor in enumerate(op.outputs):
            stop = whole.get(tensor.ref(), position)
            shared = _shared(op, index, position, buffers)
            if shared is not None:
                shared.stop = max(shared.stop, stop)
                buffers[tensor.ref()] = shared
            elif not _is_view(op):
                buffers[tensor.ref()] = _Buffer(_bytes(tensor), position, stop)
    return buffers


def _whole_reads(order: Sequence[Any], last_read: dict[Any, int]) -> dict[Any, int]:
    """Return when each tensor is read last, through views of it too."""
    whole = dict(last_read)
    for op in reversed(order):
        if _is_view(op):
            for index, tensor in enumerate(op.outputs):
                source = op.inputs[index if op.type == "IdentityN" else 0].ref()
                whole[source] = max(whole.get(source, 0), whole.get(tensor.ref(), 0))
    return whole


def _is_view(op: Any) -> bool:
    return op.type in _VIEWS


def _shared(op: Any, index: int, position: int, buffers: dict[Any, _Buffer]) -> _Buffer | None:
    """Return the buffer of an input that an operation's output takes over."""
    if _is_view(op):
        return buffers.get(op.inputs[index if op.type == "IdentityN" else 0].ref())
    if op.type in _IN_PLACE:
        wanted = _bytes(op.outputs[index])
        for tensor in op.inputs:
            buffer = buffers.get(tensor.ref())
            if buffer is not None and buffer.size == wanted and buffer.stop == position:
                return buffer
    return None


def _bytes(tensor: Any) -> int:
    size = tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0
    return size * max(tensor.dtype.size, 0)
