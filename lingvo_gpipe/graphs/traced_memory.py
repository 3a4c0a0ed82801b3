"""The memory that a traced function needs while it runs, read from its graph.

A formula knows what a layer computes. The graph also knows what TensorFlow keeps of it, such as a
copy of an activation for each of two gradients. Nothing is executed: TensorFlow's executor is
simulated on the graph.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from lingvo_gpipe.graphs.traced_flops import LOOPS, body, iterations, num_elements

# Their output shares its input's buffer.
_VIEWS = frozenset(
    ("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")
)
# Arguments of the function, and constants: not allocated by a run.
_NOT_ALLOCATED = frozenset(("Placeholder", "Const"))
# Kernels that write into an input of the same size when it has no other reader left.
_IN_PLACE = """
    Abs Add AddN AddV2 BiasAdd Cast Div DivNoNan Elu EluGrad Erf Erfc Exp Log Log1p LogSoftmax
    Maximum Minimum Mul Neg Pow RealDiv Relu Relu6 ReluGrad Rsqrt RsqrtGrad Select SelectV2 Sigmoid
    SigmoidGrad Softmax Softplus SoftplusGrad Sqrt SqrtGrad Square SquaredDifference Sub Tanh
    TanhGrad
"""
_IN_PLACE_TYPES = frozenset(_IN_PLACE.split())
# Matrix products: this many of their FLOPs take as long as reading or writing one byte.
_CONTRACTIONS = ("MatMul", "Conv", "Einsum")
_FLOPS_PER_BYTE = 25
# A thread continues with operations below this size itself, and queues larger ones for others.
_SMALL_BYTES = 2**16


def peak_bytes(graph: tf.Graph, threads: int) -> int:
    """Return the peak bytes of a function while it runs, its arguments not counted.

    As in TensorFlow's executor, an operation starts as soon as its inputs exist: what the gradient
    needs of the forward alone is computed along with the forward, and waits. A tensor is freed when
    its last reader has run; outputs stay.

    Args:
        graph: graph of a traced function (`ConcreteFunction.graph`), with static shapes.
        threads: number of operations that run at a time.
    """
    order = _needed(graph)
    memory = _Memory(graph, order)
    _Executor(order, threads).run(memory)
    return memory.peak


def kept_bytes(graph: tf.Graph, outputs: Collection[int]) -> int:
    """Return the bytes of some outputs of a function; arguments passed through count nothing.

    Args:
        graph: graph of a traced function, with static shapes.
        outputs: indices of the outputs.
    """
    held = {}
    for number in outputs:
        tensor = graph.outputs[number]
        while tensor.op.type in _VIEWS:
            tensor = _source(tensor)
        if tensor.op.type not in _NOT_ALLOCATED:
            held[tensor.ref()] = _bytes(tensor)
    return sum(held.values())


def residual_bytes(
    forward: Collection[tf.Operation], backward: Iterable[tf.Operation], graph: tf.Graph
) -> int:
    """Return the bytes of the tensors of a forward pass that its backward pass reads.

    Args:
        forward: operations of the forward pass.
        backward: operations of its gradient, in the same graph.
        graph: holds the functions that they call.
    """
    in_forward = {op.name for op in forward if op.type not in _NOT_ALLOCATED}
    kept: dict[str, int] = {}
    for op in backward:
        for tensor in op.inputs:
            while tensor.op.type in _VIEWS:
                tensor = _source(tensor)
            if tensor.op.name in in_forward:
                stacked = tensor.dtype == tf.variant
                kept[tensor.name] = _stacked_bytes(tensor.op, graph) if stacked else _bytes(tensor)
    return sum(kept.values())


def _stacked_bytes(op: tf.Operation, graph: tf.Graph) -> int:
    """Return the bytes of all intermediate tensors that a loop keeps for its gradient."""
    if op.type not in LOOPS:
        return 0
    operations = body(op.get_attr("body").name, graph).get_operations()
    pushed = [o.inputs[1] for o in operations if o.type == "TensorListPushBack"]
    return iterations(op) * sum(map(_bytes, pushed))


def is_complete(graph: tf.Graph) -> bool:
    """Return whether `peak_bytes` sees all memory that the function needs.

    The bodies of loops, conditions and other calls are not simulated, only their outputs. Lists of
    tensors and floats of unknown shape have no known size. (Integers of unknown shape are shapes.)
    """
    return not any(
        any(attr.type in ("func", "list(func)") for attr in op.op_def.attr)
        or any(
            tensor.dtype == tf.variant
            or (tensor.dtype.is_floating and not tensor.shape.is_fully_defined())
            for tensor in op.outputs
        )
        for op in _needed(graph)
    )


def _needed(graph: tf.Graph) -> list[tf.Operation]:
    """Return the operations that the outputs need, in the order of tracing."""
    needed: set[tf.Operation] = set()
    stack = [tensor.op for tensor in graph.outputs]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op in needed]


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory of one or several tensors, in use until the last of them was read."""

    size: int
    readers: int


class _Memory:
    """Buffers of a running function; arguments and constants have none.

    Attributes:
        peak: largest number of bytes in use at once so far.
    """

    def __init__(self, graph: tf.Graph, order: Sequence[tf.Operation]) -> None:
        self.peak = 0
        self._in_use = 0
        self._buffers: dict[object, _Buffer] = {}  # by `Tensor.ref()`: tensors are not hashable
        self._readers = collections.Counter(t.ref() for op in order for t in op.inputs)
        self._readers.update(t.ref() for t in graph.outputs)

    def start(self, op: tf.Operation) -> None:
        """Allocate the outputs of an operation."""
        if op.type in _NOT_ALLOCATED:
            return
        for tensor in op.outputs:
            readers = self._readers[tensor.ref()]
            shared = self._shared(op, tensor)
            if shared is not None:
                shared.readers += readers
                self._buffers[tensor.ref()] = shared
            elif op.type not in _VIEWS:
                self._buffers[tensor.ref()] = _Buffer(_bytes(tensor), readers)
                self._in_use += _bytes(tensor)
        self.peak = max(self.peak, self._in_use)

    def finish(self, op: tf.Operation) -> None:
        """Free what no operation will read any more."""
        for tensor in op.outputs:
            buffer = self._buffers.get(tensor.ref())
            if buffer is not None and not buffer.readers:
                self._in_use -= buffer.size
        for tensor in op.inputs:
            buffer = self._buffers.get(tensor.ref())
            if buffer is not None:
                buffer.readers -= 1
                self._in_use -= 0 if buffer.readers else buffer.size

    def _shared(self, op: tf.Operation, tensor: tf.Tensor) -> _Buffer | None:
        """Return the input buffer that an operation's output reuses."""
        if op.type in _VIEWS:
            return self._buffers.get(_source(tensor).ref())
        if op.type in _IN_PLACE_TYPES:
            for source in op.inputs:
                buffer = self._buffers.get(source.ref())
                if buffer and buffer.readers == 1 and buffer.size == _bytes(tensor):
                    return buffer
        return None


class _Executor:
    """A simulation of TensorFlow's executor: which operation runs when, on a number of threads.

    A thread continues with one operation that its last one made ready and pushes the others onto
    its own stack. An idle thread steals from the bottom of another thread's stack.
    """

    def __init__(self, order: Sequence[tf.Operation], threads: int) -> None:
        self._missing: dict[tf.Operation, int] = {}
        self._followers: dict[tf.Operation, list[tf.Operation]] = {op: [] for op in order}
        for op in order:
            before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
            self._missing[op] = len(before)
            for other in before:
                self._followers[other].append(op)
        self._next = [collections.deque[tf.Operation]() for _ in range(threads)]
        self._stacks = [collections.deque[tf.Operation]() for _ in range(threads)]
        self._stacks[0].extend(op for op in order if not self._missing[op])

    def run(self, memory: _Memory) -> None:
        """Run every operation."""
        running: list[tuple[float, int, int, tf.Operation]] = []
        idle, count, now = list(range(len(self._stacks))), 0, 0.0
        while True:
            for thread in list(idle):
                op = self._take(thread)
                if op is not None:
                    idle.remove(thread)
                    memory.start(op)
                    count += 1  # breaks ties: of two that end together, the first one first
                    heapq.heappush(running, (now + _duration(op), count, thread, op))
            if not running:
                return
            now, _, thread, op = heapq.heappop(running)
            memory.finish(op)
            self._hand_on(thread, op)
            idle.insert(0, thread)

    def _take(self, thread: int) -> tf.Operation | None:
        if self._next[thread]:
            return self._next[thread].popleft()
        if self._stacks[thread]:
            return self._stacks[thread].pop()
        return next((stack.popleft() for stack in self._stacks if stack), None)

    def _hand_on(self, thread: int, op: tf.Operation) -> None:
        large: list[tf.Operation] = []
        for follower in self._followers[op]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                small = _duration(follower) < _SMALL_BYTES
                (self._next[thread] if small else large).append(follower)
        if large and not self._next[thread]:
            self._next[thread].append(large.pop())
        self._stacks[thread].extend(large)


def _duration(op: tf.Operation) -> float:
    """Return the duration of an operation, in units of the time to read or write one byte."""
    if op.type in _NOT_ALLOCATED or op.type in _VIEWS:
        return 0.0
    tensors = (*op.inputs, *op.outputs)
    duration = float(sum(map(_bytes, tensors)))
    if any(part in op.type for part in _CONTRACTIONS):
        # (m·k)(k·n)(m·n) is the square of a product's multiply-adds.
        largest = sorted(map(num_elements, tensors))[-3:]
        duration += 2 * math.sqrt(math.prod(largest)) / _FLOPS_PER_BYTE
    return duration


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor whose buffer a view shares."""
    return tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]


def _bytes(tensor: tf.Tensor) -> int:
    """Return the bytes of a tensor; dimensions of unknown size count as none."""
    return num_elements(tensor) * max(tensor.dtype.size, 1)
