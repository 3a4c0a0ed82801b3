"""Times of layers, measured on this machine.

Every layer is run as a cell of its own, by the same programs as in training. Equal layers are
measured once.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping

import tensorflow as tf

from lingvo_gpipe import network
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import micro_batches, replicas, wiring
from lingvo_gpipe.plan.measured.cell_runner import CellRunner, Clock, Stopwatch, devices_at_once
from lingvo_gpipe.schedule import recompute


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
    # By micro-batches of the size that they have in training.
    analysis = _layer_by_layer(*replicas.first_share(params, specs))
    cells = _cells(analysis)
    layers = [info.params.instantiate() for info in analysis.layers]
    watch = Stopwatch(devices_at_once(params), runs=runs, warm_up=warm_up, clock=clock)
    known: list[tuple[LayerWork, LayerTime]] = []
    times = []
    for cell in cells:
        work = layer_work(analysis, cell.layers.start)
        time_s = next((time_s for other, time_s in known if other == work), None)
        if time_s is None:
            time_s = _measured(CellRunner(analysis, layers, cell), cell, watch)
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


def _measured(runner: CellRunner, cell: network.Cell, watch: Stopwatch) -> LayerTime:
    forward_s = runner.forward_s(watch)
    if not cell.has_backward:
        return LayerTime(forward_s, 0.0, 0.0)
    return LayerTime(
        forward_s=forward_s,
        kept_backward_s=runner.backward_s(watch, from_kept=True),
        backward_s=runner.backward_s(watch, from_kept=False),
        measured_fused_s=runner.fused_s(watch),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
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


def layer_work(analysis: network.Analysis, number: int) -> LayerWork:
    """Return what decides how long a layer takes.

    Args:
        analysis: analysis of the network.
        number: index of the layer.
    """
    reads, writes = analysis.wiring.reads[number], analysis.wiring.writes[number]
    differentiable = analysis.cells[0].mode.differentiable
    return LayerWork(
        params=analysis.layers[number].params.copy().set(name="", reads=(), writes=(), tie={}),
        inputs=[analysis.specs[v] for v in reads],
        has_gradient=[v in differentiable for v in (*reads, *writes)],
        num_trained=len(analysis.trainable(number)),
    )
