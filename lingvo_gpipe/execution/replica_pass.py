"""What a replica computes of a mini-batch: its table, slot by slot.

A pass goes through its table in a topological order and issues at most one call per slot
(`network.Cell.program` decides which), under the slot's device, with one control edge from the
previous call on that device. No other order is imposed: only that of the table and that of the
data. What a call returns is kept here until the cells that read it are called.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from lingvo_gpipe import network, precision
from lingvo_gpipe.execution import monitoring
from lingvo_gpipe.execution.cell_programs import (
    NO_UPSTREAM,
    BackwardInputs,
    CellInputs,
    CellResults,
)
from lingvo_gpipe.execution.cut_backward import Held
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.nests import Nest, differentiable
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.schedule.slot import Slot

if TYPE_CHECKING:
    from lingvo_gpipe.execution.executor import Executor


@dataclasses.dataclass(eq=False)
class ReplicaPass:
    """What one replica computes of a mini-batch, and its tensors while its calls are issued.

    Attributes:
        executor: knows programs and devices.
        replica: its number.
        micro_batches: numbers of its micro-batches in the mini-batch. Its slots count from 0.
        num_micro_batches: micro-batches of the mini-batch, of all replicas.
        network_pass: table and cells.
        fields: version → nest of tensors [N, …], of the examples of its micro-batches.
        sizes: how many examples each of its micro-batches holds.
        seeds: for each micro-batch, int32 [2].
        step: int64 scalar.
        variables: path → every variable, read once on its device, in the dtype that layers read.
        loss_factors: loss name → derivative of the update's loss by the loss's sum; training only.
        earlier_gradients: path → what the weight's gradient is added to; None: zeros.
        following: follows the progress of all replicas; None: it is not followed.
        times: notes when the slots of all replicas run; None: that is not noted.
        slot: the slot whose call was issued last; None before the first.
        values: micro-batch → version that a cell makes → nest.
        value_gradients: micro-batch → version → for each cell that reads it, the gradients of its
            differentiable leaves.
        collected: (cell, micro-batch) → what its forward collected.
        held: (cell, micro-batch) → what a call returned for the cell's next program alone.
        accumulators: for each cell and weight, the sum of its gradients so far.
    """

    executor: Executor
    replica: int
    micro_batches: range
    num_micro_batches: int
    network_pass: network.Pass
    fields: Mapping[int, Nest]
    sizes: Sequence[int]
    seeds: Sequence[tf.Tensor]
    step: tf.Tensor
    variables: Mapping[str, tf.Tensor]
    loss_factors: Mapping[str, tf.Tensor]
    earlier_gradients: Mapping[str, tf.Tensor] | None
    following: monitoring.PassProgress | None
    times: monitoring.PassStamps | None = None
    slot: Slot | None = None

    def __post_init__(self) -> None:
        """Cut the fields on each device that reads them, and send it the seeds.

        A device receives the examples of all micro-batches in one piece, and all seeds as one
        tensor: for each micro-batch alone, there would be M times as many messages.
        """
        self.devices = self.executor.devices[self.replica]
        self.values = collections.defaultdict[int, dict[int, Nest]](dict)
        self.value_gradients = collections.defaultdict[int, dict[int, list[list[tf.Tensor]]]](dict)
        self.collected: dict[tuple[int, int], Collected] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.accumulators: list[list[tf.Tensor]] = []
        self._fields_on: dict[str, dict[int, list[Nest]]] = {}
        self._seeds_on: dict[str, list[tf.Tensor]] = {}
        stacked = tf.stack(self.seeds)
        for cell, device in zip(self.network_pass.cells, self.devices, strict=True):
            with tf.device(device):
                if device not in self._seeds_on:
                    self._seeds_on[device] = tf.unstack(stacked)
                cut = self._fields_on.setdefault(device, {})
                for version in cell.imports:
                    if version in self.fields and version not in cut:
                        cut[version] = self._by_micro_batch(version)
        num_devices = self.network_pass.table.num_devices
        self._first_device = self.replica * num_devices
        self._last_call: dict[int, tf.Operation] = {}
        if self.following is not None:
            self._last_call = {
                device: self.following.start(self._first_device + device)
                for device in range(num_devices)
            }

    def run(self, phases: str = "FRBIW") -> None:
        """Issue the calls of all slots, or of those of some phases."""
        if "B" in phases and self.network_pass.mode.is_differentiated:
            self.start_accumulators()
        order = self.network_pass.table.order()
        last = {slot.micro_batch: slot for _, slot in order}
        for device, slot in order:
            if slot.phase not in phases:
                continue
            cell = self.network_pass.cells[slot.cell]
            name = cell.program(slot.phase, slot.micro_batch)
            is_done = name == "FB" and slot.phase == "B"  # its F slot has run both
            if name is not None and not is_done:
                self.issue(device, slot, functools.partial(self.compute, slot, name))
            if slot == last[slot.micro_batch]:
                self._drop(slot.micro_batch)

    def after_forward(self) -> ReplicaPass:
        """Return a copy of a pass whose forward slots have run; others can then run in the copy."""
        copied = copy.copy(self)
        copied.values = collections.defaultdict(dict, {m: dict(v) for m, v in self.values.items()})
        copied.value_gradients = collections.defaultdict(dict)
        copied.held = dict(self.held)
        copied.accumulators = []
        copied.following = None
        copied._last_call = {}  # the copy may run in another graph
        return copied

    def compute(self, slot: Slot, name: str) -> CellResults:
        """Call a program for a slot."""
        key = slot.cell, slot.micro_batch
        inputs = self.cell_inputs(*key)
        upstream = NO_UPSTREAM if name in ("F", "K", "R") else self.backward_inputs(*key)
        cell, programs = self.network_pass.cells[slot.cell], self.executor.programs[slot.cell]
        with self._start_noted(slot, inputs.imports, upstream.exports):
            return programs.run(cell, name, inputs, upstream, self.held.pop(key, None))

    def issue(self, device: int, slot: Slot, call: Callable[[], CellResults]) -> None:
        """Make a slot's call on its device, after the device's last call; keep what it returns."""
        self.slot = slot
        before = [self._last_call[device]] if device in self._last_call else []
        with tf.device(self.devices[slot.cell]), tf.control_dependencies(before):
            results = call()
        self.store(slot, results)
        tensors = tf.nest.flatten(results.as_nest())
        if tensors and not tf.executing_eagerly():
            self._returned(device, slot, tensors[0].op)

    def store(self, slot: Slot, results: CellResults) -> None:
        """Keep what a slot's call returned, for the cells that read it."""
        key = k, m = slot.cell, slot.micro_batch
        self.values[m].update(results.exports)
        if results.collected is not None:
            self.collected[key] = results.collected
        for v, leaves in results.imports.items():
            self.value_gradients[m].setdefault(v, []).append(leaves)
        if results.weights:
            self.accumulators[k] = results.weights
        if results.held:
            self.held[key] = results.held

    def cell_inputs(self, k: int, m: int) -> CellInputs:
        """Return the arguments of all programs of cell k for micro-batch m."""
        cell, device = self.network_pass.cells[k], self.devices[k]
        fields = self._fields_on[device]
        return CellInputs(
            weights=[self.variables[path] for path in cell.weights],
            untrained=[self.variables[path] for path in cell.untrained],
            imports={v: fields[v][m] if v in fields else self.values[m][v] for v in cell.imports},
            seed=self._seeds_on[device][m],
            step=self.step,
        )

    def backward_inputs(self, k: int, m: int) -> BackwardInputs:
        """Return what a backward program of cell k is called with in addition to `cell_inputs`."""
        cell = self.network_pass.cells[k]
        return BackwardInputs(
            {v: self.added_gradients(v, m) for v in cell.exports_with_gradient},
            [self.loss_factors[loss.name] for loss in cell.losses],
            self.accumulators[k],
        )

    def start_accumulators(self) -> None:
        """Make zeros on each cell's device; an earlier sum is continued only at its owner.

        A single micro-batch that continues no sum needs none: its gradients are the sum.
        """
        earlier = self.earlier_gradients
        if earlier is None and len(self.micro_batches) == 1:
            self.accumulators = [[] for _ in self.devices]
            return
        analysis = self.executor.analysis
        for cell, device in zip(self.network_pass.cells, self.devices, strict=True):
            sums = []
            for path in cell.weights:
                is_owner = analysis.replica_of(path) == self.replica
                if earlier is not None and is_owner and analysis.owner[path] in cell.layers:
                    sums.append(earlier[path])
                else:
                    spec = analysis.variables[path]
                    with tf.device(device):
                        sums.append(tf.zeros(spec.shape, spec.dtype))
            self.accumulators.append(sums)

    def weight_gradients(self) -> dict[str, tf.Tensor]:
        """Return every weight's gradient; those of a tied one are summed in its owner's cell."""
        analysis, cells = self.executor.analysis, self.network_pass.cells
        parts: dict[str, list[tf.Tensor]] = {p: [] for cell in cells for p in cell.weights}
        for cell, sums in zip(cells, self.accumulators, strict=True):
            for path, total in zip(cell.weights, sums, strict=bool(sums)):
                parts[path].append(total)
        gradients = {}
        for path, of_cells in parts.items():
            spec = analysis.variables[path]
            with tf.device(self.devices[analysis.owner_cell(path)]):
                totals = [precision.cast(total, spec.dtype) for total in of_cells]
                gradients[path] = in_order(totals or [tf.zeros(spec.shape, spec.dtype)])
        return gradients

    def collected_sums(self) -> Collected:
        """Return what the layers collected, summed over micro-batches on each cell's device."""
        total = Collected()
        for k, device in enumerate(self.devices):
            nests = [self.collected[k, m].as_nest() for m in range(len(self.micro_batches))]
            leaves = zip(*map(tf.nest.flatten, nests), strict=True)
            with tf.device(device):
                added = [in_order(same) for same in leaves]
            total.update(tf.nest.pack_sequence_as(nests[0], added))
        return total

    def values_of(self, version: int) -> list[Nest]:
        """Return the nest of a version that the pass returns, for each micro-batch."""
        if version in self.fields:
            return self._by_micro_batch(version)
        return [self.values[m][version] for m in range(len(self.micro_batches))]

    def _by_micro_batch(self, version: int) -> list[Nest]:
        """Return a field's part of each micro-batch."""
        return micro_batches.split(self.fields[version], self.sizes)

    def added_gradients(self, version: int, micro_batch: int) -> list[tf.Tensor]:
        """Return the gradients of a version's leaves, summed over the cells that read it."""
        of_readers = self.value_gradients[micro_batch].get(version, [])
        if not of_readers:
            if version in self.fields:
                value = self._by_micro_batch(version)[micro_batch]
            else:
                value = self.values[micro_batch][version]
            return [tf.zeros_like(leaf) for leaf in differentiable(value)]
        return [in_order(same) for same in zip(*of_readers, strict=True)]

    def _drop(self, micro_batch: int) -> None:
        """Forget what no slot reads any more, except for outputs and gradients of the fields.

        Eager tensors need memory until they are forgotten.
        """
        values = self.values.pop(micro_batch, {})
        leaving = self.network_pass.mode.leaving & values.keys()
        if leaving:
            self.values[micro_batch] = {v: values[v] for v in leaving}
        gradients = self.value_gradients.pop(micro_batch, {})
        of_fields = gradients.keys() & self.fields.keys()
        if of_fields:
            self.value_gradients[micro_batch] = {v: gradients[v] for v in of_fields}

    @contextlib.contextmanager
    def _start_noted(self, slot: Slot, *inputs: Nest) -> Iterator[None]:
        """Note the time before the call in the `with` block, once these inputs are there."""
        if self.times is None or tf.executing_eagerly():
            yield
            return
        device = self._first_device + self.network_pass.table.device_of(slot.cell)
        with tf.control_dependencies([self.times.start(device, tf.nest.flatten(inputs))]):
            yield

    def _returned(self, device: int, slot: Slot, operation: tf.Operation) -> None:
        """Note that a slot's call has returned, which is the operation."""
        self._last_call[device] = operation
        number = self._first_device + device
        in_mini_batch = self.in_mini_batch(slot)
        if self.following is not None:
            self.following.returned(number, in_mini_batch, operation)
        if self.times is not None:
            with tf.device(self.devices[slot.cell]):
                self._last_call[device] = self.times.returned(number, in_mini_batch, operation)

    def in_mini_batch(self, slot: Slot) -> Slot:
        """Return a slot with the number of its micro-batch in the mini-batch."""
        return dataclasses.replace(slot, micro_batch=self.micro_batches[slot.micro_batch])
