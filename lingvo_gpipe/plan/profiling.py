"""Costs measured on this machine, in place of formulas: a layer's time, a cell's activations.

Every layer is run as a cell of its own, by the very programs that training runs, on values of the
micro-batch's shapes: so a skip or a tie is no special case. Equal layers are run once.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import nests, network, precision, seeds
from lingvo_gpipe.execution import cell_calls, cell_programs
from lingvo_gpipe.graphs import traced_memory
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import memory_timeline
from lingvo_gpipe.schedule import recompute

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one micro-batch in one layer (or FLOPs, where nothing was measured).

    Attributes:
        forward_s: its forward.
        kept_backward_s: its backward from a forward that was kept.
        backward_s: its backward that recomputes the forward.
    """

    forward_s: float
    kept_backward_s: float
    backward_s: float

    @property
    def inner_s(self) -> float:
        """Seconds of a step with recomputation."""
        return self.forward_s + self.backward_s

    @property
    def again_s(self) -> float:
        """Seconds of the forward that a backward computes again."""
        return max(0.0, self.backward_s - self.kept_backward_s)

    @property
    def work(self) -> recompute.Work:
        """What costs are made of."""
        return recompute.Work(self.forward_s, self.kept_backward_s, self.again_s)


def balance_by_time(
    params: Any,
    fields: Mapping[str, Any],
    *,
    runs: int = 5,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> tuple[float, ...]:
    """Measure each layer's cost on this machine, for `PipeliningLayer.Params.costs`.

    One number for a layer, in whichever cell it may lie: what it would cost in the mean of all
    cells. Where they differ in how often they compute a forward again, by a policy for each or a
    last cell that is fused, `plan --profile` cuts by what it costs in each.

    Args:
        params: a `network.PipelineParams`; table and recompute policies decide what counts.
        fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.
        runs: runs of each program, of which the median counts.
        warm_up: runs before them.
        clock: tells seconds.

    Returns:
        Seconds per layer of forward, recomputation and backward of one micro-batch.
    """
    times = layer_times(params, fields, runs=runs, warm_up=warm_up, clock=clock)
    specs = {name: tf.nest.map_structure(_spec, value) for name, value in fields.items()}
    reuses = [cell.reuse for cell in network.analyze(params, specs).cells]
    rows = recompute.costs(reuses, [one.work for one in times])
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


def layer_times(
    params: Any,
    fields: Mapping[str, Any],
    *,
    runs: int = 5,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> tuple[LayerTime, ...]:
    """Measure forward and backward of every layer at the micro-batch's shape.

    Args:
        params: a `network.PipelineParams`.
        fields: the mini-batch's fields, name → nest of tensors or `tf.TensorSpec`.
        runs: as in `balance_by_time`.
        warm_up: as in `balance_by_time`.
        clock: as in `balance_by_time`.
    """
    specs = {name: tf.nest.map_structure(_spec, value) for name, value in fields.items()}
    analysis = _layer_by_layer(params, specs)
    timed: list[tuple[Any, LayerTime]] = []
    times = []
    for number in range(len(analysis.layers)):
        form = _form(analysis, number)
        found = next((t for known, t in timed if known == form), None)
        if found is None:
            runner = _Runner(analysis, number, params.jit_compile)
            found = runner.time(_Stopwatch(clock, runs, warm_up))
            timed.append((form, found))
        times.append(found)
    return tuple(times)


def _spec(leaf: Any) -> tf.TensorSpec:
    return leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec(leaf.shape, leaf.dtype)


def _layer_by_layer(params: Any, fields: dict[str, Any]) -> network.Analysis:
    """Analyse the network with a cell for each layer, all on one device."""
    sizes = micro_batches.sizes_of(params, fields)
    whole = memory_timeline.uncut(params)
    count = len(network.layer_params(whole))
    order = [f"{k}F0" for k in range(count)] + [f"{k}B0" for k in reversed(range(count))]
    whole.set(schedule=",".join(order), cuts=(1,) * count)
    return network.analyze(whole, memory_timeline.resized(params, fields, max(sizes)))


def _form(analysis: network.Analysis, number: int) -> Any:
    """Return what two layers must share to take equal time."""
    info = analysis.layers[number]
    unnamed = info.params.copy().set(name="", reads=(), writes=(), tie={})
    cell = analysis.cells[number]
    graded = [v in cell.mode.differentiable for v in (*cell.imports, *cell.exports)]
    reads = [analysis.specs[v] for v in analysis.wiring.reads[number]]
    return unnamed, reads, graded, len(analysis.trainable(number))


@dataclasses.dataclass(frozen=True, slots=True)
class _Stopwatch:
    clock: Clock
    runs: int
    warm_up: int

    def median_s(
        self, call: Callable[[Any], Any], before: Callable[[], Any] = lambda: None
    ) -> float:
        """Return the median seconds of `call`, which takes what `before`, untimed, returned."""
        found = []
        for _ in range(self.warm_up + self.runs):
            given = before()
            _wait()
            start_s = self.clock()
            call(given)
            _wait()
            found.append(self.clock() - start_s)
        return statistics.median(found[self.warm_up :])


class _Runner:
    """A layer as a cell of its own, with values to run it on."""

    def __init__(self, analysis: network.Analysis, number: int, jit: bool) -> None:
        layers: list[Any] = [None] * len(analysis.layers)
        layers[number] = analysis.layers[number].params.instantiate()
        self.cell = analysis.cells[number]
        self.programs = cell_programs.CellPrograms(number, analysis, layers, jit)
        self.given = _values(analysis, self.cell)
        master = precision.policy(analysis.layers[number].params.dtype).variable
        specs = (analysis.variables[path] for path in self.cell.weights)
        self.back = cell_calls.BackwardInputs(
            exports={
                v: [tf.ones(spec.shape, spec.dtype) for spec in nests.floating(analysis.specs[v])]
                for v in self.cell.exports_with_gradient
            },
            loss_scales=[tf.ones([], master) for _ in self.cell.losses],
            accumulators=[tf.zeros(spec.shape, spec.dtype) for spec in specs],
        )

    def time(self, watch: _Stopwatch) -> LayerTime:
        forward_s = watch.median_s(lambda _: self.programs.forward(self.cell, self.given))
        if not self.cell.has_backward:
            return LayerTime(forward_s, 0.0, 0.0)
        return LayerTime(
            forward_s,
            watch.median_s(self._from_kept, self._keep),
            watch.median_s(lambda _: self._backward()),
        )

    def _backward(self) -> cell_calls.CellGradients:
        return self.programs.backward(self.cell, self.given, self.back)

    def _keep(self) -> cell_programs.KeptForward:
        return self.programs.keep(self.cell, self.given)

    def _from_kept(self, kept: cell_programs.KeptForward) -> cell_calls.CellGradients:
        return kept.gradients(self.back)


def _values(analysis: network.Analysis, cell: network.Cell) -> cell_calls.CellInputs:
    """Return what a cell's programs are called with: fresh weights, and values of its imports."""

    def variable(path: str) -> tf.Tensor:
        spec = analysis.variables[path]
        value = spec.initializer(spec.shape, spec.dtype, seeds.variable_seed(0, path))
        return cell_calls.in_read_dtype(spec, value)

    return cell_calls.CellInputs(
        weights=[variable(path) for path in cell.weights],
        state=[variable(path) for path in cell.state],
        imports={v: tf.nest.map_structure(_value, analysis.specs[v]) for v in cell.imports},
        seed=seeds.base_seed(0),
        step=tf.zeros([], tf.int64),
    )


def _value(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a value that every layer takes: noise, ids of 0, masks of True."""
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    if spec.dtype == tf.string:
        return tf.fill(spec.shape, "")
    return tf.cast(tf.fill(spec.shape, spec.dtype == tf.bool), spec.dtype)


def _wait() -> None:
    """Wait until every device has done what was asked of it."""
    tf.test.experimental.sync_devices()


def cell_bytes(
    net: memory_timeline.Network, threads: int | None = None
) -> list[memory_timeline.CellBytes]:
    """Trace every cell's programs and tell what they hold, for the largest micro-batch.

    Nothing is run, and no variable is created. A cell with loops or conditions, whose bodies are
    not looked into, holds at least what the layers' formulas tell, and is marked as an estimate.

    Args:
        net: the network.
        threads: how many operations of a cell run at a time; None: as many as TensorFlow has for
            operations in this process, which a device may use alone while others wait.
    """
    if threads is None:
        # 0 is TensorFlow's own choice: the number of cores.
        threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    layers = [info.params.instantiate() for info in net.analysis.layers]
    return [_traced(net, k, layers, threads) for k in range(len(net.cells))]


def _traced(
    net: memory_timeline.Network, k: int, layers: Sequence[Any], threads: int
) -> memory_timeline.CellBytes:
    cell = net.analysis.cells[k]
    traced = cell_programs.CellPrograms(k, net.analysis, layers, jit=False)
    back, last = cell.has_backward, k == len(net.cells) - 1

    def programs(given: cell_calls.CellInputs, behind: cell_calls.BackwardInputs) -> Any:
        """Call every program, so that it is traced."""
        called: list[Any] = [traced.forward(cell, given).exports]
        if back:
            called.append(traced.backward(cell, given, behind).weights)
        if back and last:
            called.append(traced.fused(cell, given, behind)[1].weights)
        return called

    def kept(given: cell_calls.CellInputs, behind: cell_calls.BackwardInputs) -> Any:
        """Keep a forward and go back through it."""
        found = traced.keep(cell, given).gradients(behind._replace(accumulators=()))
        return found.weights, found.imports

    specs = _program_specs(net, cell)
    tf.function(programs, autograph=False).get_concrete_function(*specs)
    graphs = dict(traced.graphs)
    is_told = all(map(traced_memory.is_complete, graphs.values()))
    forward = traced_memory.peak_bytes(graphs["F"], threads)
    if not back:
        found = memory_timeline.CellBytes(forward, 0, 0, 0, 0, 0, is_estimate=False)
        return (
            found if is_told else memory_timeline.at_least(found, memory_timeline.estimate(net, k))
        )
    backward = traced_memory.peak_bytes(graphs["B"], threads)
    fused = traced_memory.peak_bytes(graphs["FB"], threads) if last else backward
    # Only now: the gradient adds outputs to the forward's graph.
    outer = tf.function(kept, autograph=False).get_concrete_function(*specs).graph
    pair = traced_memory.split_call(outer)
    found = memory_timeline.CellBytes(
        forward=forward,
        backward=backward,
        fused=fused,
        kept_forward=traced_memory.peak_bytes(pair.forward, threads),
        residual=traced_memory.kept_bytes(pair.forward, pair.kept),
        kept_backward=traced_memory.peak_bytes(pair.backward, threads),
        is_estimate=False,
    )
    return found if is_told else memory_timeline.at_least(found, memory_timeline.estimate(net, k))


def _program_specs(
    net: memory_timeline.Network, cell: network.Cell
) -> tuple[cell_calls.CellInputs, cell_calls.BackwardInputs]:
    """Return the specs of what all of a cell's programs share, then of what its backward takes."""
    analysis = net.analysis

    def read(path: str) -> tf.TensorSpec:
        return tf.TensorSpec(analysis.variables[path].shape, analysis.variables[path].read_dtype)

    given = cell_calls.CellInputs(
        weights=[read(path) for path in cell.weights],
        state=[read(path) for path in cell.state],
        imports={v: analysis.specs[v] for v in cell.imports},
        seed=tf.TensorSpec([2], tf.int32),
        step=tf.TensorSpec([], tf.int64),
    )
    master = precision.policy(net.params.dtype).variable
    back = cell_calls.BackwardInputs(
        exports={v: nests.floating(analysis.specs[v]) for v in cell.exports_with_gradient},
        loss_scales=[tf.TensorSpec([], master) for _ in cell.losses],
        accumulators=[
            tf.TensorSpec(analysis.variables[path].shape, analysis.variables[path].dtype)
            for path in cell.weights
        ],
    )
    return given, back
