"""A cell's forward and gradients, traced once and cut into programs.

What is computed from the cell's inputs alone is its forward, the rest its backward. The programs:

*   F: the forward.
*   B: all gradients, from the cell's inputs: it computes the forward again.
*   FB: the forward and all gradients; it computes nothing twice.
*   K: the forward, and those of its tensors that the backward reads (residuals).
*   R: the residuals alone.
*   BK: all gradients, from residuals.
*   I, from the cell's inputs, or IK, from residuals: gradients of the imports, and what W reads.
*   W: gradients of the weights, from what I or IK returned. It computes nothing twice.

Tensors that wait between two programs are held under their names in the trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import precision
from lingvo_gpipe.execution import tracing
from lingvo_gpipe.graphs import sections

_NAMES = {
    "F": "forward",
    "B": "backward",
    "FB": "fused",
    "K": "forward_kept",
    "R": "recompute",
    "BK": "backward_kept",
    "I": "backward_imports",
    "IK": "backward_imports_kept",
    "W": "backward_weights",
}

Held: TypeAlias = "dict[str, tf.Tensor]"
RawGradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A forward and its gradients in one graph.

    Attributes:
        inputs: the cell's inputs, flat; placeholders.
        upstream: gradients of the exports, and scales of the losses; placeholders.
        outputs: flat outputs of the forward.
        weights: gradient of each weight.
        imports: gradients of the imports' differentiable leaves.
        again: flat outputs of the forward where the backward computes it again by itself, as
            `tf.recompute_grad` does. I computes what W needs of it.
    """

    inputs: Sequence[tf.Tensor]
    upstream: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    weights: Sequence[RawGradient]
    imports: Sequence[RawGradient]
    again: Sequence[tf.Tensor] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FlatResults:
    """What a program of the trace returned; empty where it computes no such thing.

    Attributes:
        outputs: flat outputs of the forward.
        weights: gradient of each weight, added to its accumulator if there is one.
        imports: gradients of the imports' differentiable leaves.
        held: what the cell's next program of the micro-batch reads.
    """

    outputs: list[tf.Tensor]
    weights: list[tf.Tensor]
    imports: list[tf.Tensor]
    held: Held


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A traced part of the trace, and which arguments and held tensors it is called with."""

    function: tracing.Traced
    arguments: tuple[int, ...]
    held: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Cuts:
    """Where the trace is cut.

    Attributes:
        forward: names of the operations whose results a backward does not compute again.
        backward: what BK computes.
        residuals: what BK reads of the forward.
        weights_alone: what W computes.
        read_by_w: what W reads of the forward and of I.
    """

    forward: frozenset[str]
    backward: sections.Section
    residuals: tuple[tf.Tensor, ...]
    weights_alone: sections.Section
    read_by_w: tuple[tf.Tensor, ...]


class CutBackward:
    """The programs of one trace; each is made when it is first called.

    Attributes:
        graphs: the graph of each program that was made so far, by name.
    """

    def __init__(self, trace: Trace, name: str, cell: int, jit: bool) -> None:
        """Cut the trace.

        Args:
            trace: forward and gradients.
            name: name of the cell's first layer, for profiles.
            cell: number of the cell, for messages.
            jit: whether the programs are compiled with XLA.
        """
        self.graphs: dict[str, tf.Graph] = {}
        self._trace = trace
        self._name, self._cell, self._jit = name, cell, jit
        self._argument_numbers = {
            tensor.name: number for number, tensor in enumerate((*trace.inputs, *trace.upstream))
        }
        self._sections = sections.Sections(trace.inputs[0].graph)
        self._programs: dict[tuple[str, bool], _Program] = {}

    @functools.cached_property
    def _cuts(self) -> _Cuts:
        """Where programs that continue each other are cut."""
        trace = self._trace
        holdable = self._sections.all()
        if self._jit:
            holdable = holdable - self._sections.unfit_for_xla()
        forward = holdable - self._sections.after(trace.upstream)
        weights, imports = _parts(trace.weights), _parts(trace.imports)
        movable = forward - self._sections.section(trace.outputs).operations
        backward = self._sections.section((*weights, *imports), forward, forward, movable)
        forward -= backward.operations
        for_imports = (
            holdable & self._sections.section((*imports, *trace.again), forward).operations
        )
        weights_alone = self._sections.section(weights, forward | for_imports, for_imports)
        return _Cuts(
            forward=forward,
            backward=backward,
            residuals=self._computed(backward),
            weights_alone=weights_alone,
            read_by_w=self._computed(weights_alone),
        )

    @property
    def num_traces(self) -> int:
        """How many programs were made so far."""
        return len(self._programs)

    def run(
        self,
        name: str,
        arguments: Sequence[tf.Tensor],
        held: Held,
        accumulators: Sequence[tf.Tensor] = (),
    ) -> FlatResults:
        """Call a program.

        Args:
            name: see the module.
            arguments: inputs of the cell; then, for a backward, what comes from upstream.
            held: what the cell's earlier program of the micro-batch returned in `held`.
            accumulators: for each weight, what its gradient is added to; empty: nothing.
        """
        trace = self._trace
        outputs = trace.outputs if name in ("F", "FB", "K") else ()
        weights = trace.weights if name in ("B", "FB", "BK", "W") else ()
        imports = trace.imports if name in ("B", "FB", "BK", "I", "IK") else ()
        leaves = self._leaves(name, held)
        if not (outputs or weights or imports or leaves):
            return FlatResults([], [], [], {})
        accumulators = accumulators if weights else ()
        key = name, bool(accumulators)
        if key not in self._programs:
            if name in ("BK", "W"):
                section = self._cuts.backward if name == "BK" else self._cuts.weights_alone
            else:
                available = self._cuts.forward if name == "IK" else ()
                fetches = (*_parts(weights), *_parts(imports), *outputs, *leaves)
                section = self._sections.section(fetches, available)
            self._programs[key] = self._traced(name, section, (*weights, *imports), accumulators)
        called = self._programs[key]
        read = [arguments[number] for number in called.arguments]
        results = iter(called.function(*read, *(held[name] for name in called.held), *accumulators))
        totals, gradients, forward = (
            [next(results) for _ in same] for same in (weights, imports, outputs)
        )
        held_next = {tensor.name: value for tensor, value in zip(leaves, results, strict=True)}
        if name in ("I", "IK"):
            held_next = {
                t.name: held_next.get(t.name, held.get(t.name)) for t in self._cuts.read_by_w
            }
        return FlatResults(forward, totals, gradients, held_next)

    def _leaves(self, name: str, held: Held) -> list[tf.Tensor]:
        """Return the tensors that a program computes for the next one."""
        if name in ("K", "R"):
            return list(self._cuts.residuals)
        if name in ("I", "IK"):
            return [t for t in self._cuts.read_by_w if t.name not in held]
        return []

    def _computed(self, section: sections.Section) -> tuple[tf.Tensor, ...]:
        """Return what a section reads, arguments excepted."""
        return tuple(
            tensor for tensor in section.reads if tensor.name not in self._argument_numbers
        )

    def _traced(
        self,
        name: str,
        section: sections.Section,
        raw: Sequence[RawGradient],
        accumulators: Sequence[tf.Tensor],
    ) -> _Program:
        """Trace a program.

        Args:
            name: its name.
            section: what it computes: the tensors of `raw`, then others.
            raw: gradients that it returns, those with accumulators first.
            accumulators: see `run`.
        """
        arguments = [tensor for tensor in section.reads if tensor.name in self._argument_numbers]
        held = self._computed(section)
        read = [*arguments, *held]

        def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            values = {tensor.name: value for tensor, value in zip(read, flat, strict=False)}
            computed = iter(self._sections.compute(section, values))
            gradients = [_joined(gradient, computed) for gradient in raw]
            return [*_with_totals(flat[len(read) :], gradients), *computed]

        function = tracing.trace(
            f"{_NAMES[name]}_{self._name}",
            compute,
            [*read, *accumulators],
            cell=self._cell,
            jit=self._jit,
        )
        self.graphs[name] = function.graph
        return _Program(
            function,
            tuple(self._argument_numbers[tensor.name] for tensor in arguments),
            tuple(tensor.name for tensor in held),
        )


def _with_totals(totals: Sequence[tf.Tensor], gradients: Sequence[RawGradient]) -> list[tf.Tensor]:
    """Return gradients, the first of them added to the totals so far."""
    return [
        *map(_added, totals, gradients),
        *map(tf.convert_to_tensor, gradients[len(totals) :]),
    ]


def _added(total: tf.Tensor, gradient: RawGradient) -> tf.Tensor:
    """Add a gradient to its total, in the total's dtype; sparse rows are scattered."""
    if isinstance(gradient, tf.IndexedSlices):
        values = precision.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], values)
    return total + precision.cast(gradient, total.dtype)


def _parts(gradients: Sequence[RawGradient]) -> tuple[tf.Tensor, ...]:
    """Return the tensors of gradients, some of which may be rows."""
    parts: list[tf.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            shape = [] if gradient.dense_shape is None else [gradient.dense_shape]
            parts += [gradient.values, gradient.indices, *shape]
        else:
            parts.append(gradient)
    return tuple(parts)


def _joined(like: RawGradient, parts: Iterator[tf.Tensor]) -> RawGradient:
    """Return a gradient from its next tensors in `parts`; see `_parts`."""
    if not isinstance(like, tf.IndexedSlices):
        return next(parts)
    values, indices = next(parts), next(parts)
    return tf.IndexedSlices(values, indices, None if like.dense_shape is None else next(parts))
