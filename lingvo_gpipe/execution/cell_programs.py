"""A cell's programs: pure, never-inlined TensorFlow functions of one cell and one phase.

Three rules, each measured:

*   A program is never inlined. If it were, common-subexpression elimination would merge the
    recomputation with the first forward, and no memory would be saved.
*   A program is pure. One stateful operation inside would serialise the devices.
*   Every tensor that a program reads is one of its arguments, and every result is an output. A
    backward program receives the cell's imports and recomputes the forward under a tape; it
    cannot reach any tensor of the first forward.

A program's arguments are one flat list of tensors: weights, untrained variables, imports, then what
its phase needs. It is traced once per (phase, mode, with or without accumulators, import shapes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.execution.cell_calls import (
    BackwardInputs,
    CellGradients,
    CellInputs,
    CellOutputs,
    in_read_dtype,
)
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, floating
from lingvo_gpipe.network.analysis import not_a_tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Which program of a cell: everything its trace depends on except the imports' shapes."""

    phase: str
    mode: network.Mode
    accumulates: bool = False


_Shapes = tuple[tuple[tuple[int | None, ...], tf.DType], ...]
_FlatGradients = tuple[list[tf.Tensor], list[tf.Tensor]]  # of weights, of imports' floating leaves


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A traced function, and the structure of its flat outputs."""

    function: tf.types.experimental.ConcreteFunction
    outputs: Nest

    def __call__(self, arguments: Nest) -> Nest:
        """Call the program on a nest; return a nest."""
        flat = self.function(*tf.nest.flatten(arguments))
        return tf.nest.pack_sequence_as(self.outputs, list(flat))


class CellPrograms:
    """The programs of one cell, traced at their first call.

    Every method takes the `network.Cell` of the current pass: the exports and gradients of a cell
    differ between training and evaluation.
    """

    def __init__(
        self, index: int, analysis: network.Analysis, layers: Sequence[base.Layer], jit: bool
    ) -> None:
        """Make the cell's programs; nothing is traced yet.

        Args:
            index: number k of the cell.
            analysis: analysis of the network.
            layers: all layers of the network, instantiated.
            jit: whether the programs are compiled with XLA.
        """
        self._first_layer = analysis.layers[analysis.cells[index].layers.start].name
        self._index = index
        self._analysis = analysis
        self._layers = layers
        self._jit = jit
        self._programs: dict[tuple[_Kind, _Shapes], _Program] = {}

    @property
    def num_traces(self) -> int:
        """How many programs were traced so far."""
        return len(self._programs)

    @property
    def graphs(self) -> dict[str, tf.Graph]:
        """The graph of each traced program by phase; FB is forward and backward fused."""
        return {kind.phase: one.function.graph for (kind, _), one in self._programs.items()}

    def forward(self, cell: network.Cell, inputs: CellInputs) -> CellOutputs:
        """Call the forward program on one micro-batch."""

        def compute(*flat: tf.Tensor) -> Nest:
            return self._exported(cell, tf.nest.pack_sequence_as(inputs, list(flat))).as_nest()

        program = self._program(_Kind("F", cell.mode), "forward", compute, inputs, inputs.imports)
        return CellOutputs.of_nest(program(inputs))

    def backward(
        self, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs, phase: str = "B"
    ) -> CellGradients:
        """Call the backward program, which recomputes the forward inside.

        Args:
            cell: the cell in this pass.
            inputs: inputs of the micro-batch.
            upstream: gradients from the cells after this one, and the scales of the losses.
            phase: B for all gradients, I for those of the imports, W for those of the weights.
        """
        # The program is the recomputation: tf.recompute_grad would copy every weight and make
        # gathered rows' gradients dense (docs/decisions/0001-recompute-grad-copies.md).
        arguments = (inputs, upstream._replace(accumulators=()) if phase == "I" else upstream)

        def compute(*flat: tf.Tensor) -> Nest:
            traced, traced_upstream = tf.nest.pack_sequence_as(arguments, list(flat))
            return self._differentiated(cell, traced, traced_upstream, phase)[1]

        kind = _Kind(phase, cell.mode, accumulates=bool(arguments[1].accumulators))
        program = self._program(kind, "backward", compute, arguments, inputs.imports)
        return self._gradients(cell, program(arguments), phase)

    def fused(
        self, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs
    ) -> tuple[CellOutputs, CellGradients]:
        """Call forward and backward as one program that recomputes nothing (last cell only)."""
        arguments = (inputs, upstream)

        def compute(*flat: tf.Tensor) -> Nest:
            traced, traced_upstream = tf.nest.pack_sequence_as(arguments, list(flat))
            outputs, gradients = self._differentiated(cell, traced, traced_upstream, "B")
            return outputs.as_nest(), gradients

        kind = _Kind("FB", cell.mode)
        outputs, gradients = self._program(kind, "fused", compute, arguments, inputs.imports)(
            arguments
        )
        return CellOutputs.of_nest(outputs), self._gradients(cell, gradients)

    def keep(self, cell: network.Cell, inputs: CellInputs) -> KeptForward:
        """Call the forward program under a separate tape, which keeps its intermediate tensors."""
        # Copies, because the tape of one call must not see the use of a weight in another call.
        copies = inputs._replace(
            weights=[tf.identity(weight) for weight in inputs.weights],
            imports={
                v: tf.nest.map_structure(tf.identity, value)
                if v in cell.imports_with_gradient
                else value
                for v, value in inputs.imports.items()
            },
        )
        sources = gradient_sources(cell, copies)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self.forward(cell, copies)
        return KeptForward(self, cell, tape, sources, outputs)

    def gradients_of_kept(self, kept: KeptForward, upstream: BackwardInputs) -> CellGradients:
        """Compute the gradients of a kept forward; see `backward`."""
        cell = kept.cell
        targets = [t for v in cell.exports_with_gradient for t in floating(kept.outputs.exports[v])]
        starts = [t for v in cell.exports_with_gradient for t in upstream.exports[v]]
        for loss, scale in zip(cell.losses, upstream.loss_factors, strict=True):
            targets.append(kept.outputs.collected.losses[loss.name])
            starts.append(precision.cast(scale, targets[-1].dtype))
        raw = kept.tape.gradient(targets, kept.sources, starts, unconnected_gradients="zero")
        return self._gradients(cell, _accumulated(cell, raw, upstream.accumulators, "B"))

    def compute(self, cell: network.Cell, inputs: CellInputs) -> tuple[dict[int, Nest], Collected]:
        """Compute the cell layer by layer: the body of its programs, also called without them.

        Returns:
            Every version that its layers read or write, and what they collected.
        """
        values = dict(inputs.imports)
        collected = Collected()
        for number in cell.layers:
            written, of_layer = self.compute_layer(cell, number, inputs, values)
            values.update(written)
            collected.update(of_layer.as_nest())
        return values, collected

    def compute_layer(
        self, cell: network.Cell, number: int, inputs: CellInputs, values: Mapping[int, Nest]
    ) -> tuple[dict[int, Nest], Collected]:
        """Compute one layer of the cell.

        Args:
            cell: the cell in this pass.
            number: index of the layer.
            inputs: inputs of the micro-batch.
            values: version → nest; those that the layer reads.

        Returns:
            Every version that the layer writes, and what it collected.
        """
        variables = [*inputs.weights, *inputs.untrained]
        tensors = dict(zip(cell.weights + cell.untrained, variables, strict=True))
        info, layer = self._analysis.layers[number], self._layers[number]
        theta, state = _nested(info, tensors)
        collected = Collected()
        ctx = Context(
            training=cell.mode.training,
            step=inputs.step,
            root_seed=inputs.seed,
            state=state,
            path=info.name,
            frozen=self._analysis.frozen_layers,
            collected=collected,
        )
        reads = [values[v] for v in self._analysis.wiring.reads[number]]
        with tf.name_scope(info.name):
            outputs = layer.run(theta, reads[0] if len(reads) == 1 else tuple(reads), ctx)
        _check_collected(info, collected, cell.mode.training)
        writes = self._analysis.wiring.writes[number]
        written = outputs if len(writes) > 1 else (outputs,)
        return dict(zip(writes, written, strict=True)), collected

    def _exported(self, cell: network.Cell, inputs: CellInputs) -> CellOutputs:
        values, collected = self.compute(cell, inputs)
        exports = {v: self._export(v, values[v]) for v in cell.exports}
        return CellOutputs(exports, collected)

    def _export(self, version: int, value: Nest) -> Nest:
        """Return a value as the cell sends it.

        Raises:
            LayerError: it has a leaf that is not a tensor; names the layer that writes it.
        """
        for leaf in tf.nest.flatten(value):
            if not tf.is_tensor(leaf):
                written = self._analysis.wiring.versions[version]
                raise not_a_tensor(self._analysis.layers[written.producer].name, written.name, leaf)
        return tf.nest.map_structure(tf.identity, value)

    def _differentiated(
        self, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs, phase: str
    ) -> tuple[CellOutputs, _FlatGradients]:
        """Compute the forward, and the gradients of a phase."""
        sources = gradient_sources(cell, inputs, phase)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self._exported(cell, inputs)
            targets = [t for v in cell.exports_with_gradient for t in floating(outputs.exports[v])]
            scaled = [
                tf.cast(outputs.collected.losses[loss.name], scale.dtype) * scale
                for loss, scale in zip(cell.losses, upstream.loss_factors, strict=True)
            ]
            targets += [tf.add_n(scaled)] if scaled else []
        starts = [t for v in cell.exports_with_gradient for t in upstream.exports[v]]
        starts += [tf.ones([], targets[-1].dtype)] if scaled else []
        raw = tape.gradient(targets, sources, starts, unconnected_gradients="zero")
        return outputs, _accumulated(cell, raw, upstream.accumulators, phase)

    def _gradients(
        self, cell: network.Cell, flat: _FlatGradients, phase: str = "B"
    ) -> CellGradients:
        """Assign the flat gradients of a phase to weights and imports."""
        weights, leaves = flat
        imports: dict[int, list[tf.Tensor]] = {}
        for v in cell.imports_with_gradient if phase != "W" else ():
            count = len(floating(self._analysis.specs[v]))
            imports[v], leaves = list(leaves[:count]), leaves[count:]
        return CellGradients(imports, list(weights))

    def _program(
        self,
        kind: _Kind,
        name: str,
        compute: Callable[..., Nest],
        arguments: Nest,
        imports: dict[int, Nest],
    ) -> _Program:
        """Return the traced program for these shapes; trace it where it is new."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(imports))
        known = self._programs.get((kind, shapes))
        if known is not None:
            return known
        packed: list[Nest] = []

        def flat_compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            packed[:] = [compute(*flat)]
            return list(tf.nest.flatten(packed[0]))

        flat_compute.__name__ = f"{name}_{self._first_layer}"
        traced = tf.function(
            flat_compute,
            autograph=False,
            jit_compile=self._jit or None,
            experimental_attributes={"_noinline": True},
        )
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(arguments)]
        concrete = traced.get_concrete_function(*specs)
        _check_pure(concrete.graph, self._index)
        program = _Program(concrete, tf.nest.map_structure(lambda _: 0, packed[0]))
        self._programs[kind, shapes] = program
        return program


@dataclasses.dataclass(frozen=True, slots=True)
class KeptForward:
    """A forward call whose intermediate tensors a tape keeps, for one backward.

    Attributes:
        programs: programs of the cell.
        cell: the cell in the pass of the call.
        tape: tape that watched the call.
        sources: tensors that get a gradient.
        outputs: outputs of the call.
    """

    programs: CellPrograms
    cell: network.Cell
    tape: tf.GradientTape
    sources: list[tf.Tensor]
    outputs: CellOutputs

    def gradients(self, upstream: BackwardInputs) -> CellGradients:
        """Compute its gradients; see `CellPrograms.backward`."""
        return self.programs.gradients_of_kept(self, upstream)


def gradient_sources(cell: network.Cell, inputs: CellInputs, phase: str = "B") -> list[tf.Tensor]:
    """Return the inputs that get a gradient in a phase: weights, then imports' floating leaves."""
    leaves = [t for v in cell.imports_with_gradient for t in floating(inputs.imports[v])]
    return (list(inputs.weights) if phase != "I" else []) + (leaves if phase != "W" else [])


def _accumulated(
    cell: network.Cell,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    accumulators: Sequence[tf.Tensor],
    phase: str,
) -> _FlatGradients:
    """Add the gradients of weights to their accumulators, if any; make all others dense.

    Args:
        cell: the cell in this pass.
        gradients: gradients of `gradient_sources`, in the same order.
        accumulators: one per weight; empty: none.
        phase: B, I or W.
    """
    count = len(cell.weights) if phase != "I" else 0
    of_weights, of_imports = gradients[:count], gradients[count:]
    return (
        [_added(total, g) for total, g in zip(accumulators, of_weights, strict=True)]
        if accumulators
        else [tf.convert_to_tensor(g) for g in of_weights],
        [tf.convert_to_tensor(g) for g in of_imports],
    )


def _added(total: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Add a gradient to its accumulator, in the accumulator's dtype; sparse rows are scattered."""
    if isinstance(gradient, tf.IndexedSlices):
        values = precision.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], values)
    return total + precision.cast(gradient, total.dtype)


def _nested(
    info: network.LayerInfo, tensors: dict[str, tf.Tensor]
) -> tuple[dict[str, Nest], dict[str, Nest]]:
    """Return a layer's theta and state, nested by child, from tensors by network path."""
    theta: dict[str, Nest] = {}
    state: dict[str, Nest] = {}
    for spec in info.meta.variables:
        *parents, last = spec.path.split("/")
        node = state if spec.is_state else theta
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = in_read_dtype(spec, tensors[info.paths[spec.path]])
    return theta, state


def _check_collected(info: network.LayerInfo, collected: Collected, training: bool) -> None:
    """Refuse a layer that adds other losses, metrics or moments than its Meta declares.

    Raises:
        LayerError: naming the layer and the loss. An undeclared loss would be ignored.
    """
    with_statistics = {
        f"{info.name}/{spec.path}".rpartition("/")[0]
        for spec in info.meta.variables
        if spec.is_state
    }
    for path in collected.moments:
        if path not in with_statistics:
            raise errors.LayerError(
                f"{path}: its fprop added moments, but its Meta declares no statistic, so they "
                "would change nothing. Declare a VariableSpec with is_state=True, or add a metric "
                "by ctx.add_sum"
            )
    losses = [spec for spec in info.meta.losses if training or not spec.training_only]
    metrics = [spec for spec in info.meta.metrics if not (training and spec.evaluation_only)]
    for kind, call, declared, added in (
        ("loss", "add_loss", [spec.name for spec in losses], collected.losses),
        ("metric", "add_sum", [spec.name for spec in metrics], collected.sums),
    ):
        for name in declared:
            if name not in added:
                raise errors.LayerError(
                    f"{info.name}: its Meta declares the {kind} {name!r}, but its fprop did not "
                    f"add it. Call ctx.{call}"
                )
        for name in added:
            if name not in declared:
                near = errors.nearest(name, declared) or declared
                raise errors.LayerError(
                    f"{info.name}: its fprop added the {kind} {name!r}, which its Meta does not "
                    f"declare; nearest {', '.join(near) or 'none'}. Declare it, or it would be "
                    "ignored"
                )


def _check_pure(graph: tf.Graph, cell: int) -> None:
    """Refuse a traced program that has a stateful operation or captures a variable.

    Raises:
        LayerError: naming the operation; its name begins with that of its layer.
    """
    impure = [
        op
        for op in graph.get_operations()
        if op.op_def.is_stateful
        or (op.type == "Placeholder" and op.outputs[0].dtype == tf.resource)
    ]
    if impure:
        worst = next((op for op in impure if op.type != "Placeholder"), impure[0])
        raise errors.LayerError(
            f"cell {cell}: {worst.name} ({worst.type}) is stateful, which would serialise "
            "the devices and break recomputation. Use stateless operations seeded by ctx.seed, and "
            "theta and ctx.state in place of variables"
        )
