"""A cell's forward and gradients, traced once and cut into programs.

What is computed from the cell's inputs alone is its forward, the rest its backward. The programs:

*   K: the forward, and those of its tensors that the backward reads (residuals).
*   R: the residuals alone.
*   BK: all gradients, from residuals.
*   I, from the cell's inputs, or IK, from residuals: gradients of the imports, and what W reads.
*   W: gradients of the weights, from what I or IK returned. It computes nothing twice.

Tensors that wait between two programs are held under their names in the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import precision
from lingvo_gpipe.execution import tracing
from lingvo_gpipe.execution.cell_calls import CellOutputs
from lingvo_gpipe.graphs import sections

_NAMES = {
    "K": "forward_kept",
    "R": "recompute",
    "BK": "backward_kept",
    "I": "backward_imports",
    "IK": "backward_imports_kept",
    "W": "backward_weights",
}

Held: TypeAlias = "dict[str, tf.Tensor]"
RawGradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A forward and its gradients in one graph.

    Attributes:
        inputs: the cell's inputs, flat; placeholders.
        upstream: gradients of the exports, and scales of the losses; placeholders.
        outputs: flat outputs of the forward.
        weights: gradient of each weight.
        imports: gradients of the imports' floating leaves.
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
class RawGradients:
    """The forward of a cell and its gradients, in the graph that is being traced.

    Attributes:
        outputs: outputs of the forward.
        weights: gradient of each weight.
        imports: gradients of the imports' floating leaves.
        again: flat outputs of the forward, if `tf.recompute_grad` computed it again.
    """

    outputs: CellOutputs
    weights: list[RawGradient]
    imports: list[RawGradient]
    again: list[tf.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A traced function, and which arguments and held tensors it is called with."""

    function: tracing.Traced
    arguments: tuple[int, ...]
    held: tuple[str, ...]

    def __call__(
        self,
        arguments: Sequence[tf.Tensor],
        held: Mapping[str, tf.Tensor],
        accumulators: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Call it with what it reads, of all arguments and held tensors."""
        read = [arguments[place] for place in self.arguments]
        return list(self.function(*read, *(held[name] for name in self.held), *accumulators))


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
        self._places = {t.name: place for place, t in enumerate((*trace.inputs, *trace.upstream))}
        self._cut = cut = sections.Sections(trace.inputs[0].graph)
        held = cut.all() - cut.unfit_for_xla() if jit else cut.all()
        forward = held - cut.after(trace.upstream)
        weights, imports = _parts(trace.weights), _parts(trace.imports)
        movable = forward - cut.section(trace.outputs).operations
        self._backward = cut.section((*weights, *imports), forward, forward, movable)
        self._forward = forward - self._backward.operations
        self._residuals = self._computed(self._backward)
        of_imports = held & cut.section((*imports, *trace.again), self._forward).operations
        self._of_weights = cut.section(weights, self._forward | of_imports, of_imports)
        self._left = self._computed(self._of_weights)
        self._programs: dict[tuple[str, bool], _Program] = {}

    @property
    def num_traces(self) -> int:
        """How many programs were made so far."""
        return len(self._programs)

    def keep(self, inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Held]:
        """Run K: return the flat outputs of the forward, and its residuals."""
        count = len(self._trace.outputs)
        program = self._program(
            "K", lambda: self._cut.section((*self._trace.outputs, *self._residuals))
        )
        results = program(inputs, {})
        return results[:count], _held(self._residuals, results[count:])

    def recompute(self, inputs: Sequence[tf.Tensor]) -> Held:
        """Run R: return the residuals."""
        if not self._residuals:
            return {}
        program = self._program("R", lambda: self._cut.section(self._residuals))
        return _held(self._residuals, program(inputs, {}))

    def gradients(
        self,
        arguments: Sequence[tf.Tensor],
        residuals: Held,
        accumulators: Sequence[tf.Tensor] = (),
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Run BK: return the gradients of weights and of imports.

        Args:
            arguments: inputs of the cell, and what comes from upstream.
            residuals: see `keep`.
            accumulators: for each weight, what its gradient is added to; empty: nothing.
        """
        raw = (*self._trace.weights, *self._trace.imports)
        program = self._program("BK", lambda: self._backward, raw, accumulators)
        results = program(arguments, residuals, accumulators)
        count = len(self._trace.weights)
        return results[:count], results[count:]

    def import_gradients(
        self, arguments: Sequence[tf.Tensor], residuals: Held | None
    ) -> tuple[list[tf.Tensor], Held]:
        """Run I or IK: return the gradients of the imports, and what W reads.

        Args:
            arguments: inputs of the cell, and what comes from upstream.
            residuals: see `keep`; None: they are computed.
        """
        held = residuals or {}
        left = [tensor for tensor in self._left if tensor.name not in held]
        program = self._program(
            "I" if residuals is None else "IK",
            lambda: self._cut.section(
                (*_parts(self._trace.imports), *left), () if residuals is None else self._forward
            ),
            self._trace.imports,
        )
        results = program(arguments, held)
        count = len(self._trace.imports)
        waiting = _held(left, results[count:])
        return results[:count], {t.name: waiting.get(t.name, held.get(t.name)) for t in self._left}

    def weight_gradients(
        self,
        arguments: Sequence[tf.Tensor],
        left: Held,
        accumulators: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Run W: return the gradients of weights; see `gradients` and `import_gradients`."""
        program = self._program("W", lambda: self._of_weights, self._trace.weights, accumulators)
        return program(arguments, left, accumulators)

    def _computed(self, section: sections.Section) -> tuple[tf.Tensor, ...]:
        """Return what a section reads, arguments excepted."""
        return tuple(tensor for tensor in section.reads if tensor.name not in self._places)

    def _program(
        self,
        name: str,
        make_section: Callable[[], sections.Section],
        raw: Sequence[RawGradient] = (),
        accumulators: Sequence[tf.Tensor] = (),
    ) -> _Program:
        """Return a program; trace it where it is new.

        Args:
            name: its name.
            make_section: returns what it computes: the tensors of `raw`, then others.
            raw: gradients that it returns, those with accumulators first.
            accumulators: see `gradients`.
        """
        key = name, bool(accumulators)
        known = self._programs.get(key)
        if known is not None:
            return known
        section = make_section()
        arguments = [tensor for tensor in section.reads if tensor.name in self._places]
        held = self._computed(section)
        read = [*arguments, *held]

        def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            values = {tensor.name: value for tensor, value in zip(read, flat, strict=False)}
            found = iter(self._cut.compute(section, values))
            gradients = [_joined(gradient, found) for gradient in raw]
            totals = flat[len(read) :]
            return [
                *map(added, totals, gradients),
                *map(tf.convert_to_tensor, gradients[len(totals) :]),
                *found,
            ]

        function = tracing.trace(
            f"{_NAMES[name]}_{self._name}",
            compute,
            [*read, *accumulators],
            cell=self._cell,
            jit=self._jit,
        )
        program = _Program(
            function,
            tuple(self._places[tensor.name] for tensor in arguments),
            tuple(tensor.name for tensor in held),
        )
        self._programs[key] = program
        self.graphs[name] = function.graph
        return program


def added(total: tf.Tensor, gradient: RawGradient) -> tf.Tensor:
    """Add a gradient to its accumulator, in the accumulator's dtype; sparse rows are scattered."""
    if isinstance(gradient, tf.IndexedSlices):
        values = precision.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], values)
    return total + precision.cast(gradient, total.dtype)


def _held(tensors: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Held:
    return {tensor.name: value for tensor, value in zip(tensors, values, strict=True)}


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
