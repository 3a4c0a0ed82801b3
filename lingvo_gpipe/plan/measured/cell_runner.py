"""Runs the programs of a cell on this machine, and measures them.

A program runs on values with the micro-batch's shapes, so that skip connections and ties need no
special case. In a step all devices compute at the same time, and on CPUs they share cores and
threads: a backward that runs alone also uses the threads of other devices. So a program runs on as
many devices at once as in a step, or as there are cores; on each of them several times in one
graph, because a call of a TensorFlow function from Python takes longer than many layers. The graph
has no loop: one would pass every weight on in each round, which doubled the times of layers with
many small weights. Several cells of a device drive each other's weights out of its caches, and live
micro-batches each other's activations, so calls take copies of both in turn.
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

from lingvo_gpipe import nests, network, seeds
from lingvo_gpipe.execution import cell_calls, cell_programs, outer_function, placement
from lingvo_gpipe.execution.cut_backward import Held
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.plan import machine_memory
from lingvo_gpipe.schedule.slot import Phase

Clock: TypeAlias = Callable[[], float]
_Call: TypeAlias = Callable[[Nest, Nest], tuple[Nest, Nest]]
_LEAST_S = 0.03  # of a measurement, so that the clock does not count
_LONG_S = 0.2  # of a call beside which passing a thousand tensors, some 20 ms, does not count
_FEWEST_CALLS, _MOST_CALLS = 5, 64  # that are shorter than _LEAST_S
_FEW_CALLS = 3  # that are not


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
        """Return the median seconds of one call; an upper bound where other load hides them.

        Args:
            call: (arguments, own) → (results, own of the next call with this copy).
            arguments: tensors of a micro-batch.
            own: tensors of the cell.
        """
        copies = _Values(self, arguments, own)

        def calls(count: int) -> outer_function.OuterFunction:
            def on_all(given: list[list[list[Nest]]]) -> list[tf.Tensor]:
                pairs = zip(self.devices, given, strict=True)
                return [_calls(name, count, call, *both) for name, both in pairs]

            return outer_function.OuterFunction(on_all)

        def seconds(function: outer_function.OuterFunction, count: int) -> float:
            given = copies.take(count)
            _wait()
            start_s = self.clock()
            function(given)
            _wait()
            return self.clock() - start_s

        def median(function: outer_function.OuterFunction, count: int) -> float:
            return statistics.median(seconds(function, count) for _ in range(self.runs))

        one, count = calls(1), 1
        for _ in range(self.warm_up):
            alone_s = max(seconds(one, 1), _LEAST_S / _MOST_CALLS)
            if alone_s >= _LONG_S:
                count = 1
            elif alone_s >= _LEAST_S:
                count = _FEW_CALLS
            else:
                count = max(_FEWEST_CALLS, math.ceil(_LEAST_S / alone_s))
        if count == 1:
            return median(one, 1)
        several = calls(count)
        several(copies.take(count))
        several_s, one_s = median(several, count), median(one, 1)
        if several_s <= one_s:  # a disturbed machine hides a program this short
            return several_s / count
        # What comes before and after the calls is as long with one of them as with several.
        return (several_s - one_s) / (count - 1)


class _Values:
    """Copies of a program's values on each device, which its calls take in turn."""

    def __init__(self, watch: Stopwatch, arguments: Nest, own: Nest) -> None:
        """Make the copies; see `Stopwatch`."""
        self._copies = [
            [_copies(name, arguments, watch.num_live), _copies(name, own, watch.num_cells)]
            for name in watch.devices
        ]

    def take(self, count: int) -> list[list[list[Nest]]]:
        """Return for each device the copies that the next `count` calls take, each copy once."""
        taken = [[list(each)[:count] for each in both] for both in self._copies]
        for each in itertools.chain.from_iterable(self._copies):
            each.rotate(-count)
        return taken


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


def fits_host(num_bytes: int) -> bool:
    """Return whether this many bytes are at most half of the memory, without swap, if known."""
    memory = machine_memory.of_this_machine()
    return memory is None or 2 * num_bytes <= memory.total_bytes - memory.swap_bytes


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
        self._programs = cell_programs.CellPrograms(cell.index, analysis, layers, cell.compiled)
        self._inputs = values(analysis, cell)
        # Of each micro-batch, and of the cell.
        self._arguments = self._inputs._replace(weights=[], untrained=[])
        self._weights = (self._inputs.weights, self._inputs.untrained)
        master = analysis.params.policy.variable
        specs = (analysis.variables[path] for path in cell.weights)
        self._sums = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        self._upstream = cell_calls.BackwardInputs(
            exports={
                v: [tf.ones(spec.shape, spec.dtype) for spec in nests.floating(analysis.specs[v])]
                for v in cell.exports_with_gradient
            },
            loss_factors=[tf.ones([], master) for _ in cell.losses],
        )

    def forward_s(self, watch: Stopwatch) -> float:
        """Return the seconds of the forward."""

        def forward(inputs: Nest, own: Nest) -> tuple[Nest, Nest]:
            return self._programs.forward(self._cell, _with_weights(inputs, own)).as_nest(), own

        return watch.median_s(forward, self._arguments, self._weights)

    def kept_forward_s(self, watch: Stopwatch) -> float:
        """Return the seconds of the forward that keeps what its backward reads."""

        def keep(inputs: Nest, own: Nest) -> tuple[Nest, Nest]:
            outputs, held = self._programs.keep(self._cell, _with_weights(inputs, own))
            return (outputs.as_nest(), held), own

        return watch.median_s(keep, self._arguments, self._weights)

    def recomputation_s(self, watch: Stopwatch) -> float:
        """Return the seconds of the recomputation alone."""

        def recompute(inputs: Nest, own: Nest) -> tuple[Nest, Nest]:
            return self._programs.recompute(self._cell, _with_weights(inputs, own)), own

        return watch.median_s(recompute, self._arguments, self._weights)

    def backward_s(self, watch: Stopwatch, phase: Phase = "B", *, from_kept: bool) -> float:
        """Return the seconds of a backward.

        Args:
            watch: measures it.
            phase: B; I, or W after an I.
            from_kept: whether the forward was kept, or is computed again.
        """
        held = self._programs.keep(self._cell, self._inputs)[1] if from_kept else None
        if phase == "W" and self._cell.computes("I"):
            held = self._backward(self._inputs, self._upstream, "I", held).left or held

        def backward(arguments: Nest, own: Nest) -> tuple[Nest, Nest]:
            inputs, upstream, *held = arguments
            weights, sums = own
            gradients = self._backward(
                _with_weights(inputs, weights),
                upstream._replace(accumulators=sums),
                phase,
                held[0] if held else None,
            )
            new = (weights, list(gradients.weights) or sums)
            return (gradients.imports, gradients.left), new

        arguments = (self._arguments, self._upstream, *([] if held is None else [held]))
        return watch.median_s(backward, arguments, (self._weights, self._sums))

    def fused_s(self, watch: Stopwatch) -> float:
        """Return the seconds of forward and backward as one program."""

        def fused(arguments: Nest, own: Nest) -> tuple[Nest, Nest]:
            inputs, upstream = arguments
            weights, sums = own
            outputs, gradients = self._programs.fused(
                self._cell, _with_weights(inputs, weights), upstream._replace(accumulators=sums)
            )
            return (outputs.as_nest(), gradients.imports), (weights, list(gradients.weights))

        own = (self._weights, self._sums)
        return watch.median_s(fused, (self._arguments, self._upstream), own)

    def _backward(
        self,
        inputs: cell_calls.CellInputs,
        upstream: cell_calls.BackwardInputs,
        phase: Phase,
        held: Held | None,
    ) -> cell_calls.CellGradients:
        return self._programs.backward(self._cell, inputs, upstream, phase, held)


def _with_weights(inputs: cell_calls.CellInputs, own: Nest) -> cell_calls.CellInputs:
    weights, untrained = own
    return inputs._replace(weights=weights, untrained=untrained)


def values(analysis: network.Analysis, cell: network.Cell) -> cell_calls.CellInputs:
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
