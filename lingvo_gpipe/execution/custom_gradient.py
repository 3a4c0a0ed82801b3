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
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.execution import diagnosis
from lingvo_gpipe.execution.cell_programs import (
    BackwardInputs,
    CellInputs,
    CellResults,
    gradient_sources,
)
from lingvo_gpipe.execution.executor import Executor, MiniBatch
from lingvo_gpipe.execution.replica_pass import ReplicaPass
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, floating
from lingvo_gpipe.schedule.slot import Slot

_WithGradient: TypeAlias = "tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]"
"""Return type of a function for `tf.custom_gradient`: its results and its gradient function."""


def forward(
    executor: Executor, fields: dict[str, Nest], weights: Mapping[str, tf.Tensor], ctx: Context
) -> tuple[dict[str, Nest], Collected]:
    """Run forward slots; their backward slots are left to the caller's tape.

    Args:
        executor: knows cells and devices.
        fields: all fields of the mini-batch.
        weights: path → every variable's value.
        ctx: context of the call; its seed is that of the run.

    Returns:
        Name → output of the network, and what the layers collected.
    """
    executor.num_micro_batches(fields)  # reports a lower number
    passes = executor.passes(
        MiniBatch((fields,), ctx.step, {}),
        functools.partial(executor.analysis.tape_pass, training=ctx.training),
        variables=executor.variables.in_read_dtypes(weights),
        seed=ctx.root_seed,
    )
    shared = _shared_weights(executor, passes)
    for replica_pass in passes:
        _issue(replica_pass, _SharedInputs(replica_pass, shared))
    return executor.outputs(passes), executor.collected(passes)


def _issue(replica_pass: ReplicaPass, shared: _SharedInputs) -> None:
    """Issue the forward calls of a replica's pass."""
    queues = {device: _BackwardQueue(device) for device in replica_pass.devices}
    for device, slot in replica_pass.network_pass.table.order():
        if slot.phase == "F":
            inputs = shared.cell_inputs(slot.cell, slot.micro_batch)
            queue = queues[replica_pass.devices[slot.cell]]
            call = _DifferentiableCall(replica_pass, slot, queue)
            with diagnosis.named(replica_pass, slot, inputs):
                replica_pass.issue(device, slot, functools.partial(call, inputs))


def _shared_weights(executor: Executor, passes: Sequence[ReplicaPass]) -> dict[str, _Shared]:
    """Return path → weight, for the cells of all replicas that read it."""
    readers = collections.Counter(
        path
        for replica_pass in passes
        for cell in replica_pass.network_pass.cells
        for path in cell.weights
    )
    values = passes[0].variables
    return {
        path: _Shared([values[path]], count, executor.device_of(path))
        for path, count in readers.items()
    }


class _SharedInputs:
    """The inputs of a pass's calls, each with its own copy of every tensor that has a gradient.

    The copies' gradients are added on the tensor's device. Calls must be in the order of the pass.
    """

    def __init__(self, replica_pass: ReplicaPass, weights: Mapping[str, _Shared]) -> None:
        self._pass = replica_pass
        cells = replica_pass.network_pass.cells
        self._weights = [
            _Shared(
                [tensor for path in cell.weights for tensor in weights[path].take()],
                len(replica_pass.micro_batches),
                device,
            )
            for cell, device in zip(cells, replica_pass.devices, strict=True)
        ]
        self._readers = collections.Counter(v for cell in cells for v in cell.imports_with_gradient)
        self._imports: dict[tuple[int, int], _Shared] = {}

    def cell_inputs(self, k: int, m: int) -> CellInputs:
        """Return the inputs of the next call of cell k, for micro-batch m."""
        inputs = self._pass.cell_inputs(k, m)
        imports = dict(inputs.imports)
        for v in self._pass.network_pass.cells[k].imports_with_gradient:
            if (v, m) not in self._imports:
                device = self._pass.executor.device_of_version(v, self._pass.replica)
                self._imports[v, m] = _Shared(floating(imports[v]), self._readers[v], device)
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

    def __init__(self, replica_pass: ReplicaPass, slot: Slot, queue: _BackwardQueue) -> None:
        self._pass = replica_pass
        self._slot = slot
        self._queue = queue
        self._cell = replica_pass.network_pass.cells[slot.cell]
        self._programs = replica_pass.executor.programs[slot.cell]

    def __call__(self, inputs: CellInputs) -> CellResults:
        """Run the forward program; the caller's tape records it as one function."""
        cell, programs = self._cell, self._programs
        if not cell.has_backward:
            return programs.run(cell, "F", inputs)
        keeps = self._slot.micro_batch in cell.kept
        called: list[CellResults] = []

        @tf.custom_gradient
        def call(*sources: tf.Tensor) -> _WithGradient:
            # Unwatched copies: otherwise the caller's tape would keep all tensors computed here.
            unwatched = self._with_sources(inputs, [tf.stop_gradient(t) for t in sources])
            results = programs.run(cell, "K" if keeps else "F", unwatched)
            called[:] = [dataclasses.replace(results, held={})]
            flat = tf.nest.flatten(called[0].as_nest())
            place = {id(t): i for i, t in enumerate(flat)}

            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                def upstream_of(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
                    return [upstream[place[id(t)]] for t in tensors]

                collected = results.collected or Collected()
                backward_inputs = BackwardInputs(
                    {
                        v: upstream_of(floating(results.exports[v]))
                        for v in cell.exports_with_gradient
                    },
                    upstream_of([collected.losses[loss.name] for loss in cell.losses]),
                )

                def backward() -> list[tf.Tensor]:
                    # Recomputed on the watched tensors, so that second derivatives go through it.
                    given = unwatched if keeps else self._with_sources(inputs, sources)
                    gradients = programs.run(
                        cell, "BK" if keeps else "B", given, backward_inputs, results.held
                    )
                    of_imports = [t for leaves in gradients.imports.values() for t in leaves]
                    flat = gradients.weights + of_imports
                    return _differentiated_once(flat, sources) if keeps else flat

                slot = dataclasses.replace(self._slot, phase="B")
                with diagnosis.named(self._pass, slot, inputs, backward_inputs):
                    return self._queue.put(backward)

            return flat, gradient

        flat = call(*gradient_sources(cell, inputs))
        exports, collected, *_ = tf.nest.pack_sequence_as(called[0].as_nest(), list(flat))
        return CellResults(exports, Collected(**collected))

    def _with_sources(self, inputs: CellInputs, sources: Sequence[tf.Tensor]) -> CellInputs:
        """Return the inputs with the tensors that get a gradient replaced, in their order."""
        count = len(inputs.weights)
        weights, leaves = list(sources[:count]), iter(sources[count:])
        imports = dict(inputs.imports)
        for v in self._cell.imports_with_gradient:
            imports[v] = _with_floating(imports[v], leaves)
        return inputs._replace(weights=weights, imports=imports)


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
