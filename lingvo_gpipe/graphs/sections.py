"""Sections of a traced graph: operations that run later than others, in a function of their own.

A section reads tensors of the sections before it. What is cheap to compute again, such as a view of
a tensor or its shape, is not read but is in both sections.

Custom gradients pass all their results through one IdentityN. Sections have none: what reads one of
its outputs reads the input instead, so that one result can be computed without the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe.graphs import traced_flops

# Computed in every section that needs them, where their inputs are not larger than their output.
_CHEAP = """
    BroadcastGradientArgs BroadcastTo Cast Const ExpandDims Fill Identity InvertPermutation OnesLike
    PreventGradient Range Rank Reshape Shape ShapeN Size Squeeze StopGradient ZerosLike
"""
_CHEAP_TYPES = frozenset(_CHEAP.split())
# Gradient → place of the forward's result among its inputs. oneDNN has the gradient only where the
# forward is in the same function; TensorFlow's own takes 50 times as long.
_WITH_GRADIENT = {"LRNGrad": 2, "MaxPool3DGrad": 1, "MaxPoolGrad": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Operations of a graph, and what they read of others.

    Attributes:
        operations: names of the operations.
        reads: tensors of other operations that they read, in the order of tracing.
        fetches: what the section returns.
    """

    operations: frozenset[str]
    reads: tuple[tf.Tensor, ...]
    fetches: tuple[tf.Tensor, ...]


class Sections:
    """A traced graph that is divided into sections."""

    def __init__(self, graph: tf.Graph) -> None:
        """Read the graph.

        Args:
            graph: graph of a traced function; it does not change from now on.
        """
        self._operations = graph.get_operations()
        self._order = {op.name: number for number, op in enumerate(self._operations)}
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._gradients = [op for op in self._operations if op.type in _WITH_GRADIENT]
        self._sources = {op.name: list(map(_passed, op.inputs)) for op in self._operations}

    def all(self) -> frozenset[str]:
        """Return the names of all operations, arguments excepted."""
        return frozenset(op.name for op in self._operations if op.type != "Placeholder")

    def unfit_for_xla(self) -> frozenset[str]:
        """Return the names of operations whose outputs XLA cannot take as arguments.

        These are lists of tensors, such as those of loops, and sizes and shapes.
        """
        return frozenset(
            op.name
            for op in self._operations
            if any(tensor.dtype == tf.variant or _is_shape(tensor) for tensor in op.outputs)
        )

    def after(self, tensors: Iterable[tf.Tensor]) -> frozenset[str]:
        """Return the names of the operations that depend on some of the tensors."""
        start = {tensor.op.name for tensor in tensors}
        dependents = set(start)
        # An operation of a graph comes after its inputs, except a loop whose gradient was traced:
        # it has further inputs since then.
        growing = True
        while growing:
            before = len(dependents)
            for op in self._operations:
                if any(tensor.op.name in dependents for tensor in self._sources[op.name]):
                    dependents.add(op.name)
            growing = len(dependents) > before
        return frozenset(dependents - start)

    def section(
        self,
        fetches: Sequence[tf.Tensor],
        available: Collection[str] = (),
        recomputable: Collection[str] = (),
        movable: Collection[str] = (),
    ) -> Section:
        """Return what is left to be computed for some tensors.

        Args:
            fetches: the tensors.
            available: names of operations whose outputs exist already; arguments always do.
            recomputable: those of them that the section computes again where this is cheap.
            movable: those of them that only this section needs. It computes them, too, unless it
                would then read more.
        """
        needed: set[str] = set()
        reads: dict[str, tf.Tensor] = {}

        def add(tensors: Iterable[tf.Tensor]) -> None:
            stack = list(tensors)
            while stack:
                tensor = stack.pop()
                if tensor.op.name in needed:
                    continue
                if tensor.op.type == "Placeholder" or tensor.op.name in available:
                    reads[tensor.name] = tensor
                else:
                    needed.add(tensor.op.name)
                    stack += self._sources[tensor.op.name]

        fetches = tuple(map(_passed, fetches))
        add(fetches)
        while True:
            with_gradients = self._computed_with_gradients(needed)
            candidates = [
                tensor
                for tensor in reads.values()
                if tensor.op.name in movable
                or (
                    tensor.op.name in recomputable
                    and (tensor.op.type in _CHEAP_TYPES or tensor.name in with_gradients)
                )
            ]
            # The last one first: its input may be cheap as well.
            candidates.sort(key=self._place, reverse=True)
            op = next((t.op for t in candidates if self._reads_no_more(t, reads)), None)
            if op is None:
                break
            for output in op.outputs:
                reads.pop(output.name, None)
            needed.add(op.name)
            add(self._sources[op.name])
        ordered = sorted(reads.values(), key=self._place)
        return Section(frozenset(needed), tuple(ordered), fetches)

    def compute(self, section: Section, values: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Add the operations of a section to the function that is being traced.

        Args:
            section: the section.
            values: name of each tensor that it reads → the tensor that replaces it.

        Returns:
            Its fetches.
        """
        definition = tf.compat.v1.GraphDef(
            versions=self._definition.versions, library=self._definition.library
        )
        for op in self._operations:
            if op.name in section.operations:
                node = definition.node.add()
                node.CopyFrom(self._nodes[op.name])
                node.attr.pop("_class", None)  # names operations that may be in another section
                before = [name for name in node.input if name[:1] == "^"]
                del node.input[:]
                node.input.extend(t.name.removesuffix(":0") for t in self._sources[op.name])
                node.input.extend(name for name in before if name[1:] in section.operations)
        inputs_of = {name for node in definition.node for name in node.input}
        mapped = [t.name for t in section.reads if t.name.removesuffix(":0") in inputs_of]
        computed = [op for op in self._operations if op.name in section.operations]
        copies = tf.graph_util.import_graph_def(
            definition,
            input_map={name: values[name] for name in mapped},
            return_elements=[op.name for op in computed],
            name="",
        )
        results = dict(values)
        for op, copy in zip(computed, copies, strict=True):
            for tensor, output in zip(op.outputs, copy.outputs, strict=True):
                output.set_shape(tensor.shape)  # Python computed some shapes, which are not nodes
                results[tensor.name] = output
        return [results[tensor.name] for tensor in section.fetches]

    def _computed_with_gradients(self, operations: Collection[str]) -> frozenset[str]:
        """Return the names of tensors that are to be computed where their gradients are."""
        return frozenset(
            self._sources[op.name][_WITH_GRADIENT[op.type]].name
            for op in self._gradients
            if op.name in operations
        )

    def _reads_no_more(self, tensor: tf.Tensor, reads: Collection[str]) -> bool:
        """Return whether the inputs of a tensor's operation are at most as large as the tensor.

        Those that are read anyway do not count, arguments and constants neither.
        """
        new = [
            source
            for source in self._sources[tensor.op.name]
            if source.name not in reads and source.op.type not in ("Const", "Placeholder")
        ]
        return sum(map(_size, new)) <= _size(tensor)

    def _place(self, tensor: tf.Tensor) -> tuple[int, int]:
        return self._order[tensor.op.name], tensor.value_index


def _passed(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that an IdentityN passes; others are themselves."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _is_shape(tensor: tf.Tensor) -> bool:
    rank = tensor.shape.rank
    return tensor.dtype in (tf.int32, tf.int64) and rank is not None and rank < 2


def _size(tensor: tf.Tensor) -> int:
    return traced_flops.num_elements(tensor) * max(tensor.dtype.size, 1)
