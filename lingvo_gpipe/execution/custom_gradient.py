"""The forward slots of a table as a differentiable function, under the user's own tape.

Each call of a cell's forward program is given a gradient by `tf.custom_gradient`: the cell's
backward program, on the cell's own device, which computes the forward again; or, where the policy
keeps it, the tape that watched the forward. The user's tape sees the call alone and keeps nothing
of what is inside; second derivatives go through what is computed again, and are refused where a
forward was kept. On each device backward calls follow one another, in the order in which the
tape issues them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.execution import cell_programs, executor
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.schedule import recompute, table


def forward(
    runner: executor.Executor,
    mode: cell_programs.Mode,
    table: table.Table,
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
    kept = recompute.reuse(table, policies, fuse=False).kept
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
    cell: cell_programs.Cell,
    mode: cell_programs.Mode,
    given: cell_programs.Given,
    queue: _Queue,
    keep: bool,
) -> cell_programs.Forward:
    wanted = cell.wanted_imports(mode)
    count = len(given.weights)
    packed: list[Any] = []

    def of(sources: Sequence[tf.Tensor]) -> cell_programs.Given:
        imports = _replace(given.imports, wanted, list(sources[count:]))
        return given._replace(weights=list(sources[:count]), imports=imports)

    @tf.custom_gradient
    def call(*watched: tf.Tensor) -> Any:
        # Tensors that no tape of the user's watches: it would keep what is computed of them.
        own = of([tf.stop_gradient(tensor) for tensor in watched])
        kept = cell.keep(mode, own) if keep else None
        result = cell.forward(mode, own) if kept is None else kept.forward
        graded = {v: cell_programs.floating(result.exports[v]) for v in cell.graded_exports(mode)}
        sums = [result.collected.losses[loss.name] for loss in cell.losses_in(mode)]
        packed[:] = [(result.exports, result.collected.as_nest())]
        flat = tf.nest.flatten(packed[0])
        place = {id(t): i for i, t in enumerate(flat)}

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            back = cell_programs.Back(
                {v: [upstream[place[id(t)]] for t in leaves] for v, leaves in graded.items()},
                [upstream[place[id(t)]] for t in sums],
            )

            def call_back() -> list[tf.Tensor]:
                # Of the tensors that are watched, so that second derivatives go through it.
                found = (
                    cell.backward(mode, of(watched), back) if kept is None else kept.gradients(back)
                )
                gradients = found.weights + [t for v in wanted for t in found.imports[v]]
                return gradients if kept is None else _differentiated_once(gradients, watched)

            return queue.put(call_back)

        return flat, gradient

    if not (cell.has_backward(mode) and mode.training):
        return cell.forward(mode, given)
    flat = call(*cell.sources(mode, given))
    exports, nest = tf.nest.pack_sequence_as(packed[0], list(flat))
    collected = Collected()
    collected.update(nest)
    return cell_programs.Forward(exports, collected)


def _differentiated_once(
    found: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return gradients by `sources` which refuse to be differentiated in turn."""

    @tf.custom_gradient
    def once(*_: tf.Tensor) -> Any:
        def refuse(*_: tf.Tensor) -> Any:
            raise errors.LayerError(
                "a forward that is kept is differentiated once. Use model.recompute='full' where "
                "second derivatives are needed"
            )

        return list(found), refuse

    given: list[tf.Tensor] = list(once(*sources))
    return given


def _replace(
    imports: dict[int, Any], wanted: Sequence[int], floats: list[tf.Tensor]
) -> dict[int, Any]:
    """Return imports with the floating leaves of `wanted` versions replaced, in order."""
    replaced = dict(imports)
    for v in wanted:
        leaves = [floats.pop(0) if t.dtype.is_floating else t for t in tf.nest.flatten(imports[v])]
        replaced[v] = tf.nest.pack_sequence_as(imports[v], leaves)
    return replaced
