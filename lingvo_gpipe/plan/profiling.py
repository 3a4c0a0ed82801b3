"""Times of layers, of cells and of the update, measured on this machine.

The very programs of training are run. A layer is measured as a cell of its own, to find cuts. The
times of a cell's layers do not add up to its own: its tensors fit into caches less often, and
TensorFlow runs operations of several layers at once. So the cells of a plan are measured, too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import network, optim, packing
from lingvo_gpipe.execution import outer_function
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import batch_fields, memory_formulas, micro_batches, replicas, wiring
from lingvo_gpipe.network.memory_formulas import CellBytes
from lingvo_gpipe.plan import slot_times
from lingvo_gpipe.plan.measuring import CellRunner, Clock, Stopwatch, devices_at_once
from lingvo_gpipe.plan.slot_times import SlotTimes
from lingvo_gpipe.schedule.recompute import Work

_MOST_LIVE = 4  # micro-batches that have copies of their own, since these take memory
_WARM_UP, _UPDATES = 2, 5

ProgramTimes: TypeAlias = list[tuple[object, dict[str, float]]]
"""What makes cells equal, and name → seconds of their programs that were measured so far."""


def layer_times(
    params: network.PipelineParams,
    fields: Mapping[str, Nest | SpecNest],
    *,
    runs: int = 5,
    warm_up: int = 2,
    clock: Clock = time.perf_counter,
) -> tuple[Work, ...]:
    """Measure forward and backward of every layer at the micro-batch's shape; equal layers once.

    Args:
        params: params of the network.
        fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.
        runs: runs of each program, of which the median counts; each has some calls.
        warm_up: runs of one call, before them.
        clock: returns seconds.
    """
    # By micro-batches of the size that they have in training.
    analysis = _layer_by_layer(*replicas.first_share(params, batch_fields.specs(fields)))
    watch = Stopwatch(devices_at_once(params), runs=runs, warm_up=warm_up, clock=clock)
    layers = [info.params.instantiate() for info in analysis.layers]
    known: ProgramTimes = []
    times = []
    for cell in _cells(analysis):
        seconds = _measured(analysis, layers, cell, watch, known)
        forward_s = seconds("F")
        if not cell.has_backward:
            times.append(Work(forward_s, 0.0, 0.0, forward_s))
            continue
        kept_s, recomputing_s = seconds("BK"), seconds("B")
        again_s = max(0.0, recomputing_s - kept_s)
        times.append(Work(forward_s, kept_s, again_s, seconds("FB")))
    return tuple(times)


def _layer_by_layer(
    params: network.PipelineParams, fields: Mapping[str, SpecNest]
) -> network.Analysis:
    """Analyse the network with a cell for each layer, all on one device."""
    sizes = micro_batches.sizes_of(params, fields)
    uncut = network.uncut(params)
    count = len(network.layer_params(uncut))
    order = [f"{k}F0" for k in range(count)] + [f"{k}B0" for k in reversed(range(count))]
    uncut.set(schedule=",".join(order), cuts=(1,) * count)
    return network.analyze(uncut, micro_batches.resized(fields, max(sizes)))


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


def cell_times(
    params: network.PipelineParams,
    analysis: network.Analysis,
    needs: Sequence[CellBytes],
    num_live: int,
    known: ProgramTimes,
) -> list[SlotTimes] | None:
    """Measure the programs of every cell; equal cells once.

    Args:
        params: params of the network, with all replicas.
        analysis: analysis of the network of one replica.
        needs: bytes that the programs of each cell hold.
        num_live: the most micro-batches that a device keeps at once.
        known: programs that were measured before, which are not measured again; those that are
            measured now are added.

    Returns:
        Times of each cell's slots; None where a network has no loss, or where the cells of all
        devices that run at once may need more than half of the host's memory.
    """
    if not any(cell.losses for cell in analysis.cells):
        return None
    on_device = collections.Counter(cell.device_number for cell in analysis.cells)
    watch = Stopwatch(devices_at_once(params), max(on_device.values()), min(num_live, _MOST_LIVE))
    size = max(_bytes(analysis, *pair, watch) for pair in zip(analysis.cells, needs, strict=True))
    if not _fits_host(len(watch.devices) * size):
        return None
    layers = [info.params.instantiate() for info in analysis.layers]
    try:
        return [
            slot_times.of_cell(analysis, cell, _measured(analysis, layers, cell, watch, known))
            for cell in analysis.cells
        ]
    except tf.errors.ResourceExhaustedError:
        return None


def _bytes(
    analysis: network.Analysis, cell: network.Cell, needs: CellBytes, watch: Stopwatch
) -> int:
    """Return the bytes that a cell's programs need on a device, with all copies of values."""
    weights = memory_formulas.variables(analysis, cell.layers)
    of_cell = weights.variables + weights.gradients + weights.copies
    values = (*cell.imports, *cell.exports_with_gradient)
    of_micro_batch = sum(base.spec_bytes(analysis.specs[v]) for v in values)
    of_micro_batch += max(needs.residual, needs.left_residual + needs.left_gradients)
    return (
        watch.num_cells * of_cell + watch.num_live * of_micro_batch + 2 * max(needs.peaks.values())
    )


def _fits_host(num_bytes: int) -> bool:
    """Return whether this many bytes are at most half of the machine's memory, without swap."""
    return 2 * num_bytes <= _memory_bytes()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measured(
    analysis: network.Analysis,
    layers: Sequence[base.Layer],
    cell: network.Cell,
    watch: Stopwatch,
    known: ProgramTimes,
) -> Callable[[str], float]:
    """Return name → seconds of a program of a cell, which is measured when it is asked for."""
    work = (
        [_layer_work(analysis, n) for n in cell.layers],
        [v in cell.mode.differentiable for v in (*cell.imports, *cell.exports)],
        cell.recompute_policy == "recompute_grad",
        cell.compiled,
        watch,
    )
    times = next((times for other, times in known if other == work), None)
    if times is None:
        times = {}
        known.append((work, times))

    @functools.cache
    def runner() -> CellRunner:
        return CellRunner(analysis, layers, cell)

    def seconds(name: str) -> float:
        if name not in times:
            times[name] = runner().seconds(name, watch)
        return times[name]

    return seconds


def _layer_work(analysis: network.Analysis, number: int) -> tuple[object, ...]:
    """Return what two layers must share to take equal time."""
    reads, writes = analysis.wiring.reads[number], analysis.wiring.writes[number]
    differentiable = analysis.cells[0].mode.differentiable
    return (
        analysis.layers[number].params.copy().set(name="", reads=(), writes=(), tie={}),
        [analysis.specs[v] for v in reads],
        [v in differentiable for v in (*reads, *writes)],
        len(analysis.trainable(number)),
    )


def update_s(
    update: optim.Updater.Params,
    params: network.PipelineParams,
    analysis: network.Analysis,
    clock: Clock = time.perf_counter,
) -> float | None:
    """Return the seconds of an update of all weights, the call of a step included.

    All devices update their weights at the same time, after they have added up the norm of the
    gradient. So as many devices as compute at once here update weights together: those that own
    most. A step is one call of a graph, to which all variables are passed, and so is this update.

    Args:
        update: optimizer, clipping, averages and the rest of an update.
        params: params of the network, with all replicas.
        analysis: analysis of the network of one replica.
        clock: returns seconds.

    Returns:
        None where there is nothing to train, or where weights and slots of the devices that update
        at once may need more than half of the host's memory.
    """
    places = _heaviest_owners(analysis, params.num_replicas, devices_at_once(params))
    specs = {path: analysis.variables[path] for path in places}
    # Groups, which need not be among these weights, set rates and cost nothing.
    update = update.copy()
    update.optimizer.groups = ()
    optimizer: optim.Optimizer = update.optimizer.instantiate()
    slots = sum(slot.size_bytes for slot in optimizer.slots(specs.values()).values())
    weights = sum(spec.size_bytes for spec in specs.values())
    averages = weights if update.average is not None else 0
    if not places or not _fits_host(weights + 2 * (weights + slots + averages)):
        return None
    wanted = {
        path: packing.Wanted(
            tuple(spec.shape),
            spec.dtype,
            places[path],
            "weight",
            functools.partial(tf.zeros, spec.shape, spec.dtype),
        )
        for path, spec in specs.items()
    }
    updater = optim.Updater(
        update,
        variables=packing.create(wanted),
        specs=specs,
        device_of=places.__getitem__,
        layer_of=analysis.layer_of,
    )
    gradients = {}
    for path, spec in specs.items():
        with tf.device(places[path]):
            gradients[path] = tf.zeros(spec.shape, spec.dtype)

    def one_update(gradients: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return updater.apply(gradients, step=tf.constant(0))["gradient_norm"]

    function = outer_function.OuterFunction(one_update, assigns=True)
    seconds = []
    for _ in range(_WARM_UP + _UPDATES):
        begun_s = clock()
        function(gradients).numpy()
        seconds.append(clock() - begun_s)
    return statistics.median(seconds[_WARM_UP:])


def _heaviest_owners(
    analysis: network.Analysis, num_replicas: int, devices: Sequence[str]
) -> dict[str, str]:
    """Return path → name of a device here, for weights of the devices that own most."""
    owners = analysis.owners(num_replicas)
    trained = {path for cell in analysis.cells for path in cell.weights}
    of_device: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
    for path in analysis.variables:
        if path in trained:
            device = analysis.cells[analysis.owner_cell(path)].device_number
            of_device[owners[path], device].append(path)

    def size(paths: Sequence[str]) -> int:
        return sum(analysis.variables[path].size_bytes for path in paths)

    heaviest = sorted(of_device.values(), key=size, reverse=True)
    return {path: name for name, paths in zip(devices, heaviest, strict=False) for path in paths}
