"""Runs the programs of a cell on this machine, and measures them.

A program runs on values with the micro-batch's shapes, so that skip connections and ties need no
special case. In a step all devices compute at the same time, and on CPUs they share cores and
threads. So a program runs on as many devices at once as in a step, or as there are cores; on each
of them several times in one graph, because a call of a TensorFlow function from Python takes longer
than many layers. The graph has no loop: one would pass every weight on in each round, which doubled
the times of layers with many small weights. Several cells of a device drive each other's weights
out of its caches, and live micro-batches each other's activations, so calls take copies of both in
turn.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import nests, network, precision, seeds
from lingvo_gpipe.execution import outer_function, placement
from lingvo_gpipe.execution.cell_programs import BackwardInputs, CellInputs, CellPrograms
from lingvo_gpipe.execution.cut_backward import Held
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest

Clock: TypeAlias = Callable[[], float]
_Call: TypeAlias = Callable[[Nest, Nest], tuple[Nest, Nest]]
_LEAST_S = 0.03  # of a measurement, so that the clock does not count
_LONG_S = 0.2  # of a call; to pass a thousand tensors takes some 20 ms, a small part of it
_FEWEST_CALLS, _MOST_CALLS = 3, 64  # that are shorter


@dataclasses.dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures how long a program takes while all devices run it.

    Attributes:
        devices: names of the devices that run it at the same time.
        num_cells: copies of a cell's tensors that calls on a device take in turn.
        num_live: copies of a micro-batch's tensors that calls on a device take in turn.
        runs: runs of each program, of which the median counts; each has some calls.
        warm_up: runs of one call, before them.
        clock: returns seconds.
    """

    devices: Sequence[str]
    num_cells: int = 1
    num_live: int = 1
    runs: int = 9
    warm_up: int = 2
    clock: Clock = time.perf_counter

    def median_s(self, call: _Call, arguments: Nest, own: Nest = ()) -> float:
        """Return the median time of one call in seconds.

        Where other load on the machine hides the time, it is an upper bound of it.

        Args:
            call: (arguments, own) → (results, own of the next call with this copy).
            arguments: tensors of a micro-batch.
            own: tensors of the cell.
        """
        copies = [
            [_copies(name, arguments, self.num_live), _copies(name, own, self.num_cells)]
            for name in self.devices
        ]

        def calls(count: int) -> outer_function.OuterFunction:
            def on_all(given: list[list[list[Nest]]]) -> list[tf.Tensor]:
                pairs = zip(self.devices, given, strict=True)
                return [_calls(name, count, call, *both) for name, both in pairs]

            return outer_function.OuterFunction(on_all)

        def seconds(function: outer_function.OuterFunction, count: int) -> float:
            given = [[list(each)[:count] for each in both] for both in copies]
            for each in itertools.chain.from_iterable(copies):
                each.rotate(-count)
            tf.test.experimental.sync_devices()
            start_s = self.clock()
            function(given)
            tf.test.experimental.sync_devices()
            return self.clock() - start_s

        def median(function: outer_function.OuterFunction, count: int) -> float:
            return statistics.median(seconds(function, count) for _ in range(self.runs))

        one, alone_s = calls(1), 0.0
        for _ in range(self.warm_up):
            alone_s = seconds(one, 1)
        if alone_s >= _LONG_S or not self.warm_up:
            return median(one, 1)
        count = min(max(_FEWEST_CALLS, math.ceil(_LEAST_S / max(alone_s, 1e-6))), _MOST_CALLS)
        several = calls(count)
        seconds(several, count)
        several_s, one_s = median(several, count), median(one, 1)
        if several_s <= one_s:  # a disturbed machine hides a program this short
            return several_s / count
        # What comes before and after the calls is as long with one of them as with several.
        return (several_s - one_s) / (count - 1)


def _copies(device: str, values: Nest, count: int) -> collections.deque[Nest]:
    """Return copies on a device, each with memory of its own; the values if one is enough."""
    if count == 1:
        return collections.deque([values])
    with tf.device(device):
        return collections.deque(tf.nest.map_structure(_copy, values) for _ in range(count))


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    """Return a copy with memory of its own; of ids, masks and what loops keep, the tensor itself.

    On GPUs, TensorFlow copies no tensors of bool so.
    """
    return tf.raw_ops.DeepCopy(x=tensor) if tensor.dtype.is_floating else tensor


def _calls(
    device: str, count: int, call: _Call, arguments: Sequence[Nest], own: Sequence[Nest]
) -> tf.Tensor:
    """Call something `count` times on a device, each time after the last; return a scalar.

    Args:
        device: name of the device.
        count: number of calls.
        call: see `Stopwatch.median_s`.
        arguments: those that the calls take in turn.
        own: those that the calls take in turn.
    """
    ended: list[tf.Operation] = []
    owned = list(own)
    with tf.device(device):
        for number in range(count):
            place = number % len(owned)
            with tf.control_dependencies(ended):
                results, owned[place] = call(arguments[number % len(arguments)], owned[place])
            ended = [tensor.op for tensor in tf.nest.flatten((results, owned[place]))]
        with tf.control_dependencies(ended):
            return tf.constant(count)


def devices_at_once(params: network.PipelineParams) -> list[str]:
    """Return the devices that compute at the same time in a step, of those that are here."""
    accelerators = tf.config.list_logical_devices("GPU")
    if accelerators and params.placement in ("auto", "gpu"):
        return [accelerators[0].name]
    count = min(params.num_partitions * params.num_replicas, placement.num_cores())
    return [device.name for device in tf.config.list_logical_devices("CPU")[: max(1, count)]]


class CellRunner:
    """A cell, and values that its programs are called with: initial weights, random imports."""

    def __init__(
        self, analysis: network.Analysis, layers: Sequence[base.Layer], cell: network.Cell
    ) -> None:
        """Make the values; nothing is traced yet.

        Args:
            analysis: analysis of the network.
            layers: all layers of the network, instantiated.
            cell: one of its cells.
        """
        self._cell = cell
        self._programs = CellPrograms(cell.index, analysis, layers, cell.compiled)
        self._inputs, self._upstream = values(analysis, cell)

    def seconds(self, name: str, watch: Stopwatch) -> float:
        """Return the seconds of a program.

        Args:
            name: see `network.Cell.program`.
            watch: measures it.
        """
        held = held_for(self._programs, self._cell, name, self._inputs, self._upstream)

        def call(arguments: Nest, own: Nest) -> tuple[Nest, Nest]:
            inputs, upstream, held = arguments
            weights, untrained, sums = own
            results = self._programs.run(
                self._cell,
                name,
                inputs._replace(weights=weights, untrained=untrained),
                upstream._replace(accumulators=sums),
                held,
            )
            return results.as_nest(), (weights, untrained, results.weights or sums)

        inputs, upstream = self._inputs, self._upstream
        arguments = (
            inputs._replace(weights=[], untrained=[]),
            upstream._replace(accumulators=[]),
            held,
        )
        own = (inputs.weights, inputs.untrained, upstream.accumulators)
        return watch.median_s(call, arguments, own)


def held_for(
    programs: CellPrograms,
    cell: network.Cell,
    name: str,
    inputs: CellInputs,
    upstream: BackwardInputs,
) -> Held:
    """Return what the programs before this one leave for it.

    Args:
        programs: programs of the cell.
        cell: the cell.
        name: see `network.Cell.program`.
        inputs: arguments of every program.
        upstream: those that only backward programs read.
    """
    before = {"BK": "K", "IK": "K", "W": "I"}.get(name)
    return programs.run(cell, before, inputs, upstream).held if before else {}


def values(analysis: network.Analysis, cell: network.Cell) -> tuple[CellInputs, BackwardInputs]:
    """Return values that a cell's programs can be called with: initial weights, random imports."""

    def variable(path: str) -> tf.Tensor:
        spec = analysis.variables[path]
        value = spec.initializer(spec.shape, spec.dtype, seeds.variable_seed(0, path))
        return precision.cast(value, spec.read_dtype)

    inputs = CellInputs(
        weights=[variable(path) for path in cell.weights],
        untrained=[variable(path) for path in cell.untrained],
        imports={v: tf.nest.map_structure(_value, analysis.specs[v]) for v in cell.imports},
        seed=seeds.base_seed(0),
        step=tf.zeros([], tf.int64),
    )
    weights = (analysis.variables[path] for path in cell.weights)
    upstream = BackwardInputs(
        exports={
            v: [tf.ones(spec.shape, spec.dtype) for spec in nests.differentiable(analysis.specs[v])]
            for v in cell.exports_with_gradient
        },
        loss_factors=[tf.ones([], analysis.params.policy.variable) for _ in cell.losses],
        accumulators=[tf.zeros(spec.shape, spec.dtype) for spec in weights],
    )
    return inputs, upstream


def _value(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a value that any layer accepts: noise, ids of 0, masks of True."""
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(spec.shape, seed=(0, 0)), spec.dtype)
    if spec.dtype == tf.string:
        return tf.fill(spec.shape, "")
    return tf.cast(tf.fill(spec.shape, spec.dtype == tf.bool), spec.dtype)
