"""The executor runs passes over the network; only it knows both cells and devices.

It is called while an outer function is traced. Each replica runs a pass over its share of the
micro-batches: it goes through the table of the pass in a topological order and issues at most one
call per slot, under the slot's device, with one control edge from the previous call on that device.
A slot that computes nothing (`Cell.computes`), or whose backward is fused with its forward, has no
call. No other order is imposed: only that of the table and that of the data. The graph that it adds
grows with cells × micro-batches, not with layers.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import network, precision
from lingvo_gpipe.execution import cell_calls, cell_programs
from lingvo_gpipe.execution.cut_backward import Held
from lingvo_gpipe.execution.monitoring import progress, stamps
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.nests import Nest, floating
from lingvo_gpipe.network import replicas
from lingvo_gpipe.network.cut_fields import CutFields
from lingvo_gpipe.network.wiring import FIELD
from lingvo_gpipe.optim import rows
from lingvo_gpipe.schedule.slot import Slot


@dataclasses.dataclass(frozen=True, slots=True)
class PassInputs:
    """Inputs of a pass over the network.

    Attributes:
        variables: path → every variable, read once on its device, in the dtype that layers read.
        fields: fields of the micro-batches, cut where they are read.
        seeds: per micro-batch, int32 [2].
        step: int64 scalar.
        loss_factors: loss name → derivative of the update's loss by the loss's sum; training only.
        accumulators: path → what the weight's gradient is added to; None: zeros.
    """

    variables: dict[str, tf.Tensor]
    fields: CutFields
    seeds: list[tf.Tensor]
    step: tf.Tensor
    loss_factors: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    accumulators: dict[str, tf.Tensor] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PassOutputs:
    """Outputs of a pass over the network, summed over micro-batches.

    Attributes:
        collected: sums of losses, metrics and moments.
        outputs: version that the pass returns → its nest for each micro-batch.
        gradients: path → gradient, in the dtype of the master copy.
    """

    collected: Collected
    outputs: dict[int, list[Nest]]
    gradients: dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one replica computes of a mini-batch.

    Attributes:
        replica: its number.
        first_micro_batch: number of its first micro-batch in the mini-batch.
        num_micro_batches: micro-batches of the mini-batch, of all replicas.
        network_pass: table and cells, for its micro-batches.
        inputs: inputs of its micro-batches.
    """

    replica: int
    first_micro_batch: int
    num_micro_batches: int
    network_pass: network.Pass
    inputs: PassInputs


class Executor:
    """Runs passes over cells that are placed on devices.

    Attributes:
        programs: programs of each cell.
        devices: for each replica, the name of each cell's device.
        progress: how far each device is in the pass that runs; None: it is not followed.
        stamps: when each slot of a pass of training runs; None: that is not noted.
        input_devices: device that holds each part of the mini-batches; empty: that of the process
            that calls. Set it before a pass is traced.
    """

    def __init__(
        self,
        analysis: network.Analysis,
        programs: Sequence[cell_programs.CellPrograms],
        devices: Sequence[Sequence[str]],
    ) -> None:
        """Make an executor.

        Args:
            analysis: analysis of the network.
            programs: see the class.
            devices: see the class.
        """
        self.analysis = analysis
        self.programs = list(programs)
        self.devices = [list(of_replica) for of_replica in devices]
        self.progress: progress.Progress | None = None
        self.stamps: stamps.Stamps | None = None
        self.input_devices: tuple[str, ...] = ()

    @contextlib.contextmanager
    def beside_input(self, part: int = 0) -> Iterator[None]:
        """Place operations of the `with` block on the device that holds a part of the input."""
        if not self.input_devices:
            yield
        else:
            with tf.device(self.input_devices[part]):
                yield

    def follow_progress(self) -> progress.Progress:
        """Follow the progress of every pass that is traced from now on."""
        self.progress = progress.Progress(self._table_devices())
        return self.progress

    def note_times(self) -> stamps.Stamps:
        """Note when the slots run of every pass of training that is traced from now on."""
        self.stamps = stamps.Stamps(self._table_devices())
        return self.stamps

    def _table_devices(self) -> list[str]:
        """Return the names of the table's devices, replica after replica."""
        numbers = [cell.device_number for cell in self.analysis.cells]
        homes = (dict(zip(numbers, of_replica, strict=True)) for of_replica in self.devices)
        return [of_replica[number] for of_replica in homes for number in sorted(of_replica)]

    @property
    def num_traces(self) -> int:
        """How many cell programs were traced so far."""
        return sum(programs.num_traces for programs in self.programs)

    def device_of(self, path: str) -> str:
        """Return the device of the variable at `path`: that of its owner's cell."""
        return self.devices[self.analysis.replica_of(path)][self.analysis.owner_cell(path)]

    def device_of_version(self, version: int, replica: int = 0) -> str | None:
        """Return the device of the cell that makes a version; None: it is a field."""
        producer = self.analysis.wiring.versions[version].producer
        return None if producer == FIELD else self.devices[replica][self.analysis.cell_of(producer)]

    def runs(self, shares: Sequence[Share]) -> list[PassRun]:
        """Return the passes of all replicas, before their calls are issued."""
        following = None
        if self.progress is not None and not tf.executing_eagerly():
            following = self.progress.new_pass()
        return [PassRun(self, share, following) for share in shares]

    def forward(self, shares: Sequence[Share]) -> PassOutputs:
        """Run passes whose tables have only forward slots."""
        runs = self.runs(shares)
        for run in runs:
            run.forward()
        return self.outputs(runs, {})

    def train(self, shares: Sequence[Share]) -> PassOutputs:
        """Run passes of training: losses inside, gradients of weights summed."""
        runs = self.runs(shares)
        times = None
        if self.stamps is not None and not tf.executing_eagerly():
            times = self.stamps.new_pass()
        for run in runs:
            run.times = times
            run.train()
        if times is not None:
            times.finish()
        gradients = self._at_owners([run.weight_gradients() for run in runs], shares)
        return self.outputs(runs, gradients)

    def _at_owners(
        self, of_replicas: Sequence[Mapping[str, tf.Tensor]], shares: Sequence[Share]
    ) -> dict[str, tf.Tensor]:
        """Return each weight's gradient, added on its owner's device; rows where they are fewer."""
        gradients = {}
        earlier = shares[0].inputs.accumulators or {}
        computing = {share.replica for share in shares}
        for path in of_replicas[0]:
            spec, owner = self.analysis.variables[path], self.device_of(path)
            whole, parts_of_rows = [], []
            if path in earlier and self.analysis.replica_of(path) not in computing:
                whole.append(earlier[path])  # no micro-batch of its owner continues the sum
            for share, parts in zip(shares, of_replicas, strict=True):
                is_owner = share.replica == self.analysis.replica_of(path)
                num_micro_batches = share.network_pass.num_micro_batches
                if is_owner or not replicas.sends_rows(spec, num_micro_batches):
                    whole.append(parts[path])
                else:
                    parts_of_rows.append(rows.of_touched(parts[path]))
            with tf.device(owner):
                total = in_order(whole) if whole else tf.zeros(spec.shape, spec.dtype)
                for numbers, values in parts_of_rows:
                    total = tf.tensor_scatter_nd_add(total, numbers, values)
            gradients[path] = total
        return gradients

    def outputs(self, runs: Sequence[PassRun], gradients: dict[str, tf.Tensor]) -> PassOutputs:
        """Join what the replicas' passes return."""
        parts = [run.outputs() for run in runs]
        nests = [part.collected.as_nest() for part in parts]
        added = []
        for same in zip(*map(tf.nest.flatten, nests), strict=True):
            with tf.device(same[0].device):
                added.append(in_order(same))
        collected = Collected()
        collected.update(tf.nest.pack_sequence_as(nests[0], added))
        outputs = {v: [value for p in parts for value in p.outputs[v]] for v in parts[0].outputs}
        return PassOutputs(collected, outputs, gradients)


class PassRun:
    """A replica's pass while its calls are issued: tensors so far, last call on each device.

    Attributes:
        executor: executor that runs it.
        share: what the replica computes.
        network_pass: table and cells.
        inputs: inputs of the pass.
        devices: name of each cell's device.
        values: micro-batch → version that a cell makes → nest.
        value_gradients: micro-batch → version → for each cell that reads it, the gradients of its
            floating leaves.
        collected: (cell, micro-batch) → what its forward collected.
        held: (cell, micro-batch) → what a kept forward, an R or an I left for the next slot.
        accumulators: for each cell and weight, the sum of its gradients so far.
        slot: the slot whose call was issued last; None before the first.
        times: notes when the slots of all replicas run; None: that is not noted.
    """

    def __init__(
        self, executor: Executor, share: Share, following: progress.PassProgress | None = None
    ) -> None:
        """Start.

        Args:
            executor: see the class.
            share: see the class.
            following: follows the progress of all replicas; None: it is not followed.
        """
        self.executor = executor
        self.share = share
        self.network_pass = share.network_pass
        self.inputs = share.inputs
        self.devices = executor.devices[share.replica]
        self.values = collections.defaultdict[int, dict[int, Nest]](dict)
        self.value_gradients = collections.defaultdict[int, dict[int, list[list[tf.Tensor]]]](dict)
        self.collected: dict[tuple[int, int], Collected] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.accumulators: list[list[tf.Tensor]] = []
        self.slot: Slot | None = None
        self.times: stamps.PassStamps | None = None
        imports = (cell.imports for cell in self.network_pass.cells)
        readers = zip(self.devices, imports, strict=True)
        self._cut = cell_calls.CutInputs(self.inputs.fields, self.inputs.seeds, readers)
        self._last_call: dict[int, tf.Operation] = {}
        self._progress = following
        num_devices = self.network_pass.table.num_devices
        self._first_device = share.replica * num_devices
        if following is not None:
            self._last_call = {
                device: following.start(self._first_device + device)
                for device in range(num_devices)
            }

    def forward(self) -> None:
        """Issue the calls of a table that has only forward slots."""
        for device, slot in self.network_pass.table.order():
            with self.call(device, slot) as call:
                call.forward()

    def train(self) -> None:
        """Issue the calls of a table of training."""
        self.start_accumulators()
        order = self.network_pass.table.order()
        last = {slot.micro_batch: number for number, (_, slot) in enumerate(order)}
        for number, (device, slot) in enumerate(order):
            with self.call(device, slot) as call:
                call.train()
            if number == last[slot.micro_batch]:  # no cell reads its values: eager ones need memory
                values = self.values.pop(slot.micro_batch, {})
                leaving = self.network_pass.mode.leaving & values.keys()
                if leaving:
                    self.values[slot.micro_batch] = {v: values[v] for v in leaving}
                self.value_gradients.pop(slot.micro_batch, None)

    def start_accumulators(self) -> None:
        """Make zeros on each cell's device; an earlier sum is continued only at its owner.

        A single micro-batch that continues no sum needs none: its gradients are the sum.
        """
        given = self.inputs.accumulators
        if given is None and self.network_pass.num_micro_batches == 1:
            self.accumulators = [[] for _ in self.devices]
            return
        analysis = self.executor.analysis
        for cell, device in zip(self.network_pass.cells, self.devices, strict=True):
            sums = []
            for path in cell.weights:
                is_owner = analysis.replica_of(path) == self.share.replica
                if given is not None and is_owner and analysis.owner[path] in cell.layers:
                    sums.append(given[path])
                else:
                    spec = analysis.variables[path]
                    with tf.device(device):
                        sums.append(tf.zeros(spec.shape, spec.dtype))
            self.accumulators.append(sums)

    @contextlib.contextmanager
    def call(self, device: int, slot: Slot) -> Iterator[_SlotCall]:
        """Issue a slot's call on its device, after the device's last call."""
        self.slot = slot
        before = [self._last_call[device]] if device in self._last_call else []
        with tf.device(self.devices[slot.cell]), tf.control_dependencies(before):
            call = _SlotCall(self, slot)
            yield call
        if call.result is not None and not tf.executing_eagerly():
            self._last_call[device] = call.result.op
            number = self.share.first_micro_batch + slot.micro_batch
            in_mini_batch = dataclasses.replace(slot, micro_batch=number)
            of_all = self._first_device + device
            if self._progress is not None:
                self._progress.returned(of_all, in_mini_batch, call.result.op)
            if self.times is not None:
                with tf.device(self.devices[slot.cell]):
                    noted = self.times.returned(of_all, in_mini_batch, call.result.op)
                self._last_call[device] = noted

    @contextlib.contextmanager
    def begun(self, slot: Slot, *inputs: Nest) -> Iterator[None]:
        """Issue the program of a slot in the `with` block, once these inputs are on its device."""
        if self.times is None or tf.executing_eagerly():
            yield
            return
        device = self._first_device + self.network_pass.table.device_of(slot.cell)
        noted = self.times.start(device, tf.nest.flatten(inputs))
        with tf.control_dependencies([noted]):
            yield

    def cell_inputs(self, k: int, m: int) -> cell_calls.CellInputs:
        """Return the arguments of all programs of cell k for micro-batch m."""
        cell, device = self.network_pass.cells[k], self.devices[k]
        fields = self._cut.fields(device, m)
        return cell_calls.CellInputs(
            weights=[self.inputs.variables[path] for path in cell.weights],
            untrained=[self.inputs.variables[path] for path in cell.untrained],
            imports={v: fields[v] if v in fields else self.values[m][v] for v in cell.imports},
            seed=self._cut.seed(device, m),
            step=self.inputs.step,
        )

    def backward_inputs(self, k: int, m: int) -> cell_calls.BackwardInputs:
        """Return what a backward program of cell k is called with in addition to `cell_inputs`."""
        cell = self.network_pass.cells[k]
        return cell_calls.BackwardInputs(
            {v: self._added_gradients(v, m) for v in cell.exports_with_gradient},
            [self.inputs.loss_factors[loss.name] for loss in cell.losses],
            self.accumulators[k],
        )

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

    def outputs(self) -> PassOutputs:
        """Sum what the micro-batches collected; without gradients."""
        micro_batches = range(self.network_pass.num_micro_batches)
        total = Collected()
        for k, device in enumerate(self.devices):
            nests = [self.collected[k, m].as_nest() for m in micro_batches]
            leaves = zip(*map(tf.nest.flatten, nests), strict=True)
            with tf.device(device):
                added = [in_order(same) for same in leaves]
            total.update(tf.nest.pack_sequence_as(nests[0], added))
        leaving, fields = sorted(self.network_pass.mode.leaving), self.inputs.fields
        made = {v: [self.values[m][v] for m in micro_batches] for v in leaving if v not in fields}
        outputs = {v: made[v] if v in made else fields.of_version(v) for v in leaving}
        return PassOutputs(total, outputs, {})

    def _added_gradients(self, version: int, micro_batch: int) -> list[tf.Tensor]:
        """Return the gradients of a version's leaves, summed over the cells that read it."""
        of_readers = self.value_gradients[micro_batch].get(version, [])
        if not of_readers:
            leaves = floating(self.values[micro_batch][version])
            return [tf.zeros_like(leaf) for leaf in leaves]
        return [in_order(same) for same in zip(*of_readers, strict=True)]


class _SlotCall:
    """The call of one slot; one of its methods issues it, if the slot computes anything.

    Attributes:
        result: a tensor that the call returned, if any.
    """

    def __init__(self, run: PassRun, slot: Slot) -> None:
        self.result: tf.Tensor | None = None
        self._run = run
        self._slot = slot
        self._key = slot.cell, slot.micro_batch
        self._cell = run.network_pass.cells[slot.cell]
        self._programs = run.executor.programs[slot.cell]

    def train(self) -> None:
        """Run what the slot computes in training, if anything."""
        cell, phase, m = self._cell, self._slot.phase, self._slot.micro_batch
        if phase == "F" and m in cell.fused:
            self.fused()
        elif phase == "F" and m in cell.kept:
            self.kept_forward()
        elif phase == "F":
            self.forward()
        elif phase == "R":
            if m in cell.early:
                self.recompute()
        elif m not in cell.fused and cell.computes(phase):
            self.backward()

    def forward(self) -> None:
        """Run the forward program."""
        inputs = self._run.cell_inputs(*self._key)
        with self._run.begun(self._slot, inputs.imports):
            outputs = self._programs.forward(self._cell, inputs)
        self.store_outputs(outputs)

    def fused(self) -> None:
        """Run forward and backward as one program."""
        inputs, upstream = self._run.cell_inputs(*self._key), self._run.backward_inputs(*self._key)
        with self._run.begun(self._slot, inputs.imports, upstream.exports):
            outputs, gradients = self._programs.fused(self._cell, inputs, upstream)
        self.store_outputs(outputs)
        self._store_gradients(gradients)

    def kept_forward(self) -> None:
        """Run the forward program that keeps what its backward reads."""
        inputs = self._run.cell_inputs(*self._key)
        with self._run.begun(self._slot, inputs.imports):
            outputs, held = self._programs.keep(self._cell, inputs)
        self._run.held[self._key] = held
        self.store_outputs(outputs)

    def recompute(self) -> None:
        """Run the program that computes again what the backward reads of the forward."""
        inputs = self._run.cell_inputs(*self._key)
        with self._run.begun(self._slot, inputs.imports):
            held = self._programs.recompute(self._cell, inputs)
        self._run.held[self._key] = held
        self._note_result(held)

    def backward(self) -> None:
        """Run a backward, from what is held for it, if anything; otherwise recompute it."""
        run, phase = self._run, self._slot.phase
        inputs, upstream = run.cell_inputs(*self._key), run.backward_inputs(*self._key)
        held = run.held.pop(self._key, None)
        with run.begun(self._slot, upstream.exports):
            gradients = self._programs.backward(self._cell, inputs, upstream, phase, held)
        if phase == "I":
            run.held[self._key] = gradients.left
        self._store_gradients(gradients)

    def store_outputs(self, outputs: cell_calls.CellOutputs) -> None:
        """Store what a forward call returned, for the cells that read it."""
        for v, value in outputs.exports.items():
            self._run.values[self._slot.micro_batch][v] = value
        self._run.collected[self._key] = outputs.collected
        self._note_result(outputs.as_nest())

    def _store_gradients(self, gradients: cell_calls.CellGradients) -> None:
        for v, leaves in gradients.imports.items():
            self._run.value_gradients[self._slot.micro_batch].setdefault(v, []).append(leaves)
        if gradients.weights:
            self._run.accumulators[self._slot.cell] = gradients.weights
        self._note_result((gradients.imports, gradients.weights))

    def _note_result(self, nest: Nest) -> None:
        self.result = next(iter(tf.nest.flatten(nest)), self.result)
