"""A cell's programs: pure, never-inlined TensorFlow functions of one cell and one phase.

Three rules, each measured:

*   A program is never inlined. If it were, common-subexpression elimination would merge the
    recomputation with the first forward, and no memory would be saved.
*   A program is pure. One stateful operation inside would serialise the devices.
*   Every tensor that a program reads is one of its arguments, and every result is an output. A
    backward program receives the cell's imports and recomputes the forward under a tape; it
    cannot reach any tensor of the first forward. Programs that continue what another one began
    receive what that one returned; they are cut from one trace (`cut_backward`).

A program's arguments are one flat list of tensors: weights, untrained variables, imports, then what
its phase needs. It is traced once per (phase, mode, with or without accumulators, import shapes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.execution import cut_backward, tracing
from lingvo_gpipe.execution.cell_calls import (
    BackwardInputs,
    CellGradients,
    CellInputs,
    CellOutputs,
    in_read_dtype,
)
from lingvo_gpipe.execution.cut_backward import CutBackward, Held, RawGradients
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, floating
from lingvo_gpipe.network.analysis import not_a_tensor
from lingvo_gpipe.schedule.slot import Phase


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Which program of a cell: everything its trace depends on except the imports' shapes."""

    phase: str
    mode: network.Mode
    accumulates: bool = False


_Shapes: TypeAlias = "tuple[tuple[tuple[int | None, ...], tf.DType], ...]"
_FlatGradients: TypeAlias = (
    "tuple[list[tf.Tensor], list[tf.Tensor]]"  # of weights, of imports' floating leaves
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A traced function, and the structure of its flat outputs."""

    function: tracing.Traced
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
        self._master = analysis.params.policy.variable
        self._programs: dict[tuple[_Kind, _Shapes], _Program] = {}
        self._cuts: dict[tuple[network.Mode, _Shapes], tuple[CutBackward, Nest]] = {}

    @property
    def num_traces(self) -> int:
        """How many programs were traced so far."""
        return len(self._programs) + sum(cut.num_traces for cut, _ in self._cuts.values())

    @property
    def graphs(self) -> dict[str, tf.Graph]:
        """Name → graph of the program of this name that was traced last; see `cut_backward`.

        There is one for each mode and each shape of the imports, and with accumulators another.
        F is forward, B a backward that computes the forward again, FB both of them fused.
        """
        graphs = {kind.phase: one.function.graph for (kind, _), one in self._programs.items()}
        for cut, _ in self._cuts.values():
            graphs |= cut.graphs
        return graphs

    def forward(self, cell: network.Cell, inputs: CellInputs) -> CellOutputs:
        """Call the forward program on one micro-batch."""

        def compute(*flat: tf.Tensor) -> Nest:
            return self._exported(cell, tf.nest.pack_sequence_as(inputs, list(flat))).as_nest()

        program = self._program(_Kind("F", cell.mode), "forward", compute, inputs, inputs.imports)
        return CellOutputs.of_nest(program(inputs))

    def backward(
        self,
        cell: network.Cell,
        inputs: CellInputs,
        upstream: BackwardInputs,
        phase: Phase = "B",
        held: Held | None = None,
    ) -> CellGradients:
        """Call a backward program.

        Args:
            cell: the cell in this pass.
            inputs: inputs of the micro-batch.
            upstream: gradients from the cells after this one, and the scales of the losses.
            phase: B for all gradients, I for those of the imports, W for those of the weights.
            held: what the forward kept, or its recomputation returned; for a W after an I, what
                that left. None: the forward is computed again.
        """
        if not (cell.weights if phase == "I" else cell.imports_with_gradient):
            phase = "B"  # the other half computes nothing
        if held is not None or phase == "I":
            return self._continued(cell, inputs, upstream, phase, held)
        # The program is the recomputation: tf.recompute_grad would copy every weight and make
        # gathered rows' gradients dense (docs/decisions/0001-recompute-grad-copies.md).
        arguments = (inputs, upstream)

        def compute(*flat: tf.Tensor) -> Nest:
            traced, traced_upstream = tf.nest.pack_sequence_as(arguments, list(flat))
            return self._differentiated(cell, traced, traced_upstream)[1]

        kind = _Kind("B", cell.mode, accumulates=bool(upstream.accumulators))
        program = self._program(kind, "backward", compute, arguments, inputs.imports)
        return self._gradients(cell, *program(arguments))

    def fused(
        self, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs
    ) -> tuple[CellOutputs, CellGradients]:
        """Call forward and backward as one program that recomputes nothing (last cell only)."""
        arguments = (inputs, upstream)

        def compute(*flat: tf.Tensor) -> Nest:
            traced, traced_upstream = tf.nest.pack_sequence_as(arguments, list(flat))
            outputs, gradients = self._differentiated(cell, traced, traced_upstream)
            return outputs.as_nest(), gradients

        kind = _Kind("FB", cell.mode, accumulates=bool(upstream.accumulators))
        outputs, gradients = self._program(kind, "fused", compute, arguments, inputs.imports)(
            arguments
        )
        return CellOutputs.of_nest(outputs), self._gradients(cell, *gradients)

    def keep(self, cell: network.Cell, inputs: CellInputs) -> tuple[CellOutputs, Held]:
        """Call the forward program that also returns what the backward reads of the forward."""
        cut, outputs = self._cut(cell, inputs)
        flat, held = cut.keep(tf.nest.flatten(inputs))
        return CellOutputs.of_nest(tf.nest.pack_sequence_as(outputs, flat)), held

    def recompute(self, cell: network.Cell, inputs: CellInputs) -> Held:
        """Call the program that computes what the backward reads of the forward."""
        return self._cut(cell, inputs)[0].recompute(tf.nest.flatten(inputs))

    def _continued(
        self,
        cell: network.Cell,
        inputs: CellInputs,
        upstream: BackwardInputs,
        phase: Phase,
        held: Held | None,
    ) -> CellGradients:
        """Call a program that is cut from forward and gradients; see `backward`."""
        cut, _ = self._cut(cell, inputs)
        scales = [precision.cast(scale, self._master) for scale in upstream.loss_factors]
        arguments = tf.nest.flatten((inputs, upstream.exports, scales))
        if phase == "I":
            imports, left = cut.import_gradients(arguments, held)
            return self._gradients(cell, [], imports, left)
        if phase == "W":
            weights = cut.weight_gradients(arguments, held or {}, upstream.accumulators)
            return CellGradients({}, weights)
        return self._gradients(cell, *cut.gradients(arguments, held or {}, upstream.accumulators))

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
        theta, state = nested_variables(info, tensors)
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
        with tf.name_scope(info.name), self._analysis.noted(number, cell):
            outputs = layer.run(theta, reads[0] if len(reads) == 1 else tuple(reads), ctx)
        _check_collected(info, collected, cell.mode.training)
        writes = self._analysis.wiring.writes[number]
        written = outputs if len(writes) > 1 else (outputs,)
        self._analysis.check_returned(number, values, written)
        return dict(zip(writes, written, strict=True)), collected

    def _exported(self, cell: network.Cell, inputs: CellInputs) -> CellOutputs:
        values, collected = self.compute(cell, inputs)
        exports = {v: self._export(v, values[v]) for v in cell.exports}
        return CellOutputs(exports, collected)

    def _exported_again(
        self, cell: network.Cell, inputs: CellInputs, runs: list[Nest]
    ) -> CellOutputs:
        """Compute the forward so that `tf.recompute_grad` computes it again for its gradient.

        Args:
            cell: the cell in this pass.
            inputs: inputs of the micro-batch.
            runs: receives the outputs of the first run, and those of the second once there is one.
        """

        def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
            packed = tf.nest.pack_sequence_as(inputs, list(flat))
            runs.append(self._exported(cell, packed).as_nest())
            return [tf.identity(tensor) for tensor in tf.nest.flatten(runs[-1])]

        flat = base.recompute_grad(forward)(*tf.nest.flatten(inputs))
        return CellOutputs.of_nest(tf.nest.pack_sequence_as(runs[0], list(flat)))

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
        self, cell: network.Cell, inputs: CellInputs, upstream: BackwardInputs
    ) -> tuple[CellOutputs, _FlatGradients]:
        """Compute the forward and all gradients."""
        found = self._raw_gradients(cell, inputs, lambda _: upstream)
        totals = upstream.accumulators
        added = list(map(cut_backward.added, totals, found.weights))
        return found.outputs, (
            added + list(map(tf.convert_to_tensor, found.weights[len(totals) :])),
            list(map(tf.convert_to_tensor, found.imports)),
        )

    def _raw_gradients(
        self,
        cell: network.Cell,
        inputs: CellInputs,
        upstream_of: Callable[[CellOutputs], BackwardInputs],
    ) -> RawGradients:
        """Compute the forward and all gradients.

        Args:
            cell: the cell in this pass.
            inputs: inputs of the micro-batch.
            upstream_of: returns what comes from upstream, for these outputs.
        """
        sources = gradient_sources(cell, inputs)
        runs: list[Nest] = []
        with tf.GradientTape() as tape:
            tape.watch(sources)
            if cell.recompute_policy == "recompute_grad":
                outputs = self._exported_again(cell, inputs, runs)
            else:
                outputs = self._exported(cell, inputs)
            upstream = upstream_of(outputs)
            targets = [t for v in cell.exports_with_gradient for t in floating(outputs.exports[v])]
            scaled = [
                tf.cast(outputs.collected.losses[loss.name], scale.dtype) * scale
                for loss, scale in zip(cell.losses, upstream.loss_factors, strict=True)
            ]
            targets += [tf.add_n(scaled)] if scaled else []
        starts = [t for v in cell.exports_with_gradient for t in upstream.exports[v]]
        starts += [tf.ones([], targets[-1].dtype)] if scaled else []
        raw = tape.gradient(targets, sources, starts, unconnected_gradients="zero")
        count = len(cell.weights)
        return RawGradients(outputs, raw[:count], raw[count:], tf.nest.flatten(runs[1:]))

    def _cut(self, cell: network.Cell, inputs: CellInputs) -> tuple[CutBackward, Nest]:
        """Return the cut programs for these shapes, and the structure of the forward's outputs."""
        key = cell.mode, _shapes(inputs.imports)
        known = self._cuts.get(key)
        if known is not None:
            return known
        traced: list[Nest] = []

        def upstream_of(outputs: CellOutputs) -> BackwardInputs:
            exports = {
                v: [_placeholder(t.shape, t.dtype) for t in floating(outputs.exports[v])]
                for v in cell.exports_with_gradient
            }
            return BackwardInputs(exports, [_placeholder([], self._master) for _ in cell.losses])

        def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            upstream: list[BackwardInputs] = []

            def remembered(outputs: CellOutputs) -> BackwardInputs:
                upstream[:] = [upstream_of(outputs)]
                return upstream[0]

            packed = tf.nest.pack_sequence_as(inputs, list(flat))
            found = self._raw_gradients(cell, packed, remembered)
            nest = found.outputs.as_nest()
            traced[:] = [
                cut_backward.Trace(
                    inputs=flat,
                    upstream=tf.nest.flatten(upstream[0]),
                    outputs=tf.nest.flatten(nest),
                    weights=found.weights,
                    imports=found.imports,
                    again=found.again,
                ),
                tf.nest.map_structure(lambda _: 0, nest),
            ]
            return []

        tracing.trace(
            f"cut_{self._first_layer}",
            compute,
            tf.nest.flatten(inputs),
            cell=self._index,
            jit=self._jit,  # loops are differentiated in another way for XLA
        )
        trace, outputs = traced
        cut = CutBackward(trace, self._first_layer, self._index, self._jit)
        self._cuts[key] = cut, outputs
        return cut, outputs

    def _gradients(
        self,
        cell: network.Cell,
        weights: Sequence[tf.Tensor],
        leaves: Sequence[tf.Tensor],
        left: Held | None = None,
    ) -> CellGradients:
        """Assign flat gradients to weights and imports."""
        imports: dict[int, list[tf.Tensor]] = {}
        for v in cell.imports_with_gradient:
            count = len(floating(self._analysis.specs[v]))
            imports[v], leaves = list(leaves[:count]), leaves[count:]
        return CellGradients(imports, list(weights), left or {})

    def _program(
        self,
        kind: _Kind,
        name: str,
        compute: Callable[..., Nest],
        arguments: Nest,
        imports: dict[int, Nest],
    ) -> _Program:
        """Return the traced program for these shapes; trace it where it is new."""
        shapes = _shapes(imports)
        known = self._programs.get((kind, shapes))
        if known is not None:
            return known
        packed: list[Nest] = []

        def flat_compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            packed[:] = [compute(*flat)]
            return list(tf.nest.flatten(packed[0]))

        concrete = tracing.trace(
            f"{name}_{self._first_layer}",
            flat_compute,
            tf.nest.flatten(arguments),
            cell=self._index,
            jit=self._jit,
        )
        program = _Program(concrete, tf.nest.map_structure(lambda _: 0, packed[0]))
        self._programs[kind, shapes] = program
        return program


def gradient_sources(cell: network.Cell, inputs: CellInputs) -> list[tf.Tensor]:
    """Return the inputs that get a gradient: weights, then imports' floating leaves."""
    leaves = [t for v in cell.imports_with_gradient for t in floating(inputs.imports[v])]
    return [*inputs.weights, *leaves]


def _placeholder(shape: tf.TensorShape | list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape)


def _shapes(imports: Mapping[int, Nest]) -> _Shapes:
    return tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(imports))


def nested_variables(
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
