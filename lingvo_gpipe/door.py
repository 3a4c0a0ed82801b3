"""The forward slots of a table as a differentiable function, under the user's own tape.

Each call of a cell's forward program is given a gradient by `tf.custom_gradient`: the cell's
backward program, on the cell's own device, which computes the forward again; or, where the policy
keeps it, the tape that watched the forward. The user's tape sees the call alone and keeps nothing
of what is inside. On each device backward calls follow one another, in the order in which the
tape issues them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import cells, executor
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.schedule import table as table_lib


def forward(
    runner: executor.Executor,
    mode: cells.Mode,
    table: table_lib.Table,
    feed: executor.Feed,
    leaving: Sequence[int],
    policies: Sequence[str],
) -> executor.Outcome:
    """Run the forward slots of `table`; see `Executor.forward`.

    Args:
        runner: knows cells and devices.
        mode: what the pass is for.
        table: the schedule; its backward slots are left to the tape.
        feed: weights, micro-batches, seeds.
        leaving: versions wanted as outputs.
        policies: per cell, its recompute policy.
    """
    walk = executor.Walk(runner, mode, table, feed)
    kept = {k: executor.kept(table, k, policies[k]) for k in range(len(runner.cells))}
    queues = {device: _Queue(device) for device in runner.devices}
    for device, slot in table.order():
        if slot.phase == "F":
            with walk.at(device, slot) as run:
                run.forward(
                    _differentiable(
                        runner.cells[slot.cell],
                        mode,
                        walk.given(slot),
                        queues[runner.devices[slot.cell]],
                        slot.micro_batch in kept[slot.cell],
                    )
                )
    return walk.outcome(leaving, {})


class _Queue:
    """The backward calls of a device, one behind the other."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last: tf.Operation | None = None

    def put(self, call: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Issue a call on the device, behind the one before; return what it gives."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = [self._last] if self._last is not None and self._last.graph is graph else []
        with tf.device(self._device), tf.control_dependencies(before):
            found = call()
        if found and graph is not None:
            self._last = found[0].op
        return found


def _differentiable(
    cell: cells.Cell, mode: cells.Mode, given: cells.Given, queue: _Queue, keep: bool
) -> cells.Forward:
    wanted = cell.wanted_imports(mode)
    count = len(given.weights)
    packed: list[Any] = []

    @tf.custom_gradient
    def call(*watched: tf.Tensor) -> Any:
        # Tensors that no tape of the user's watches: it would keep what is computed of them.
        sources = [tf.stop_gradient(tensor) for tensor in watched]
        imports = _replace(given.imports, wanted, sources[count:])
        own = given._replace(weights=sources[:count], imports=imports)
        tape = tf.GradientTape()
        with tape if keep else contextlib.nullcontext():
            if keep:
                tape.watch(sources)
            result = cell.forward(mode, own)
        graded = [t for v in cell.graded_exports(mode) for t in cells.floating(result.exports[v])]
        sums = [result.collected.losses[loss.name] for loss in cell.losses_in(mode)]
        packed[:] = [(result.exports, result.collected.as_nest())]
        flat = tf.nest.flatten(packed[0])
        place = {id(t): i for i, t in enumerate(flat)}

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            starts = [upstream[place[id(t)]] for t in graded]
            scales = [upstream[place[id(t)]] for t in sums]

            def from_kept() -> list[tf.Tensor]:
                found = tape.gradient(
                    graded + sums, sources, starts + scales, unconnected_gradients="zero"
                )
                return [cells.dense(g) for g in found]

            def recomputed() -> list[tf.Tensor]:
                exports, rest = {}, starts
                for v in cell.graded_exports(mode):
                    size = len(cells.floating(result.exports[v]))
                    exports[v], rest = rest[:size], rest[size:]
                back = cell.backward(mode, own, exports=exports, scales=scales, accumulators=None)
                return back.weights + [t for v in wanted for t in back.imports[v]]

            return queue.put(from_kept if keep else recomputed)

        return flat, gradient

    if not (cell.has_backward(mode) and mode.training):
        return cell.forward(mode, given)
    flat = call(*cell.sources(mode, given))
    exports, nest = tf.nest.pack_sequence_as(packed[0], list(flat))
    collected = Collected()
    collected.update(nest)
    return cells.Forward(exports, collected)


def _replace(
    imports: dict[int, Any], wanted: Sequence[int], floats: list[tf.Tensor]
) -> dict[int, Any]:
    """Return imports with the floating leaves of `wanted` versions replaced, in order."""
    replaced = dict(imports)
    for v in wanted:
        leaves = [floats.pop(0) if t.dtype.is_floating else t for t in tf.nest.flatten(imports[v])]
        replaced[v] = tf.nest.pack_sequence_as(imports[v], leaves)
    return replaced
