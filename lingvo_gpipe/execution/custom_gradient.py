"""The forward slots of a table as a differentiable function, under the caller's own tape.

`tf.custom_gradient` defines the gradient of each forward call. It is the cell's backward program,
which recomputes the forward on the cell's device; or, where the policy keeps the forward, continues
from what it kept. The caller's tape sees only the call and keeps no tensor from inside it. Second
derivatives go through the recomputation; where a forward was kept they are refused.

Each device runs its backward calls one after another, in the order in which the caller's tape
issues them. The gradients of a tensor that several calls read are added on its device: the tape
would add them in the process that calls.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, network
from lingvo_gpipe.execution import cell_programs, failures
from lingvo_gpipe.execution.cell_calls import (
    BackwardInputs,
    CellGradients,
    CellInputs,
    CellOutputs,
)
from lingvo_gpipe.execution.executor import Executor, PassOutputs, PassRun, Share
from lingvo_gpipe.nests import Nest, floating

_WithGradient: TypeAlias = "tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]"
"""Return type of a function for `tf.custom_gradient`: its results and its gradient function."""


def forward(executor: Executor, shares: Sequence[Share]) -> PassOutputs:
    """Run the forward slots of passes; their backward slots are left to the caller's tape.

    Args:
        executor: knows cells and devices.
        shares: what each replica computes, by passes of `Analysis.tape_pass`.
    """
    runs = executor.runs(shares)
    weights = _shared_weights(executor, runs)
    for run in runs:
        _issue(run, _SharedInputs(run, weights))
    return executor.outputs(runs, {})


def _issue(run: PassRun, shared: _SharedInputs) -> None:
    """Issue the calls of a replica's pass."""
    queues = {device: _BackwardQueue(device) for device in run.devices}
    for device, slot in run.network_pass.table.order():
        if slot.phase == "F":
            cell = run.network_pass.cells[slot.cell]
            of_backward = dataclasses.replace(slot, phase="B")
            inputs = shared.cell_inputs(slot.cell, slot.micro_batch)
            with run.call(device, slot) as call, failures.named(run, slot, inputs):
                differentiable = _DifferentiableCall(
                    run.executor.programs[slot.cell],
                    cell,
                    queues[run.devices[slot.cell]],
                    functools.partial(failures.named, run, of_backward),
                    keeps=slot.micro_batch in cell.kept,
                )
                call.store_outputs(differentiable(inputs))


def _shared_weights(executor: Executor, runs: Sequence[PassRun]) -> dict[str, _Shared]:
    """Return path → weight, for the cells of all replicas that read it."""
    readers = collections.Counter(
        path for run in runs for cell in run.network_pass.cells for path in cell.weights
    )
    values = runs[0].inputs.variables
    return {
        path: _Shared([values[path]], count, executor.device_of(path))
        for path, count in readers.items()
    }


class _SharedInputs:
    """The inputs of a pass's calls, in which no two calls have a tensor with a gradient in common.

    Calls must be in the order of the pass.
    """

    def __init__(self, run: PassRun, owned: Mapping[str, _Shared]) -> None:
        self._run = run
        cells = run.network_pass.cells
        self._weights = [
            _Shared(
                [tensor for path in cell.weights for tensor in owned[path].take()],
                run.network_pass.num_micro_batches,
                device,
            )
            for cell, device in zip(cells, run.devices, strict=True)
        ]
        self._readers = collections.Counter(v for cell in cells for v in cell.imports_with_gradient)
        self._imports: dict[tuple[int, int], _Shared] = {}

    def cell_inputs(self, k: int, m: int) -> CellInputs:
        """Return the inputs of the next call of cell k, for micro-batch m."""
        inputs = self._run.cell_inputs(k, m)
        imports = dict(inputs.imports)
        for v in self._run.network_pass.cells[k].imports_with_gradient:
            if (v, m) not in self._imports:
                self._imports[v, m] = _Shared(
                    floating(imports[v]),
                    self._readers[v],
                    self._run.executor.device_of_version(v, self._run.share.replica),
                )
            imports[v] = _with_floating(imports[v], self._imports[v, m].take())
        return inputs._replace(weights=self._weights[k].take(), imports=imports)


class _Shared:
    """Tensors that several calls read."""

    def __init__(self, tensors: Sequence[tf.Tensor], readers: int, device: str | None) -> None:
        """Make it.

        Args:
            tensors: the tensors.
            readers: how often they are taken.
            device: where their gradients are added; None: where TensorFlow chooses.
        """
        self._tensors = list(tensors)
        self._left = readers
        self._device = device

    def take(self) -> list[tf.Tensor]:
        """Return the tensors for the next reader."""
        self._left -= 1
        if self._left == 0 or not self._tensors:
            return self._tensors
        count = len(self._tensors)

        @tf.custom_gradient
        def copies(*tensors: tf.Tensor) -> _WithGradient:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                with tf.device(self._device):
                    return [upstream[i] + upstream[count + i] for i in range(count)]

            return [tf.identity(tensor) for tensor in tensors * 2], gradient

        with tf.device(self._device):
            both = list(copies(*self._tensors))
        self._tensors = both[count:]
        return both[:count]


class _BackwardQueue:
    """The backward calls of a device, one after another."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last: tf.Operation | None = None

    def put(self, call: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Issue a call on the device, after the previous one; return its result."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = [self._last] if self._last is not None and self._last.graph is graph else []
        with tf.device(self._device), tf.control_dependencies(before):
            result = call()
        if result and graph is not None:
            self._last = result[0].op
        return result


class _DifferentiableCall:
    """One forward call of a cell, and its gradient."""

    def __init__(
        self,
        programs: cell_programs.CellPrograms,
        cell: network.Cell,
        queue: _BackwardQueue,
        named: Callable[[CellInputs, BackwardInputs], contextlib.AbstractContextManager[None]],
        *,
        keeps: bool,
    ) -> None:
        self._programs = programs
        self._cell = cell
        self._queue = queue
        self._named = named
        self._keeps = keeps

    def __call__(self, inputs: CellInputs) -> CellOutputs:
        """Run the forward program; the caller's tape records it as one function."""
        cell = self._cell
        if not cell.has_backward:
            return self._programs.forward(cell, inputs)
        packed: list[Nest] = []

        @tf.custom_gradient
        def call(*sources: tf.Tensor) -> _WithGradient:
            # Unwatched copies: otherwise the caller's tape would keep all tensors computed here.
            unwatched = self._with_sources(inputs, [tf.stop_gradient(t) for t in sources])
            held = None
            if self._keeps:
                outputs, held = self._programs.keep(cell, unwatched)
            else:
                outputs = self._programs.forward(cell, unwatched)
            packed[:] = [outputs.as_nest()]
            flat = tf.nest.flatten(packed[0])
            place = {id(t): i for i, t in enumerate(flat)}

            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                def upstream_of(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
                    return [upstream[place[id(t)]] for t in tensors]

                exports = cell.exports_with_gradient
                losses = outputs.collected.losses
                backward_inputs = BackwardInputs(
                    {v: upstream_of(floating(outputs.exports[v])) for v in exports},
                    upstream_of([losses[loss.name] for loss in cell.losses]),
                )

                def backward() -> list[tf.Tensor]:
                    if held is not None:
                        once = self._programs.backward(cell, unwatched, backward_inputs, held=held)
                        return _differentiated_once(self._flat(once), sources)
                    # On the watched tensors, so that second derivatives go through it.
                    watched = self._with_sources(inputs, sources)
                    return self._flat(self._programs.backward(cell, watched, backward_inputs))

                with self._named(inputs, backward_inputs):
                    return self._queue.put(backward)

            return flat, gradient

        flat = call(*cell_programs.gradient_sources(cell, inputs))
        return CellOutputs.of_nest(tf.nest.pack_sequence_as(packed[0], list(flat)))

    def _with_sources(self, inputs: CellInputs, sources: Sequence[tf.Tensor]) -> CellInputs:
        """Return the inputs with the tensors that get a gradient replaced, in their order."""
        count = len(inputs.weights)
        weights, leaves = list(sources[:count]), iter(sources[count:])
        imports = dict(inputs.imports)
        for v in self._cell.imports_with_gradient:
            imports[v] = _with_floating(imports[v], leaves)
        return inputs._replace(weights=weights, imports=imports)

    def _flat(self, gradients: CellGradients) -> list[tf.Tensor]:
        """Return the gradients in the order of `gradient_sources`."""
        of_imports = [t for v in self._cell.imports_with_gradient for t in gradients.imports[v]]
        return gradients.weights + of_imports


def _with_floating(nest: Nest, leaves: Iterable[tf.Tensor]) -> Nest:
    """Return a nest with its floating leaves replaced by the next of `leaves`."""
    rest = iter(leaves)
    flat = [next(rest) if leaf.dtype.is_floating else leaf for leaf in tf.nest.flatten(nest)]
    return tf.nest.pack_sequence_as(nest, flat)


def _differentiated_once(
    gradients: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return gradients by `sources` that raise an error when they are differentiated again."""

    @tf.custom_gradient
    def once(*_: tf.Tensor) -> _WithGradient:
        def refuse(*_: tf.Tensor) -> NoReturn:
            raise errors.LayerError(
                "a kept forward can be differentiated only once. Use model.recompute='full' where "
                "second derivatives are needed"
            )

        return list(gradients), refuse

    return list(once(*sources))
