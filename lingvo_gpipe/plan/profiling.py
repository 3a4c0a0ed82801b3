"""Times of layers, measured on this machine.

Every layer is run as a cell of its own, by the same programs as in training, on values with the
micro-batch's shapes: skip connections and ties need no special case. Equal layers are measured
once.

In a step all devices compute at the same time, and on CPUs they share cores and threads: a backward
that runs alone also uses the threads of other devices. So a program runs on as many devices at once
as in a step, or as there are cores; on each of them several times in one graph, because a call of a
TensorFlow function from Python takes longer than many layers. The graph has no loop: one would pass
every weight on in each round, which doubled the times of layers with many small weights.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import nests, network, seeds
from lingvo_gpipe.execution import cell_calls, cell_programs, outer_function, placement
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, replicas, wiring
from lingvo_gpipe.schedule import recompute

Clock: TypeAlias = Callable[[], float]
_Call: TypeAlias = Callable[[Nest, list[tf.Tensor]], tuple[Nest, list[tf.Tensor]]]
_LEAST_S = 0.03  # of a measurement, so that the clock and the call of a function do not count
_FEWEST_CALLS, _MOST_CALLS = 5, 64


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one micro-batch in one layer (or FLOPs, where nothing was measured).

    Attributes:
        forward_s: its forward.
        kept_backward_s: its backward from a kept forward.
        backward_s: its backward that recomputes the forward.
        measured_fused_s: forward and backward as one program; None: not measured.
    """

    forward_s: float
    kept_backward_s: float
    backward_s: float
    measured_fused_s: float | None = None

    @property
    def fused_s(self) -> float:
        """Seconds of forward and backward as one program."""
        fused_s = self.measured_fused_s
        return self.forward_s + self.kept_backward_s if fused_s is None else fused_s

    @property
    def recomputed_s(self) -> float:
        """Seconds of forward, recomputation and backward."""
        return self.forward_s + self.backward_s

    @property
    def again_s(self) -> float:
        """Seconds of the recomputation in a backward."""
        return max(0.0, self.backward_s - self.kept_backward_s)

    @property
    def work(self) -> recompute.Work:
        """The same as a partition takes it."""
        return recompute.Work(self.forward_s, self.kept_backward_s, self.again_s)


def balance_by_time(
    params: network.PipelineParams,
    fields: Mapping[str, Nest | SpecNest],
    *,
    runs: int = 5,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> tuple[float, ...]:
    """Measure each layer's cost on this machine, for `PipeliningLayer.Params.costs`.

    The cost of a layer is the mean over all cells in which it may lie. Cells differ in how often
    they recompute a forward if they have different policies, or if the last one is fused;
    `--mode=plan --profile` uses the cost in each cell.

    Args:
        params: of the network; schedule and recompute policies decide how often a layer's forward
            is computed.
        fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.
        runs: runs of each program, of which the median counts; each has some calls.
        warm_up: runs of one call, before them.
        clock: returns seconds.

    Returns:
        Seconds per layer of forward, recomputation and backward of one micro-batch.
    """
    times = layer_times(params, fields, runs=runs, warm_up=warm_up, clock=clock)
    specs = {name: tf.nest.map_structure(_spec, value) for name, value in fields.items()}
    reuses = [cell.reuse for cell in network.analyze(params, specs).cells]
    rows = recompute.costs(reuses, [one.work for one in times])
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


def layer_times(
    params: network.PipelineParams,
    fields: Mapping[str, Nest | SpecNest],
    *,
    runs: int = 5,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> tuple[LayerTime, ...]:
    """Measure forward and backward of every layer at the micro-batch's shape.

    Args:
        params: params of the network.
        fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.
        runs: as in `balance_by_time`.
        warm_up: as in `balance_by_time`.
        clock: as in `balance_by_time`.
    """
    specs = {name: tf.nest.map_structure(_spec, value) for name, value in fields.items()}
    devices = _devices(params)
    # By micro-batches of the size that they have in training.
    analysis = _layer_by_layer(*replicas.first_share(params, specs))
    cells = _cells(analysis)
    layers = [info.params.instantiate() for info in analysis.layers]
    watch = _Stopwatch(clock, runs, warm_up, devices)
    known: list[tuple[_Work, LayerTime]] = []
    times = []
    for cell in cells:
        work = _work(analysis, cell)
        time_s = next((time_s for other, time_s in known if other == work), None)
        if time_s is None:
            time_s = _Runner(analysis, layers, cell).time(watch)
            known.append((work, time_s))
        times.append(time_s)
    return tuple(times)


def _spec(leaf: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
    return leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec(leaf.shape, leaf.dtype)


def _layer_by_layer(
    params: network.PipelineParams, fields: Mapping[str, SpecNest]
) -> network.Analysis:
    """Analyse the network with a cell for each layer, all on one device."""
    sizes = micro_batches.sizes_of(params, fields)
    uncut = network.uncut(params)
    count = len(network.layer_params(uncut))
    order = [f"{k}F0" for k in range(count)] + [f"{k}B0" for k in reversed(range(count))]
    uncut.set(schedule=",".join(order), cuts=(1,) * count)
    return network.analyze(uncut, micro_batches.resized(params, fields, max(sizes)))


def _cells(analysis: network.Analysis) -> tuple[network.Cell, ...]:
    """Return the cells in the pass that trains the network.

    A network without a loss is trained under the caller's tape: its outputs leave it, and their
    gradients come back. Otherwise nothing would read them, and TensorFlow would compute nothing of
    its last layer.
    """
    if any(cell.losses for cell in analysis.cells):
        return analysis.cells
    leaving = frozenset(analysis.wiring.outputs.values())
    mode = dataclasses.replace(analysis.cells[0].mode, leaving=leaving)
    routes = wiring.route(analysis.wiring, analysis.cuts, leaving)
    return tuple(
        cell.in_pass(mode, route.exports, cell.reuse)
        for cell, route in zip(analysis.cells, routes, strict=True)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """What two layers must share to take equal time.

    Attributes:
        params: params of the layer, without names.
        inputs: specs of its inputs.
        has_gradient: of each value that it reads or writes.
        num_trained: how many of its weights are trained.
    """

    params: base.Layer.Params
    inputs: list[SpecNest]
    has_gradient: list[bool]
    num_trained: int


def _work(analysis: network.Analysis, cell: network.Cell) -> _Work:
    (number,) = cell.layers
    return _Work(
        params=analysis.layers[number].params.copy().set(name="", reads=(), writes=(), tie={}),
        inputs=[analysis.specs[v] for v in analysis.wiring.reads[number]],
        has_gradient=[v in cell.mode.differentiable for v in (*cell.imports, *cell.exports)],
        num_trained=len(analysis.trainable(number)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Stopwatch:
    """Measures how long a program takes while all devices run it.

    Attributes:
        clock: see `balance_by_time`.
        runs: see `balance_by_time`.
        warm_up: see `balance_by_time`.
        devices: names of the devices that run it at the same time.
    """

    clock: Clock
    runs: int
    warm_up: int
    devices: Sequence[str]

    def median_s(self, call: _Call, arguments: Nest, carried: Sequence[tf.Tensor] = ()) -> float:
        """Return the median seconds of one call.

        Args:
            call: (arguments, carried) → (results, carried of the next call).
            arguments: tensors that are the same for each call.
            carried: those of the first call.
        """

        def calls(count: int) -> outer_function.OuterFunction:
            def on_all(arguments: Nest, carried: list[tf.Tensor]) -> list[tf.Tensor]:
                return [_calls(name, count, call, arguments, carried) for name in self.devices]

            return outer_function.OuterFunction(on_all)

        def seconds(function: outer_function.OuterFunction) -> float:
            _wait()
            start_s = self.clock()
            function(arguments, list(carried))
            _wait()
            return self.clock() - start_s

        def median(function: outer_function.OuterFunction) -> float:
            return statistics.median(seconds(function) for _ in range(self.runs))

        one, count = calls(1), 1
        for _ in range(self.warm_up):
            alone_s = max(seconds(one), _LEAST_S / _MOST_CALLS)
            least = math.ceil(_LEAST_S / alone_s)
            count = 1 if least == 1 else max(_FEWEST_CALLS, least)
        if count == 1:
            return median(one)
        several = calls(count)
        several(arguments, list(carried))
        # What comes before and after the calls is as long with one of them as with several.
        return max(0.0, median(several) - median(one)) / (count - 1)


def _calls(
    device: str, count: int, call: _Call, arguments: Nest, carried: list[tf.Tensor]
) -> tf.Tensor:
    """Call something `count` times on a device, each time after the last; return a scalar."""
    ended: list[tf.Operation] = []
    with tf.device(device):
        for _ in range(count):
            with tf.control_dependencies(ended):
                results, carried = call(arguments, carried)
            ended = [tensor.op for tensor in tf.nest.flatten((results, carried))]
        with tf.control_dependencies(ended):
            return tf.constant(count)


def _devices(params: network.PipelineParams) -> list[str]:
    """Return the devices that compute at the same time in a step, of those that are here."""
    accelerators = tf.config.list_logical_devices("GPU")
    if accelerators and params.placement in ("auto", "gpu"):
        return [accelerators[0].name]
    count = min(params.num_partitions * params.num_replicas, placement.num_cores())
    return [device.name for device in tf.config.list_logical_devices("CPU")[: max(1, count)]]


class _Runner:
    """A layer as a cell of its own, and the values that its programs are called with."""

    def __init__(
        self, analysis: network.Analysis, layers: Sequence[base.Layer], cell: network.Cell
    ) -> None:
        self.cell = cell
        (number,) = cell.layers
        jit = analysis.params.jit_compile
        self.programs = cell_programs.CellPrograms(number, analysis, layers, jit)
        self.inputs = _values(analysis, self.cell)
        master = analysis.layers[number].params.policy.variable
        specs = (analysis.variables[path] for path in self.cell.weights)
        self.upstream = cell_calls.BackwardInputs(
            exports={
                v: [tf.ones(spec.shape, spec.dtype) for spec in nests.floating(analysis.specs[v])]
                for v in self.cell.exports_with_gradient
            },
            loss_factors=[tf.ones([], master) for _ in self.cell.losses],
            accumulators=[tf.zeros(spec.shape, spec.dtype) for spec in specs],
        )

    def time(self, watch: _Stopwatch) -> LayerTime:
        """Measure the layer."""
        programs, cell, inputs, upstream = self.programs, self.cell, self.inputs, self.upstream

        def forward(inputs: Nest, carried: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor]]:
            return programs.forward(cell, inputs).as_nest(), carried

        def backward(arguments: Nest, sums: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor]]:
            inputs, upstream, *held = arguments
            upstream = upstream._replace(accumulators=sums)
            gradients = programs.backward(cell, inputs, upstream, held=held[0] if held else None)
            return gradients.imports, list(gradients.weights)

        def fused(arguments: Nest, sums: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor]]:
            inputs, upstream = arguments
            outputs, gradients = programs.fused(cell, inputs, upstream._replace(accumulators=sums))
            return (outputs.as_nest(), gradients.imports), list(gradients.weights)

        forward_s = watch.median_s(forward, inputs)
        if not cell.has_backward:
            return LayerTime(forward_s, 0.0, 0.0)
        rest, sums = upstream._replace(accumulators=()), upstream.accumulators
        held = programs.keep(cell, inputs)[1]
        return LayerTime(
            forward_s=forward_s,
            kept_backward_s=watch.median_s(backward, (inputs, rest, held), sums),
            backward_s=watch.median_s(backward, (inputs, rest), sums),
            measured_fused_s=watch.median_s(fused, (inputs, rest), sums),
        )


def _values(analysis: network.Analysis, cell: network.Cell) -> cell_calls.CellInputs:
    """Return values that a cell's programs can be called with: initial weights, random imports."""

    def variable(path: str) -> tf.Tensor:
        spec = analysis.variables[path]
        value = spec.initializer(spec.shape, spec.dtype, seeds.variable_seed(0, path))
        return cell_calls.in_read_dtype(spec, value)

    return cell_calls.CellInputs(
        weights=[variable(path) for path in cell.weights],
        untrained=[variable(path) for path in cell.untrained],
        imports={v: tf.nest.map_structure(_value, analysis.specs[v]) for v in cell.imports},
        seed=seeds.base_seed(0),
        step=tf.zeros([], tf.int64),
    )


def _value(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a value that any layer accepts: noise, ids of 0, masks of True."""
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    if spec.dtype == tf.string:
        return tf.fill(spec.shape, "")
    return tf.cast(tf.fill(spec.shape, spec.dtype == tf.bool), spec.dtype)


def _wait() -> None:
    """Wait until every device is idle."""
    tf.test.experimental.sync_devices()
