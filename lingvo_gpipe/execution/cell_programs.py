"""A cell's programs: pure, never-inlined TensorFlow functions of one cell and one phase.

Three rules, each measured:

*   A program is never inlined. If it were, common-subexpression elimination would merge the
    recomputation with the first forward, and no memory would be saved.
*   A program is pure. One stateful operation inside would serialise the devices.
*   Every tensor that a program reads is one of its arguments, and every result is an output. A
    backward program computes the forward again from the cell's imports, or reads what an earlier
    program of the micro-batch returned; it cannot reach any tensor of the first forward.

A cell's forward and gradients are traced once for each mode and shape of the imports, and cut into
programs (`cut_backward` explains their names). `network.Cell.program` decides which of them a slot
runs. A program receives only what it reads, and is made when it is first called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.execution import tracing
from lingvo_gpipe.execution.cut_backward import CutBackward, Held, Trace
from lingvo_gpipe.layers import base, checks
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, differentiable
from lingvo_gpipe.network.analysis import not_a_tensor


class CellInputs(NamedTuple):
    """Arguments of every program of a cell; a nest.

    Attributes:
        weights: the cell's `weights` in the compute dtype.
        untrained: the cell's `untrained`: frozen weights in the compute dtype, and statistics.
        imports: version → nest, for every version in the cell's `imports`.
        seed: int32 [2], seed of the micro-batch.
        step: int64 scalar.
    """

    weights: Sequence[tf.Tensor]
    untrained: Sequence[tf.Tensor]
    imports: dict[int, Nest]
    seed: tf.Tensor
    step: tf.Tensor


class BackwardInputs(NamedTuple):
    """What a backward program reads in addition to `CellInputs`; a nest.

    Attributes:
        exports: version in the cell's `exports_with_gradient` → gradients of its leaves.
        loss_factors: for each loss of the cell, the derivative of the update's loss by its sum.
        accumulators: for each weight, the tensor to which its gradient is added; empty: the
            gradients themselves are returned.
    """

    exports: dict[int, list[tf.Tensor]]
    loss_factors: Sequence[tf.Tensor]
    accumulators: Sequence[tf.Tensor] = ()


NO_UPSTREAM = BackwardInputs({}, ())


@dataclasses.dataclass(frozen=True, slots=True)
class CellResults:
    """What a program returned; empty where it computes no such thing.

    Attributes:
        exports: version → nest of tensors; of a forward.
        collected: losses, sums and moments of the micro-batch; None: not of a forward.
        imports: version → gradients of its differentiable leaves.
        weights: for each trained weight of the cell, its accumulator plus the gradient of this
            micro-batch, or the gradient itself if there were no accumulators.
        held: what the cell's next program of the micro-batch reads, by its name in their trace.
    """

    exports: dict[int, Nest] = dataclasses.field(default_factory=dict)
    collected: Collected | None = None
    imports: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)
    held: Held = dataclasses.field(default_factory=dict)

    def as_nest(self) -> Nest:
        """Return everything as one nest."""
        collected = () if self.collected is None else self.collected.as_nest()
        return self.exports, collected, self.imports, self.weights, self.held


class _Forward(NamedTuple):
    """Results of a forward; a nest.

    Attributes:
        exports: version → nest of tensors.
        collected: `Collected.as_nest` of what the layers collected.
    """

    exports: dict[int, Nest]
    collected: dict[str, dict[str, Nest]]


_Shapes: TypeAlias = "tuple[tuple[tuple[int | None, ...], tf.DType], ...]"


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
        # Programs cut from one trace, and the structure of the forward's results.
        self._cuts: dict[tuple[network.Mode, _Shapes], tuple[CutBackward, Nest]] = {}

    @property
    def num_traces(self) -> int:
        """How many programs were traced so far."""
        return sum(cut.num_traces for cut, _ in self._cuts.values())

    @property
    def graphs(self) -> dict[str, tf.Graph]:
        """Name → graph of the program of this name that was traced last.

        There is one for each mode and each shape of the imports, and with accumulators another.
        """
        graphs: dict[str, tf.Graph] = {}
        for cut, _ in self._cuts.values():
            graphs |= cut.graphs
        return graphs

    def run(
        self,
        cell: network.Cell,
        name: str,
        inputs: CellInputs,
        upstream: BackwardInputs = NO_UPSTREAM,
        held: Held | None = None,
    ) -> CellResults:
        """Call a program on one micro-batch.

        Args:
            cell: the cell in this pass.
            name: see `network.Cell.program`.
            inputs: inputs of the micro-batch.
            upstream: gradients from the cells after this one, scales of the losses, accumulators;
                read by backwards alone.
            held: what this cell's earlier program of the micro-batch returned for it.
        """
        cut, structure = self._cut_programs(cell, inputs)
        scales = [precision.cast(scale, self._master) for scale in upstream.loss_factors]
        arguments = tf.nest.flatten((inputs, upstream.exports, scales))
        results = cut.run(name, arguments, held or {}, upstream.accumulators)
        forward = None
        if name in ("F", "FB", "K"):
            forward = tf.nest.pack_sequence_as(structure, results.outputs)
        return self._results(cell, forward, results.weights, results.imports, results.held)

    def _results(
        self,
        cell: network.Cell,
        forward: _Forward | None,
        weights: list[tf.Tensor],
        leaves: list[tf.Tensor],
        held: Held | None = None,
    ) -> CellResults:
        """Return results by name; `leaves` are the gradients of all imports."""
        imports: dict[int, list[tf.Tensor]] = {}
        for v in cell.imports_with_gradient if leaves else ():
            count = len(differentiable(self._analysis.specs[v]))
            imports[v], leaves = leaves[:count], leaves[count:]
        if forward is None:
            return CellResults(imports=imports, weights=weights, held=held or {})
        collected = Collected(**forward.collected)
        return CellResults(forward.exports, collected, imports, weights, held or {})

    def compute(self, cell: network.Cell, inputs: CellInputs) -> tuple[dict[int, Nest], Collected]:
        """Compute the cell layer by layer: the body of its programs, also called without them.

        Returns:
            Every version that its layers read or write, and what they collected.
        """
        values = dict(inputs.imports)
        collected = Collected()
        for number in cell.layers:
            outputs, layer_collected = self.compute_layer(cell, number, inputs, values)
            values.update(outputs)
            collected.update(layer_collected.as_nest())
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
        wiring, specs = self._analysis.wiring, self._analysis.specs
        reads = [values[v] for v in wiring.reads[number]]
        where = f"in {base.describe(info.params)}, cell {cell.index}"
        with tf.name_scope(info.name), errors.located(where):
            outputs = layer.run(theta, reads[0] if len(reads) == 1 else tuple(reads), ctx)
        _check_collected(info, collected, cell.mode.training)
        writes = wiring.writes[number]
        outputs = outputs if len(writes) > 1 else (outputs,)
        read_specs = [specs[v] for v in wiring.reads[number]]
        checks.returned(
            info.params,
            list(zip(read_specs, reads, strict=True)),
            [specs[v] for v in writes],
            outputs,
        )
        return dict(zip(writes, outputs, strict=True)), collected

    def _exported(self, cell: network.Cell, inputs: CellInputs) -> _Forward:
        values, collected = self.compute(cell, inputs)
        exports = {v: self._export(v, values[v]) for v in cell.exports}
        return _Forward(exports, collected.as_nest())

    def _exported_again(
        self, cell: network.Cell, inputs: CellInputs, runs: list[_Forward]
    ) -> _Forward:
        """Compute the forward so that `tf.recompute_grad` computes it again for its gradient.

        Args:
            cell: the cell in this pass.
            inputs: inputs of the micro-batch.
            runs: receives the results of the first run, and those of the second once there is one.
        """

        def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
            runs.append(self._exported(cell, tf.nest.pack_sequence_as(inputs, list(flat))))
            return [tf.identity(tensor) for tensor in tf.nest.flatten(runs[-1])]

        flat = base.recompute_grad(forward)(*tf.nest.flatten(inputs))
        packed: _Forward = tf.nest.pack_sequence_as(runs[0], list(flat))
        return packed

    def _export(self, version: int, value: Nest) -> Nest:
        """Return a value as the cell sends it.

        Raises:
            LayerError: it has a leaf that is not a tensor; names the layer that writes it.
        """
        for leaf in tf.nest.flatten(value):
            if not tf.is_tensor(leaf):
                source = self._analysis.wiring.versions[version]
                raise not_a_tensor(self._analysis.layers[source.producer].name, source.name, leaf)
        return tf.nest.map_structure(tf.identity, value)

    def _cut_programs(self, cell: network.Cell, inputs: CellInputs) -> tuple[CutBackward, Nest]:
        """Return the programs for these shapes, and the structure of the forward's results."""
        key = cell.mode, _shapes(inputs.imports)
        if key in self._cuts:
            return self._cuts[key]
        traced: list[tuple[Trace, Nest]] = []

        def compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            traced[:] = [self._trace(cell, tf.nest.pack_sequence_as(inputs, list(flat)))]
            return []

        tracing.trace(
            f"cut_{self._first_layer}",
            compute,
            tf.nest.flatten(inputs),
            cell=self._index,
            jit=self._jit,  # loops are differentiated in another way for XLA
        )
        trace, structure = traced[0]
        cut = CutBackward(trace, self._first_layer, self._index, self._jit)
        self._cuts[key] = cut, structure
        return self._cuts[key]

    def _trace(self, cell: network.Cell, inputs: CellInputs) -> tuple[Trace, Nest]:
        """Compute the forward and all gradients; return them, and the structure of the forward.

        A backward that computes the forward again is cut from them, too. `tf.recompute_grad` would
        copy every weight and make gathered rows' gradients dense
        (docs/decisions/0001-recompute-grad-copies.md).
        """
        flat = tf.nest.flatten(inputs)
        if not cell.has_backward:
            forward = self._exported(cell, inputs)
            outputs = tf.nest.flatten(forward)
            return Trace(flat, (), outputs, (), ()), tf.nest.map_structure(lambda _: 0, forward)
        sources = gradient_sources(cell, inputs)
        runs: list[_Forward] = []
        with tf.GradientTape() as tape:
            tape.watch(sources)
            if cell.recompute_policy == "recompute_grad":
                forward = self._exported_again(cell, inputs, runs)
            else:
                forward = self._exported(cell, inputs)
            targets = [
                t for v in cell.exports_with_gradient for t in differentiable(forward.exports[v])
            ]
            starts = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
            scales = [tf.compat.v1.placeholder(self._master, []) for _ in cell.losses]
            upstream = [*starts, *scales]
            scaled = [
                tf.cast(forward.collected["losses"][loss.name], scale.dtype) * scale
                for loss, scale in zip(cell.losses, scales, strict=True)
            ]
            targets += [tf.add_n(scaled)] if scaled else []
        starts += [tf.ones([], targets[-1].dtype)] if scaled else []
        gradients = tape.gradient(targets, sources, starts, unconnected_gradients="zero")
        count = len(cell.weights)
        trace = Trace(
            inputs=flat,
            upstream=upstream,
            outputs=tf.nest.flatten(forward),
            weights=gradients[:count],
            imports=gradients[count:],
            again=tf.nest.flatten(runs[1:]),
        )
        return trace, tf.nest.map_structure(lambda _: 0, forward)


def gradient_sources(cell: network.Cell, inputs: CellInputs) -> list[tf.Tensor]:
    """Return the inputs that get a gradient: weights, then imports' differentiable leaves."""
    leaves = [t for v in cell.imports_with_gradient for t in differentiable(inputs.imports[v])]
    return [*inputs.weights, *leaves]


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
        node[last] = precision.cast(tensors[info.paths[spec.path]], spec.read_dtype)
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
    for kind, call, declared, added in (
        ("loss", "add_loss", [spec.name for spec in losses], collected.losses),
        ("metric", "add_sum", [spec.name for spec in info.meta.metrics], collected.sums),
    ):
        for name in declared:
            if name not in added:
                raise errors.LayerError(
                    f"{info.name}: its Meta declares the {kind} {name!r}, but its fprop did not "
                    f"add it. Call ctx.{call}"
                )
        for name in added:
            if name not in declared:
                raise errors.LayerError(
                    f"{info.name}: its fprop added the {kind} {name!r}, which its Meta does not "
                    f"declare; {errors.suggestion(name, declared)}. Declare it, or it would be "
                    "ignored"
                )
