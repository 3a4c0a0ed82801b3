"""A cell's programs: pure, never-inlined TensorFlow functions of one cell and one phase.

Laws, each measured: a program is never inlined (inlined, common-subexpression elimination merges
the recomputation with the first forward, and nothing is saved); it is pure (one stateful operation
inside would serialise the devices); everything that matters enters through positional tensors and
leaves as outputs. So a backward program is its own recomputation: called with a cell's imports
alone, it computes the forward again under a tape, and nothing of the first forward can reach it.

A program's arguments are one flat list of tensors: weights, state, imports, then what its phase
needs. It is traced once per (phase, import shapes) and called once per slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe import errors, network, precision
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.network import wiring


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """What a pass over the network is for; programs are traced for it.

    Attributes:
        training: dropout drops, batch norm uses its micro-batch.
        differentiable: versions of the stream that gradients flow into.
        graded: versions whose gradient comes from outside their cell.
        leaving: versions that leave the network.
    """

    training: bool
    differentiable: frozenset[int]
    graded: frozenset[int]
    leaving: frozenset[int]


class Given(NamedTuple):
    """What every program of a cell is called with, whatever its phase; a nest for `tf.nest`.

    Attributes:
        weights: the cell's `weights` in the compute dtype.
        state: the cell's `state`.
        imports: version → nest, for every version in `route.imports`.
        seed: int32 [2], of the micro-batch.
        step: int64 scalar.
    """

    weights: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    imports: dict[int, Any]
    seed: tf.Tensor
    step: tf.Tensor


class Back(NamedTuple):
    """What a backward is called with besides; a nest for `tf.nest`.

    Attributes:
        exports: graded version → gradients of its floating leaves.
        scales: per loss of the cell, the derivative of the update's loss by its sum.
        totals: per weight, what its gradient is added to; empty: nothing.
    """

    exports: dict[int, list[tf.Tensor]]
    scales: Sequence[tf.Tensor]
    totals: Sequence[tf.Tensor] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """What a forward call gave.

    Attributes:
        exports: version → nest of tensors.
        collected: losses, sums and moments of the micro-batch.
    """

    exports: dict[int, Any]
    collected: Collected


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """What a backward call gave.

    Attributes:
        imports: version → gradients of its floating leaves.
        weights: per trained weight of the cell: its accumulator with this micro-batch added, or
            the gradient itself where no accumulators were given.
    """

    imports: dict[int, list[tf.Tensor]]
    weights: list[tf.Tensor]


@dataclasses.dataclass(slots=True)
class _Program:
    """A traced function and the structure of its flat outputs."""

    call: Any
    outputs: Any

    def __call__(self, arguments: Any) -> Any:
        """Call it on a nest; return a nest."""
        found = self.call(*tf.nest.flatten(arguments))
        return tf.nest.pack_sequence_as(self.outputs, list(found))


def _as_forward(nest: Any) -> Forward:
    exports, given = nest
    collected = Collected()
    collected.update(given)
    return Forward(exports, collected)


class Cell:
    """Consecutive layers that live on one device.

    Attributes:
        index: k.
        weights: network paths of its trained weights, tied ones of other cells included.
        state: network paths of its frozen weights and statistics.
        losses: its losses.
        traces: how many programs were traced so far.
    """

    def __init__(
        self, index: int, analysis: network.Analysis, layers: Sequence[base.Layer], jit: bool
    ) -> None:
        """Make the cell; nothing is traced yet.

        Args:
            index: k.
            analysis: of the network.
            layers: all layers of the network, made.
            jit: compiles the programs with XLA.
        """
        self.index = index
        self.route: wiring.Route = analysis.routes[index]
        self._analysis = analysis
        self._layers = layers
        self._jit = jit
        numbers = self.route.layers
        paths = dict.fromkeys(p for n in numbers for p in analysis.layers[n].paths.values())
        self.weights = [path for path in paths if analysis.variables[path].is_trained]
        self.state = [path for path in paths if not analysis.variables[path].is_trained]
        self.losses = tuple(loss for n in numbers for loss in analysis.layers[n].meta.losses)
        self._programs: dict[Any, _Program] = {}

    @property
    def traces(self) -> int:
        """How many programs were traced so far."""
        return len(self._programs)

    @property
    def graphs(self) -> dict[str, Any]:
        """The graph of each traced program by its phase; FB is forward and backward fused."""
        return {key[0]: program.call.graph for (key, _), program in self._programs.items()}

    def graded_exports(self, mode: Mode) -> list[int]:
        """Return the exports whose gradient the cell's backward is given."""
        return [v for v in self.route.exports if v in mode.graded and v in mode.differentiable]

    def wanted_imports(self, mode: Mode) -> list[int]:
        """Return the imports whose gradient the cell's backward gives."""
        return [v for v in self.route.imports if v in mode.differentiable]

    def losses_in(self, mode: Mode) -> tuple[base.LossSpec, ...]:
        """Return the losses that the cell gives; an auxiliary head's in training alone."""
        return tuple(loss for loss in self.losses if mode.training or not loss.training_only)

    def has_backward(self, mode: Mode) -> bool:
        """Whether anything flows back through the cell; else its backward slots are empty."""
        sources = self.weights or self.wanted_imports(mode)
        return bool(sources) and bool(self.losses or self.graded_exports(mode))

    def forward(self, mode: Mode, given: Given) -> Forward:
        """Call the forward program on one micro-batch.

        Args:
            mode: what the pass is for.
            given: the micro-batch.
        """

        def compute(*flat: tf.Tensor) -> Any:
            forward = self._run(mode, tf.nest.pack_sequence_as(given, list(flat)))
            return forward.exports, forward.collected.as_nest()

        program = self._program(("F", mode), "forward", compute, given, given.imports)
        return _as_forward(program(given))

    def backward(self, mode: Mode, given: Given, back: Back, phase: str = "B") -> Gradients:
        """Call the backward program, which recomputes the forward inside.

        Args:
            mode: what the pass is for.
            given: the micro-batch.
            back: what comes from behind.
            phase: B for all gradients, I for those of the imports alone, W of the weights alone.
        """
        # The program is the recomputation: tf.recompute_grad would copy every weight and make
        # gathered rows' gradients dense (docs/decisions/0001).
        everything = (given, back._replace(totals=()) if phase == "I" else back)

        def compute(*flat: tf.Tensor) -> Any:
            own, behind = tf.nest.pack_sequence_as(everything, list(flat))
            return self._differentiated(mode, own, behind, phase)[1]

        key = (phase, mode, bool(everything[1].totals))
        program = self._program(key, "backward", compute, everything, given.imports)
        return self.as_gradients(mode, program(everything), phase)

    def keep(self, mode: Mode, given: Given) -> Kept:
        """Call the forward program under a tape of its own, which keeps what is computed inside."""
        wanted = self.wanted_imports(mode)
        # Fresh tensors: one call's tape may not see another's use of the same weight.
        own = given._replace(
            weights=[tf.identity(weight) for weight in given.weights],
            imports={
                v: tf.nest.map_structure(tf.identity, value) if v in wanted else value
                for v, value in given.imports.items()
            },
        )
        sources = self.sources(mode, own)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            forward = self.forward(mode, own)
        return Kept(self, mode, tape, sources, forward)

    def fused(
        self,
        mode: Mode,
        given: Given,
        *,
        scales: Sequence[tf.Tensor],
        accumulators: Sequence[tf.Tensor],
    ) -> tuple[Forward, Gradients]:
        """Call forward and backward as one program that recomputes nothing (last cell alone)."""
        everything = (given, Back({}, scales, accumulators))

        def compute(*flat: tf.Tensor) -> Any:
            own, behind = tf.nest.pack_sequence_as(everything, list(flat))
            forward, graded = self._differentiated(mode, own, behind, "B")
            return (forward.exports, forward.collected.as_nest()), graded

        program = self._program(("FB", mode), "fused", compute, everything, given.imports)
        forward, graded = program(everything)
        return _as_forward(forward), self.as_gradients(mode, graded, "B")

    def run(self, training: bool, given: Given) -> tuple[dict[int, Any], Collected]:
        """Compute the cell here and now, without a program.

        Args:
            training: see `Mode`.
            given: the micro-batch.

        Returns:
            Every version that its layers read or write, and what they gave.
        """
        tensors = dict(zip(self.weights + self.state, [*given.weights, *given.state], strict=True))
        values = dict(given.imports)
        collected = Collected()
        for number in self.route.layers:
            info, layer = self._analysis.layers[number], self._layers[number]
            theta, own_state = nested(info, tensors)
            own = Collected()
            ctx = Context(
                training=training,
                step=given.step,
                root_seed=given.seed,
                state=own_state,
                path=info.name,
                frozen=self._analysis.frozen_layers,
                collected=own,
            )
            reads = [values[v] for v in self._analysis.wiring.reads[number]]
            with tf.name_scope(info.name):
                outputs = layer.run(theta, reads[0] if len(reads) == 1 else tuple(reads), ctx)
            check_given(info, own, training)
            collected.update(own.as_nest())
            writes = self._analysis.wiring.writes[number]
            written = outputs if len(writes) > 1 else (outputs,)
            values.update(zip(writes, written, strict=True))
        return values, collected

    def _run(self, mode: Mode, given: Given) -> Forward:
        values, collected = self.run(mode.training, given)
        read = {
            v
            for n in range(self.route.layers.stop, len(self._layers))
            for v in self._analysis.wiring.reads[n]
        }
        needed = [v for v in self.route.exports if v in mode.leaving or v in read]
        exports = {v: tf.nest.map_structure(tf.identity, values[v]) for v in needed}
        return Forward(exports, collected)

    def sources(self, mode: Mode, given: Given, phase: str = "B") -> list[tf.Tensor]:
        """Return those of a program's tensors that get a gradient: weights, then imports."""
        floats = [t for v in self.wanted_imports(mode) for t in floating(given.imports[v])]
        return (list(given.weights) if phase != "I" else []) + (floats if phase != "W" else [])

    def _targets(
        self, mode: Mode, forward: Forward, scales: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        ends = [t for v in self.graded_exports(mode) for t in floating(forward.exports[v])]
        parts = [
            tf.cast(forward.collected.losses[loss.name], scale.dtype) * scale
            for loss, scale in zip(self.losses_in(mode), scales, strict=True)
        ]
        return ends + ([tf.add_n(parts)] if parts else [])

    def _differentiated(
        self, mode: Mode, given: Given, back: Back, phase: str
    ) -> tuple[Forward, tuple[list[tf.Tensor], list[tf.Tensor]]]:
        """Compute forward and gradients: of weights, added to their totals, and of imports."""
        sources = self.sources(mode, given, phase)
        with tf.GradientTape() as tape:
            tape.watch(sources)
            forward = self._run(mode, given)
            ends = self._targets(mode, forward, back.scales)
        starts = [t for v in self.graded_exports(mode) for t in back.exports[v]]
        starts += [tf.ones([], ends[-1].dtype)] if back.scales else []
        found = tape.gradient(ends, sources, starts, unconnected_gradients="zero")
        count = len(self.weights) if phase != "I" else 0
        weights = (
            [added(total, g) for total, g in zip(back.totals, found[:count], strict=True)]
            if back.totals
            else [dense(g) for g in found[:count]]
        )
        return forward, (weights, [dense(g) for g in found[count:]])

    def as_gradients(self, mode: Mode, packed: Any, phase: str = "B") -> Gradients:
        """Sort out the gradients (of the weights, of the imports' floating leaves) of a phase."""
        weights, flat = packed
        imports: dict[int, list[tf.Tensor]] = {}
        for v in self.wanted_imports(mode) if phase != "W" else []:
            count = len(floating(self._analysis.specs[v]))
            imports[v], flat = list(flat[:count]), flat[count:]
        return Gradients(imports, list(weights))

    def _program(
        self,
        key: Any,
        name: str,
        compute: Callable[..., Any],
        arguments: Any,
        imports: dict[int, Any],
    ) -> _Program:
        """Return the traced program of these shapes, tracing it where it is new."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(imports))
        known = self._programs.get((key, shapes))
        if known is not None:
            return known
        packed: list[Any] = []

        def flat_compute(*flat: tf.Tensor) -> list[tf.Tensor]:
            packed[:] = [compute(*flat)]
            return list(tf.nest.flatten(packed[0]))

        flat_compute.__name__ = f"{name}_{self._analysis.layers[self.route.layers.start].name}"
        traced = tf.function(
            flat_compute,
            autograph=False,
            jit_compile=self._jit or None,
            experimental_attributes={"_noinline": True},
        )
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(arguments)]
        concrete = traced.get_concrete_function(*specs)
        check_pure(concrete.graph, self)
        program = _Program(concrete, tf.nest.map_structure(lambda _: 0, packed[0]))
        self._programs[key, shapes] = program
        return program


def check_given(info: network.LayerInfo, given: Collected, training: bool) -> None:
    """Refuse a layer that gives other losses or metrics than it declares.

    Raises:
        LayerError: naming layer and loss; one that is not declared would count nowhere.
    """
    losses = [spec for spec in info.meta.losses if training or not spec.training_only]
    metrics = [spec for spec in info.meta.metrics if not (training and spec.evaluation_only)]
    for kind, call, names, found in (
        ("loss", "add_loss", [spec.name for spec in losses], given.losses),
        ("metric", "add_sum", [spec.name for spec in metrics], given.sums),
    ):
        for name in names:
            if name not in found:
                raise errors.LayerError(
                    f"{info.name}: its Meta declares the {kind} {name!r}, but its fprop gave none. "
                    f"Call ctx.{call}"
                )
        for name in found:
            if name not in names:
                near = errors.nearest(name, names) or names
                raise errors.LayerError(
                    f"{info.name}: its fprop gave the {kind} {name!r}, which its Meta does not "
                    f"declare; nearest {', '.join(near) or 'none'}. Declare it, or it would count "
                    "nowhere"
                )


def check_pure(graph: Any, cell: Cell) -> None:
    """Refuse a traced program that has a stateful operation or captures a variable.

    Raises:
        LayerError: naming the operation and the layers among which it stands.
    """
    bad = [
        op
        for op in graph.get_operations()
        if op.op_def.is_stateful
        or (op.type == "Placeholder" and op.outputs[0].dtype == tf.resource)
    ]
    if bad:
        worst = next((op for op in bad if op.type != "Placeholder"), bad[0])
        raise errors.LayerError(
            f"cell {cell.index}: {worst.name} ({worst.type}) is stateful, which would serialise "
            "the devices and break recomputation. Use stateless operations seeded by ctx.seed, and "
            "theta and ctx.state in place of variables"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A forward whose inside a tape keeps, for one backward.

    Attributes:
        cell: that was called.
        mode: what the pass is for.
        tape: watched it.
        sources: what its gradients are by.
        forward: what it gave.
    """

    cell: Cell
    mode: Mode
    tape: tf.GradientTape
    sources: list[tf.Tensor]
    forward: Forward

    def gradients(self, back: Back) -> Gradients:
        """Go back through it; see `Cell.backward`."""
        graded = self.cell.graded_exports(self.mode)
        ends = [t for v in graded for t in floating(self.forward.exports[v])]
        starts = [t for v in graded for t in back.exports[v]]
        for loss, scale in zip(self.cell.losses_in(self.mode), back.scales, strict=True):
            ends.append(self.forward.collected.losses[loss.name])
            starts.append(precision.cast(scale, ends[-1].dtype))
        found = self.tape.gradient(ends, self.sources, starts, unconnected_gradients="zero")
        count = len(self.cell.weights)
        weights = (
            [added(total, g) for total, g in zip(back.totals, found[:count], strict=True)]
            if back.totals
            else [dense(g) for g in found[:count]]
        )
        return self.cell.as_gradients(self.mode, (weights, [dense(g) for g in found[count:]]))


def nested(
    info: network.LayerInfo, tensors: dict[str, tf.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's theta and state, nested by child, from tensors by network path."""
    theta: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for spec in info.meta.variables:
        *parents, last = spec.path.split("/")
        node = state if spec.is_state else theta
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = computed(spec, tensors[info.paths[spec.path]])
    return theta, state


def computed(spec: base.VariableSpec, value: tf.Tensor) -> tf.Tensor:
    """Return a variable's value in the dtype in which its layer reads it."""
    return precision.cast(value, spec.read_dtype)


def floating(nest: Any) -> list[Any]:
    """Return the floating leaves of a nest of tensors or specs."""
    return [leaf for leaf in tf.nest.flatten(nest) if leaf.dtype.is_floating]


def dense(gradient: Any) -> tf.Tensor:
    """Return a gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient)


def added(total: tf.Tensor, gradient: Any) -> tf.Tensor:
    """Add a gradient to its accumulator, in the accumulator's dtype; rows are scattered."""
    if isinstance(gradient, tf.IndexedSlices):
        values = precision.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], values)
    return total + precision.cast(gradient, total.dtype)


def mode_for(
    analysis: network.Analysis,
    *,
    training: bool,
    leaving: Collection[int] = (),
    input_gradients: bool = False,
    output_gradients: bool = False,
) -> Mode:
    """Return the Mode of a pass over the network.

    Args:
        analysis: of the network.
        training: see `Mode`.
        leaving: versions that leave the network.
        input_gradients: gradients by the mini-batch's fields are wanted.
        output_gradients: gradients of the outputs come from outside.
    """
    has_weights = [bool(analysis.trainable(n)) for n in range(len(analysis.layers))]
    flowing = wiring.differentiable(analysis.wiring, has_weights, input_gradients)
    graded = set(leaving) if output_gradients else set()
    for route in analysis.routes:
        for v in route.exports:
            if any(c not in route.layers for c in analysis.wiring.versions[v].consumers):
                graded.add(v)
    return Mode(training, flowing, frozenset(graded), frozenset(leaving))
