"""The executor: a mini-batch goes in, losses, gradients and outputs come out.

`Executor.train` and `Executor.evaluate` cut a mini-batch into micro-batches and share these out to
the replicas of the pipeline. What a replica computes is a `ReplicaPass`.

All of this happens while an outer function is traced. The graph that it adds grows with cells ×
micro-batches, not with layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, network, packing, precision, seeds
from lingvo_gpipe.execution import monitoring
from lingvo_gpipe.execution.cell_programs import (
    CellPrograms,
)
from lingvo_gpipe.execution.replica_pass import ReplicaPass
from lingvo_gpipe.execution.variables import PipelineVariables
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import micro_batches, replicas, value_ranges
from lingvo_gpipe.network.wiring import FIELD


class MiniBatch(NamedTuple):
    """A mini-batch and its place in an update; a nest, so that functions of tensors can take it.

    Attributes:
        fields: all fields of the mini-batch, name → nest of tensors [N, …]; one dictionary, or one
            for the examples of each replica (see `network.parts`).
        step: int64 scalar, number of the update.
        loss_weights: loss name → its weight in the whole update.
        first_micro_batch: int32 scalar, number of the first micro-batch in the update.
        accumulators: path → tensor to which the gradient is added; None: zeros.
        loss_scale: scalar factor on the gradients; None: 1.
    """

    fields: tuple[dict[str, Nest], ...]
    step: tf.Tensor
    loss_weights: dict[str, tf.Tensor]
    first_micro_batch: int | tf.Tensor = 0
    accumulators: dict[str, tf.Tensor] | None = None
    loss_scale: tf.Tensor | None = None


class Result(NamedTuple):
    """What a pass over a mini-batch returns.

    Attributes:
        loss: scalar, the update's loss: Σ coefficient · Σ sum / Σ weight.
        losses: loss name → its weighted mean, a scalar.
        sums: metric name → nest of tensors, added over all examples.
        gradients: path → gradient of `loss` (× `loss_scale`, if there is one), in the master dtype.
        moments: layer path → additive statistics, for `PipeliningLayer.merge_moments`.
        outputs: name → nest, the micro-batches put together again.
        num_micro_batches: how many the mini-batch was cut into.
    """

    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    sums: dict[str, Nest]
    gradients: dict[str, tf.Tensor]
    moments: dict[str, Nest]
    outputs: dict[str, Nest]
    num_micro_batches: int


class Executor:
    """Runs mini-batches of any size through cells that are placed on devices.

    Attributes:
        analysis: analysis of the network.
        devices: for each replica, the name of each cell's device.
        programs: programs of each cell.
        variables: variables of the network.
        progress: how far each device is in the pass that runs; None: it is not followed.
        stamps: when each slot of a pass of training runs; None: that is not noted.
        input_devices: device that holds each part of the mini-batches; empty: that of the process
            that calls. Set it before a pass is traced.
    """

    def __init__(
        self,
        analysis: network.Analysis,
        layers: Sequence[base.Layer],
        devices: Sequence[Sequence[str]],
        compiled: Sequence[bool],
        existing: Mapping[str, packing.Variable] | None = None,
    ) -> None:
        """Create the variables; programs are traced later.

        Args:
            analysis: see the class.
            layers: all layers of the network, instantiated.
            devices: see the class.
            compiled: for each cell, whether XLA compiles its programs.
            existing: path → variable that is used as it is, where it lies.
        """
        self.analysis = analysis
        self.devices = [list(of_replica) for of_replica in devices]
        self.programs = [
            CellPrograms(cell.index, analysis, layers, jit)
            for cell, jit in zip(analysis.cells, compiled, strict=True)
        ]
        self.variables = PipelineVariables(analysis, self.device_of, existing)
        self.progress: monitoring.DeviceProgress | None = None
        self.stamps: monitoring.Stamps | None = None
        self.input_devices: tuple[str, ...] = ()
        self._params = analysis.params
        self._has_warned = False  # the last mini-batch of every epoch may be smaller

    def train(self, batch: MiniBatch, *, outputs: bool = False) -> Result:
        """Run the table of training: losses inside, gradients of all weights.

        Args:
            batch: the mini-batch.
            outputs: whether to return the network's outputs, too.

        Raises:
            LayerError: the network has no loss.
            ScheduleError: the table has no backward slots.
        """
        passes = self.training_passes(batch, outputs=outputs)
        times = None
        if self.stamps is not None and not tf.executing_eagerly():
            times = self.stamps.new_pass()
        for replica_pass in passes:
            replica_pass.times = times
            replica_pass.run()
        if times is not None:
            times.finish()
        return self._result(passes, batch.loss_weights, self.gradients(passes))

    def evaluate(self, batch: MiniBatch, *, outputs: bool) -> Result:
        """Run only forward slots, as in evaluation: no dropout, moving statistics.

        Args:
            batch: the mini-batch.
            outputs: whether to return the network's outputs.
        """
        passes = self.evaluation_passes(batch, outputs=outputs)
        for replica_pass in passes:
            replica_pass.run()
        return self._result(passes, batch.loss_weights, {})

    def training_passes(self, batch: MiniBatch, *, outputs: bool = False) -> list[ReplicaPass]:
        """Return what each replica computes in training; see `train`."""
        if not self.analysis.losses:
            raise errors.LayerError(
                "the network has no loss, so nothing would be trained. End it with a layer that "
                "adds a loss (Softmax, MeanSquaredError), or use fprop under your own tape"
            )
        if self.analysis.table.is_forward_only:
            raise errors.ScheduleError(
                "the schedule has only forward slots, so nothing would be trained. Use a name "
                "such as 1f1b; evaluate() makes its own schedule"
            )
        coefficients = self._coefficients()
        loss_factors = {
            name: tf.math.divide_no_nan(tf.constant(coefficients[name], weight.dtype), weight)
            for name, weight in batch.loss_weights.items()
        }
        if batch.loss_scale is not None:
            loss_factors = {
                name: factor * tf.cast(batch.loss_scale, factor.dtype)
                for name, factor in loss_factors.items()
            }
        pass_of = functools.partial(self.analysis.training_pass, outputs=outputs)
        return self.passes(batch, pass_of, loss_factors=loss_factors)

    def evaluation_passes(self, batch: MiniBatch, *, outputs: bool) -> list[ReplicaPass]:
        """Return what each replica computes in evaluation; see `evaluate`."""
        return self.passes(batch, functools.partial(self.analysis.evaluation_pass, outputs=outputs))

    def passes(
        self,
        batch: MiniBatch,
        pass_of: Callable[[int], network.Pass],
        *,
        variables: Mapping[str, tf.Tensor] | None = None,
        seed: tf.Tensor | None = None,
        loss_factors: Mapping[str, tf.Tensor] | None = None,
    ) -> list[ReplicaPass]:
        """Return what each replica computes; replicas without micro-batches are left out.

        Args:
            batch: the mini-batch.
            pass_of: number of micro-batches → table and cells.
            variables: see `ReplicaPass`; None: they are read, each once.
            seed: int32 [2], seed of the run; None: that of the Params.
            loss_factors: see `ReplicaPass`; None: nothing is trained.
        """
        sizes = micro_batches.sizes_of(self._params, *batch.fields)
        self.analysis.check_division(len(sizes))
        shares = tuple(filter(None, replicas.shares(len(sizes), self._params.num_replicas)))
        sizes_of = [sizes[share.start : share.stop] for share in shares]
        fields = self._fields(batch.fields, sizes_of)
        if variables is None:
            variables = self.variables.read()
        if seed is None:
            seed = seeds.base_seed(self._params.seed)
        following = None
        if self.progress is not None and not tf.executing_eagerly():
            following = self.progress.new_pass()
        return [
            ReplicaPass(
                executor=self,
                replica=replica,
                micro_batches=share,
                num_micro_batches=len(sizes),
                network_pass=pass_of(len(share)),
                fields=fields[replica],
                sizes=sizes_of[replica],
                seeds=[
                    seeds.micro_batch_seed(seed, batch.step, batch.first_micro_batch + m)
                    for m in share
                ],
                step=batch.step,
                variables=variables,
                loss_factors=loss_factors or {},
                earlier_gradients=batch.accumulators,
                following=following,
            )
            for replica, share in enumerate(shares)
        ]

    def _fields(
        self, parts: Sequence[Mapping[str, Nest]], sizes: Sequence[Sequence[int]]
    ) -> list[dict[int, Nest]]:
        """Return the fields of each replica that has micro-batches, version → nest.

        Args:
            parts: parts of the mini-batch.
            sizes: for each of these replicas, how many examples each of its micro-batches holds.
        """
        expected = [sum(of_replica) for of_replica in sizes]
        examples = [micro_batches.batch_size(part) for part in parts]
        if len(parts) > 1 and examples != expected:
            raise errors.InputError(
                f"the parts of the mini-batch have {examples} examples, but those of the "
                f"replicas' micro-batches are {expected}. Cut it by network.parts.ReplicaPart"
            )
        of_replicas: list[dict[int, Nest]] = []
        for number, part in enumerate(parts):
            with self.on_input_device(number):
                fields = read_fields(self.analysis, part)
                if len(parts) > 1:
                    of_replicas.append(fields)
                else:
                    cut = {v: micro_batches.split(value, expected) for v, value in fields.items()}
                    of_replicas += [
                        {v: values[replica] for v, values in cut.items()}
                        for replica in range(len(expected))
                    ]
        return of_replicas

    def _result(
        self,
        passes: Sequence[ReplicaPass],
        loss_weights: Mapping[str, tf.Tensor],
        gradients: dict[str, tf.Tensor],
    ) -> Result:
        master = self._params.policy.variable
        collected = self.collected(passes)
        means = {
            name: tf.math.divide_no_nan(tf.cast(collected.losses[name], weight.dtype), weight)
            for name, weight in loss_weights.items()
            if name in collected.losses  # an auxiliary head has no loss in evaluation
        }
        coefficients = self._coefficients()
        terms = [tf.constant(coefficients[name], master) * mean for name, mean in means.items()]
        return Result(
            loss=in_order(terms) if terms else tf.zeros([], master),
            losses=means,
            sums=collected.sums,
            gradients=gradients,
            moments=collected.moments,
            outputs=self.outputs(passes),
            num_micro_batches=passes[0].num_micro_batches,
        )

    def collected(self, passes: Sequence[ReplicaPass]) -> Collected:
        """Return what the layers collected, summed over micro-batches and replicas."""
        nests = [replica_pass.collected_sums().as_nest() for replica_pass in passes]
        added = []
        for same in zip(*map(tf.nest.flatten, nests), strict=True):
            with tf.device(same[0].device):
                added.append(in_order(same))
        return Collected(**tf.nest.pack_sequence_as(nests[0], added))

    def outputs(self, passes: Sequence[ReplicaPass]) -> dict[str, Nest]:
        """Join the micro-batches' outputs.

        Raises:
            LayerError: an output has no batch dimension along which it can be merged.
        """
        analysis = self.analysis
        merged = {}
        leaving = passes[0].network_pass.mode.leaving
        for name, v in analysis.wiring.outputs.items():
            if v not in leaving:
                continue
            values = [value for replica_pass in passes for value in replica_pass.values_of(v)]
            if len(values) > 1:
                micro_batches.check_batched(name, analysis.specs[v], max(analysis.sizes))
            with tf.device(self.device_of_version(v)):
                merged[name] = micro_batches.merge(values)
        return merged

    def gradients(self, passes: Sequence[ReplicaPass]) -> dict[str, tf.Tensor]:
        """Return each weight's gradient, added on its owner's device; rows where they are fewer."""
        of_replicas = [replica_pass.weight_gradients() for replica_pass in passes]
        earlier = passes[0].earlier_gradients or {}
        computing = {replica_pass.replica for replica_pass in passes}
        gradients = {}
        for path in of_replicas[0]:
            spec, owner = self.analysis.variables[path], self.device_of(path)
            whole, parts_of_rows = [], []
            if path in earlier and self.analysis.replica_of(path) not in computing:
                whole.append(earlier[path])  # no micro-batch of its owner continues the sum
            for replica_pass, of_replica in zip(passes, of_replicas, strict=True):
                is_owner = replica_pass.replica == self.analysis.replica_of(path)
                if is_owner or not replicas.sends_rows(spec, len(replica_pass.micro_batches)):
                    whole.append(of_replica[path])
                else:
                    parts_of_rows.append(_nonzero_rows(of_replica[path]))
            with tf.device(owner):
                total = in_order(whole) if whole else tf.zeros(spec.shape, spec.dtype)
                for numbers, values in parts_of_rows:
                    total = tf.tensor_scatter_nd_add(total, numbers, values)
            gradients[path] = total
        return gradients

    def _coefficients(self) -> dict[str, float]:
        return {loss.name: loss.coefficient for loss in self.analysis.losses}

    def num_micro_batches(self, *parts: Mapping[str, Nest]) -> int:
        """Return M for a mini-batch; log the first time that it is less than the Params set."""
        sizes, wanted = micro_batches.sizes_of(self._params, *parts), self._params.num_micro_batches
        if len(sizes) < wanted and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "a mini-batch of %d examples lowers the number of micro-batches from %d to %d",
                sum(sizes),
                wanted,
                len(sizes),
            )
        return len(sizes)

    def checked(self, *parts: dict[str, Nest]) -> tuple[dict[str, Nest], ...]:
        """Refuse labels and ids that no layer takes; return the parts to run.

        In a caller's function values are not known yet: there, using the returned fields fails in
        the step. (Kernels on GPUs would read zeros, and so would slices of a table on CPUs.)

        Raises:
            InputError: a value that no layer takes, outside of a caller's function.
        """
        if tf.inside_function():
            devices = self.input_devices or ("CPU:0",) * len(parts)
            return tuple(
                value_ranges.asserted(self.analysis.field_ranges, fields, device)
                for fields, device in zip(parts, devices[: len(parts)], strict=True)
            )
        self.analysis.check_values(*parts)
        return parts

    def device_of(self, path: str) -> str:
        """Return the device of the variable at `path`: that of its owner's cell."""
        return self.devices[self.analysis.replica_of(path)][self.analysis.owner_cell(path)]

    def device_of_version(self, version: int, replica: int = 0) -> str | None:
        """Return the device of the cell that makes a version; None: it is a field."""
        cell = self.analysis.source(version)
        return None if cell == FIELD else self.devices[replica][cell]

    @contextlib.contextmanager
    def on_input_device(self, part: int = 0) -> Iterator[None]:
        """Place operations of the `with` block on the device that holds a part of the input."""
        if not self.input_devices:
            yield
        else:
            with tf.device(self.input_devices[part]):
                yield

    def follow_progress(self) -> monitoring.DeviceProgress:
        """Follow the progress of every pass that is traced from now on."""
        self.progress = monitoring.DeviceProgress(self._table_devices())
        return self.progress

    def note_times(self) -> monitoring.Stamps:
        """Note when the slots run of every pass of training that is traced from now on."""
        self.stamps = monitoring.Stamps(self._table_devices())
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


def read_fields(analysis: network.Analysis, fields: Mapping[str, Nest]) -> dict[int, Nest]:
    """Return every field that the network has, version → nest, in the dtypes of its specs."""
    return {
        version: tf.nest.map_structure(
            lambda leaf, spec: precision.cast(leaf, spec.dtype),
            fields[name],
            analysis.specs[version],
        )
        for name, version in analysis.wiring.fields.items()
    }


def _nonzero_rows(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return numbers [N, 1] and values of the rows that are not all zero, on the tensor's device.

    A row with an element that is not finite is one of them.
    """
    with tf.device(gradient.device):
        axes = list(range(1, gradient.shape.rank))
        numbers = tf.where(tf.reduce_any(tf.not_equal(gradient, 0), axis=axes))
        return numbers, tf.gather_nd(gradient, numbers)
