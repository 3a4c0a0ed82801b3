"""What a traced program holds while it runs, read from its graph.

Formulas know what a layer computes; the graph knows what TensorFlow keeps of it, such as a copy of
an activation for each of two gradients. Nothing is run: the run is simulated.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

# Their output is their input: no bytes of its own.
_VIEWS = frozenset(
    ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")
)
# What a program is given, or is part of it.
_GIVEN = frozenset(("Placeholder", "Const"))
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


# Operations that multiply matrices: so many of their FLOPs take the time of a byte of others.
_CONTRACTIONS = ("MatMul", "Conv", "Einsum")
_FLOPS_PER_BYTE = 25
# A thread goes on with operations below this at once, and leaves larger ones to others.
_SMALL_BYTES = 2**16


def peak_bytes(graph: Any, threads: int) -> int:
    """Return the most bytes that a program holds at once, its arguments not counted.

    Operations start as soon as what they read is there, as TensorFlow's executor starts them: what
    the gradient needs of the forward alone is computed along with the forward, and waits. A tensor
    goes when its last reader has run; outputs stay.

    Args:
        graph: a traced function's graph (`ConcreteFunction.graph`), of static shapes.
        threads: how many operations run at a time.
    """
    order = _needed(graph)
    memory = _Memory(graph, order)
    _Executor(order, threads).run(memory)
    return memory.peak


def kept_bytes(graph: Any, outputs: Collection[int]) -> int:
    """Return the bytes that some of a program's outputs hold, arguments not counted.

    Args:
        graph: a traced function's graph, of static shapes.
        outputs: their numbers.
    """
    held = {}
    for number in outputs:
        tensor = graph.outputs[number]
        while tensor.op.type in _VIEWS:
            tensor = _source(tensor)
        if tensor.op.type not in _GIVEN:
            held[tensor.ref()] = _bytes(tensor)
    return sum(held.values())


def is_told(graph: Any) -> bool:
    """Tell whether a graph tells all that its program holds.

    Of loops, conditions and other calls it has the outputs alone, not what their bodies hold; nor
    does it know the bytes of lists of tensors, and of floats of unknown shape. (Integers of
    unknown shape are shapes themselves.)
    """
    return not any(
        any(attr.type in ("func", "list(func)") for attr in op.op_def.attr)
        or any(map(_is_hidden, op.outputs))
        for op in _needed(graph)
    )


def _is_hidden(tensor: Any) -> bool:
    unknown = tensor.dtype.is_floating and not tensor.shape.is_fully_defined()
    return bool(tensor.dtype == tf.variant or unknown)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A differentiated call, which TensorFlow splits in two.

    Attributes:
        forward: graph of the first, whose outputs end in all that its gradient may need.
        backward: graph of the second.
        kept: numbers of the outputs that the second takes from the first.
    """

    forward: Any
    backward: Any
    kept: frozenset[int]


def split_call(graph: Any) -> Pair:
    """Return what became of the one call of a program in `graph` and its gradient.

    TensorFlow keeps whatever the gradient's operations read, those that no output needs too: the
    gradient by a constant keeps an activation as well.
    """
    first, second = (op for op in graph.get_operations() if op.type == "PartitionedCall")
    # The library of functions has no public door that gives their graphs.
    forward, backward = (graph._functions[op.get_attr("f").name].graph for op in (first, second))
    kept = frozenset(tensor.value_index for tensor in second.inputs if tensor.op is first)
    return Pair(forward, backward, kept)


def _needed(graph: Any) -> list[Any]:
    """Return the operations that the outputs need, in the order of tracing."""
    needed: set[Any] = set()
    stack = [tensor.op for tensor in graph.outputs]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op in needed]


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory of one or several tensors, held while one of them is still to be read."""

    size: int
    readers: int


class _Memory:
    """Buffers of a program that runs; arguments and constants have none.

    Attributes:
        peak: the most bytes held at once so far.
    """

    def __init__(self, graph: Any, order: Sequence[Any]) -> None:
        self.peak = 0
        self._held = 0
        self._buffers: dict[Any, _Buffer] = {}
        self._readers = collections.Counter(t.ref() for op in order for t in op.inputs)
        self._readers.update(t.ref() for t in graph.outputs)

    def start(self, op: Any) -> None:
        """Make room for what an operation gives."""
        if op.type in _GIVEN:
            return
        for tensor in op.outputs:
            readers = self._readers[tensor.ref()]
            shared = self._shared(op, tensor)
            if shared is not None:
                shared.readers += readers
                self._buffers[tensor.ref()] = shared
            elif op.type not in _VIEWS:
                self._buffers[tensor.ref()] = _Buffer(_bytes(tensor), readers)
                self._held += _bytes(tensor)
        self.peak = max(self.peak, self._held)

    def finish(self, op: Any) -> None:
        """Let go of what nobody will read any more."""
        for tensor in op.outputs:
            buffer = self._buffers.get(tensor.ref())
            if buffer is not None and not buffer.readers:
                self._held -= buffer.size
        for tensor in op.inputs:
            buffer = self._buffers.get(tensor.ref())
            if buffer is not None:
                buffer.readers -= 1
                self._held -= 0 if buffer.readers else buffer.size

    def _shared(self, op: Any, tensor: Any) -> _Buffer | None:
        """Return the buffer of an input that an operation's output takes over."""
        if op.type in _VIEWS:
            return self._buffers.get(_source(tensor).ref())
        if op.type in _IN_PLACE:
            for given in op.inputs:
                buffer = self._buffers.get(given.ref())
                if buffer and buffer.readers == 1 and buffer.size == _bytes(tensor):
                    return buffer
        return None


class _Executor:
    """TensorFlow's executor on a clock of its own: which operation when, on so many threads.

    A thread goes on with one operation that its last one made ready, and puts others on top of its
    pile; one that has nothing to do takes from the bottom of another's.
    """

    def __init__(self, order: Sequence[Any], threads: int) -> None:
        self._missing: dict[Any, int] = {}
        self._followers: dict[Any, list[Any]] = {op: [] for op in order}
        for op in order:
            before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
            self._missing[op] = len(before)
            for other in before:
                self._followers[other].append(op)
        self._next: list[collections.deque[Any]] = [collections.deque() for _ in range(threads)]
        self._piles: list[collections.deque[Any]] = [collections.deque() for _ in range(threads)]
        self._piles[0].extend(op for op in order if not self._missing[op])

    def run(self, memory: _Memory) -> None:
        """Run every operation."""
        running: list[tuple[float, int, int, Any]] = []
        idle, count = list(range(len(self._piles))), 0
        now = 0.0
        while True:
            for thread in list(idle):
                op = self._take(thread)
                if op is not None:
                    idle.remove(thread)
                    memory.start(op)
                    count += 1  # of two that end together, the first one first
                    heapq.heappush(running, (now + _length(op), count, thread, op))
            if not running:
                return
            now, _, thread, op = heapq.heappop(running)
            memory.finish(op)
            self._hand_on(thread, op)
            idle.insert(0, thread)

    def _take(self, thread: int) -> Any:
        if self._next[thread]:
            return self._next[thread].popleft()
        if self._piles[thread]:
            return self._piles[thread].pop()
        return next((pile.popleft() for pile in self._piles if pile), None)

    def _hand_on(self, thread: int, op: Any) -> None:
        large: list[Any] = []
        for follower in self._followers[op]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                small = _length(follower) < _SMALL_BYTES
                (self._next[thread] if small else large).append(follower)
        if large and not self._next[thread]:
            self._next[thread].append(large.pop())
        self._piles[thread].extend(large)


def _length(op: Any) -> float:
    """Return how long an operation takes, in the time of a byte read or written."""
    if op.type in _GIVEN or op.type in _VIEWS:
        return 0.0
    sizes = [_bytes(tensor) for tensor in (*op.inputs, *op.outputs)]
    length = float(sum(sizes))
    if any(part in op.type for part in _CONTRACTIONS):
        # (m·k)(k·n)(m·n) is the square of a product's multiply-adds.
        largest = sorted(t.shape.num_elements() or 0 for t in (*op.inputs, *op.outputs))[-3:]
        length += 2 * math.sqrt(math.prod(largest)) / _FLOPS_PER_BYTE
    return length


def _source(tensor: Any) -> Any:
    """Return the tensor that one is a view of."""
    return tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]


def _bytes(tensor: Any) -> int:
    size = tensor.shape.num_elements() if tensor.shape.is_fully_defined() else 0
    return size * max(tensor.dtype.size, 0)
