"""The executor runs a table: it alone knows cells and devices at once.

Called while an outer function is traced, it walks the table once in a topological order and issues
one call per slot under the slot's device, with a control edge from the device's previous slot and
nothing else. The graph it adds grows with cells × micro-batches, not with layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import network, precision
from lingvo_gpipe.execution import cell_programs
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.network.wiring import FIELD, Wiring
from lingvo_gpipe.schedule import recompute, table


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """What a pass over the table is fed.

    Attributes:
        weights: path → tensor in the compute dtype, read once on its device.
        fields: version of each field → per micro-batch, its nest.
        seeds: per micro-batch, int32 [2].
        step: int64 scalar.
    """

    weights: dict[str, tf.Tensor]
    fields: dict[int, list[Any]]
    seeds: list[tf.Tensor]
    step: tf.Tensor


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a pass over the table gave, added up over micro-batches.

    Attributes:
        collected: sums of losses, metrics and moments.
        outputs: version → per micro-batch, its nest.
        gradients: path → gradient, in the dtype of the master copy.
    """

    collected: Collected
    outputs: dict[int, list[Any]]
    gradients: dict[str, tf.Tensor]


class Executor:
    """Runs tables over cells that are placed on devices."""

    def __init__(
        self,
        analysis: network.Analysis,
        the_cells: Sequence[cell_programs.Cell],
        devices: Sequence[str],
    ) -> None:
        """Make an executor.

        Args:
            analysis: of the network.
            the_cells: its K cells.
            devices: per cell, the name of its device.
        """
        self._analysis = analysis
        self.cells = list(the_cells)
        self.devices = list(devices)

    def device_of(self, path: str) -> str:
        """Return the device of the variable at `path`: that of its owner's cell."""
        return self.devices[self._analysis.cell_of(self._analysis.owner[path])]

    def forward(
        self, mode: cell_programs.Mode, table: table.Table, feed: Feed, leaving: Sequence[int]
    ) -> Outcome:
        """Run a table of forward slots alone."""
        walk = Walk(self, mode, table, feed)
        for device, slot in table.order():
            with walk.at(device, slot) as run:
                run.forward(self.cells[slot.cell].forward(mode, walk.given(slot)))
        return walk.outcome(leaving, {})

    def train(
        self,
        mode: cell_programs.Mode,
        table: table.Table,
        feed: Feed,
        *,
        scales: Mapping[str, tf.Tensor],
        policies: Sequence[str],
        fuse: bool,
        accumulators: Mapping[str, tf.Tensor] | None,
    ) -> Outcome:
        """Run a whole table: losses inside, gradients added up.

        Args:
            mode: what the pass is for.
            table: the schedule.
            feed: weights, micro-batches, seeds.
            scales: loss name → derivative of the update's loss by the loss's sum.
            policies: per cell, its recompute policy.
            fuse: fuses the last cell's F and B where they meet.
            accumulators: path → what gradients are added to; None: zeros.
        """
        walk = Walk(self, mode, table, feed)
        walk.start(scales, accumulators)
        last = len(self.cells) - 1
        reuse = recompute.reuse(table, policies, fuse=fuse)
        for device, slot in table.order():
            cell, m = self.cells[slot.cell], slot.micro_batch
            back = cell.has_backward(mode)
            joined = slot.cell == last and m in reuse.fused and back
            if slot.phase == "F":
                with walk.at(device, slot) as run:
                    if joined:
                        run.fused()
                    elif m in reuse.kept[slot.cell] and back:
                        run.kept()
                    else:
                        run.forward(cell.forward(mode, walk.given(slot)))
            elif back and not joined:
                with walk.at(device, slot) as run:
                    run.backward()
        return walk.outcome([], walk.gradients())


class Walk:
    """One walk over a table: values, gradients, and each device's previous slot."""

    def __init__(
        self, executor: Executor, mode: cell_programs.Mode, table: table.Table, feed: Feed
    ) -> None:
        self.executor = executor
        self.mode = mode
        self.table = table
        self.feed = feed
        self.values: dict[tuple[int, int], Any] = {
            (v, m): value for v, parts in feed.fields.items() for m, value in enumerate(parts)
        }
        self.collected: dict[tuple[int, int], Collected] = {}
        self.previous: dict[int, tf.Operation] = {}
        self.back: dict[tuple[int, int], list[list[tf.Tensor]]] = {}
        self.kept: dict[tuple[int, int], cell_programs.Kept] = {}
        self.totals: list[list[tf.Tensor]] = []
        self.scales: list[list[tf.Tensor]] = []

    def start(
        self, scales: Mapping[str, tf.Tensor], accumulators: Mapping[str, tf.Tensor] | None
    ) -> None:
        """Set out accumulators on each cell's device; a tied weight's carried sum at its owner."""
        analysis = self.executor._analysis
        for cell, device in zip(self.executor.cells, self.executor.devices, strict=True):
            self.scales.append([scales[loss.name] for loss in cell.losses])
            totals = []
            for path in cell.weights:
                spec = analysis.variables[path]
                owned = analysis.owner[path] in cell.route.layers
                if accumulators is not None and owned:
                    totals.append(accumulators[path])
                else:
                    with tf.device(device):
                        totals.append(tf.zeros(spec.shape, spec.dtype))
            self.totals.append(totals)

    @contextlib.contextmanager
    def at(self, device: int, slot: table.Slot) -> Iterator[_Slot]:
        """Issue a slot's call under its device, behind the device's previous slot."""
        before = [self.previous[device]] if device in self.previous else []
        place = self.executor.devices[slot.cell]
        with tf.device(place), tf.control_dependencies(before):
            run = _Slot(self, slot)
            yield run
        if run.mark is not None and not tf.executing_eagerly():
            self.previous[device] = run.mark.op

    def given(self, slot: table.Slot) -> cell_programs.Given:
        """Return the arguments that all of a cell's programs share."""
        cell, m = self.executor.cells[slot.cell], slot.micro_batch
        return cell_programs.Given(
            weights=[self.feed.weights[path] for path in cell.weights],
            state=[self.feed.weights[path] for path in cell.state],
            imports={v: self.values[v, m] for v in cell.route.imports},
            seed=self.feed.seeds[m],
            step=self.feed.step,
        )

    def exported(self, slot: table.Slot) -> dict[int, list[tf.Tensor]]:
        """Return the summed gradients of a cell's exports, for its backward slot."""
        cell, m = self.executor.cells[slot.cell], slot.micro_batch
        found = {}
        for v in cell.graded_exports(self.mode):
            leaves = self.back.get((v, m), [])
            if not leaves:
                found[v] = [tf.zeros_like(t) for t in cell_programs.floating(self.values[v, m])]
            else:
                found[v] = [
                    tf.add_n(same) if len(same) > 1 else same[0]
                    for same in zip(*leaves, strict=True)
                ]
        return found

    def gradients(self) -> dict[str, tf.Tensor]:
        """Return every weight's gradient, a tied one's shares added where its owner lives."""
        shares: dict[str, list[tf.Tensor]] = {}
        for cell, totals in zip(self.executor.cells, self.totals, strict=True):
            for path, total in zip(cell.weights, totals, strict=True):
                shares.setdefault(path, []).append(total)
        gradients = {}
        for path, parts in shares.items():
            with tf.device(self.executor.device_of(path)):
                gradients[path] = tf.add_n(parts) if len(parts) > 1 else parts[0]
        return gradients

    def outcome(self, leaving: Sequence[int], gradients: dict[str, tf.Tensor]) -> Outcome:
        """Add up what the micro-batches gave."""
        total = Collected()
        for k, device in enumerate(self.executor.devices):
            parts = [self.collected[k, m] for m in range(self.table.num_micro_batches)]
            flat = [tf.nest.flatten(part.as_nest()) for part in parts]
            with tf.device(device):
                added = [
                    tf.add_n(same) if len(same) > 1 else same[0] for same in zip(*flat, strict=True)
                ]
            total.update(tf.nest.pack_sequence_as(parts[0].as_nest(), added))
        outputs = {
            v: [self.values[v, m] for m in range(self.table.num_micro_batches)] for v in leaving
        }
        return Outcome(total, outputs, gradients)


class _Slot:
    """One slot while its call is issued; `mark` is a tensor of the call."""

    def __init__(self, walk: Walk, slot: table.Slot) -> None:
        self.walk = walk
        self.slot = slot
        self.cell = walk.executor.cells[slot.cell]
        self.mark: tf.Tensor | None = None

    def forward(self, given: cell_programs.Forward) -> None:
        """Take what a forward call gave."""
        k, m = self.slot.cell, self.slot.micro_batch
        for v, value in given.exports.items():
            self.walk.values[v, m] = value
        self.walk.collected[k, m] = given.collected
        self._mark(given.exports, given.collected.as_nest())

    def fused(self) -> None:
        """Run forward and backward as one call."""
        k = self.slot.cell
        forward, gradients = self.cell.fused(
            self.walk.mode,
            self.walk.given(self.slot),
            scales=self.walk.scales[k],
            accumulators=self.walk.totals[k],
        )
        self.forward(forward)
        self._take(gradients)

    def kept(self) -> None:
        """Run the forward under a tape of its own, which keeps its intermediate tensors."""
        kept = self.cell.keep(self.walk.mode, self.walk.given(self.slot))
        self.walk.kept[self.slot.cell, self.slot.micro_batch] = kept
        self.forward(kept.forward)

    def backward(self) -> None:
        """Run a backward slot: from what its forward kept, else recomputing."""
        walk, k, phase = self.walk, self.slot.cell, str(self.slot.phase)
        kept = walk.kept.get((k, self.slot.micro_batch))
        if kept is not None and phase == "W":
            return  # I has done all
        back = cell_programs.Back(walk.exported(self.slot), walk.scales[k], walk.totals[k])
        if kept is not None:
            self._take(kept.gradients(back))
        else:
            self._take(self.cell.backward(walk.mode, walk.given(self.slot), back, phase))

    def _take(self, gradients: cell_programs.Gradients) -> None:
        m = self.slot.micro_batch
        for v, leaves in gradients.imports.items():
            self.walk.back.setdefault((v, m), []).append(leaves)
        if gradients.weights:
            self.walk.totals[self.slot.cell] = gradients.weights
        self._mark(gradients.imports, gradients.weights)

    def _mark(self, *nests: Any) -> None:
        for leaf in tf.nest.flatten(nests):
            self.mark = leaf
            return


def read_weights(
    analysis: network.Analysis, variables: Mapping[str, tf.Variable], executor: Executor
) -> dict[str, tf.Tensor]:
    """Read every variable once, on its own device, weights in the compute dtype."""
    read = {}
    for path, variable in variables.items():
        with tf.device(executor.device_of(path)):
            value = tf.convert_to_tensor(variable)
            read[path] = cell_programs.computed(analysis.variables[path], value)
    return read


def field_versions(wiring: Wiring) -> dict[str, int]:
    """Return field name → version, for every field of the mini-batch."""
    return {v.name: v.index for v in wiring.versions if v.producer == FIELD}


def read_fields(analysis: network.Analysis, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field that the network has, name → nest, in the dtypes of its specs."""
    return {
        name: tf.nest.map_structure(
            lambda leaf, spec: precision.cast(leaf, spec.dtype),
            fields[name],
            analysis.specs[version],
        )
        for name, version in field_versions(analysis.wiring).items()
    }
