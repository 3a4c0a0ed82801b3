"""Running a mini-batch: it is cut into micro-batches, run, and its outputs are merged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, network, precision, seeds
from lingvo_gpipe.execution import custom_gradient, failures, variables
from lingvo_gpipe.execution.executor import Executor, PassInputs, PassOutputs, PassRun, Share
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.network import micro_batches, replicas
from lingvo_gpipe.network.cut_fields import CutFields


class MiniBatchInputs(NamedTuple):
    """Inputs for running a mini-batch; a nest, so that it can be an argument of a tf.function.

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
    first_micro_batch: tf.Tensor
    accumulators: dict[str, tf.Tensor] | None = None
    loss_scale: tf.Tensor | None = None


class MiniBatchResult(NamedTuple):
    """Results of a mini-batch: the fields of `pipelining.Result` that are tensors."""

    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    sums: dict[str, Nest]
    gradients: dict[str, tf.Tensor]
    moments: dict[str, Nest]
    outputs: dict[str, Nest]


class MiniBatchRunner:
    """Runs mini-batches of any size through a built network.

    Attributes:
        executor: runs the passes of the network.
        variables: variables of the network.
    """

    def __init__(self, executor: Executor, created: variables.PipelineVariables) -> None:
        self.executor = executor
        self.variables = created
        self._analysis = executor.analysis
        self._params = executor.analysis.params
        self._warnings_left = 10  # the last mini-batch of every evaluation may be smaller

    def num_micro_batches(self, *parts: Mapping[str, Nest]) -> int:
        """Return M for a mini-batch; log if it is less than the Params set."""
        sizes, wanted = self._sizes(parts), self._params.num_micro_batches
        lowered = self._params.micro_batch_size is None and len(sizes) < wanted
        if lowered and self._warnings_left > 0:
            self._warnings_left -= 1
            logging.warning(
                "a mini-batch of %d examples lowers the number of micro-batches from %d to %d",
                sum(sizes),
                wanted,
                len(sizes),
            )
        return len(sizes)

    def checked(self, *parts: dict[str, Nest]) -> tuple[dict[str, Nest], ...]:
        """Refuse labels and ids that no layer takes (`check_values`); return the parts to run.

        In a caller's function values are not known yet. Where a cell is on an accelerator, using
        the returned fields fails in the step; on CPUs, TensorFlow's kernels fail.

        Raises:
            InputError: a value that no layer takes, outside of a caller's function.
        """
        if not self._params.check_values:
            return parts
        if not tf.inside_function():
            self._analysis.check_values(*parts)
        elif not all(":CPU:" in name for names in self.executor.devices for name in names):
            devices = self.executor.input_devices or ("CPU:0",) * len(parts)
            return tuple(
                self._analysis.asserted_values(fields, device)
                for fields, device in zip(parts, devices[: len(parts)], strict=True)
            )
        return parts

    def train(self, inputs: MiniBatchInputs, *, outputs: bool = False) -> MiniBatchResult:
        """Run the table of training: losses inside, gradients of all weights.

        Args:
            inputs: the mini-batch.
            outputs: whether to return the network's outputs, too.

        Raises:
            LayerError: the network has no loss.
            ScheduleError: the table has no backward slots.
        """
        pass_outputs = self.executor.train(self._training(inputs, outputs=outputs))
        return self._result(pass_outputs, inputs.loss_weights)

    def _training(self, inputs: MiniBatchInputs, *, outputs: bool = False) -> list[Share]:
        """Return what each replica computes in training; see `train`."""
        if not self._analysis.losses:
            raise errors.LayerError(
                "the network has no loss, so nothing would be trained. End it with a layer that "
                "adds a loss (Softmax, MeanSquaredError), or use fprop under your own tape"
            )
        if self._analysis.table.is_forward_only:
            raise errors.ScheduleError(
                "the schedule has only forward slots, so nothing would be trained. Use a name "
                "such as 1f1b; evaluate() makes its own schedule"
            )
        coefficients = self._coefficients()
        loss_factors = {
            name: tf.math.divide_no_nan(tf.constant(coefficients[name], weight.dtype), weight)
            for name, weight in inputs.loss_weights.items()
        }
        if inputs.loss_scale is not None:
            loss_factors = {
                name: scale * tf.cast(inputs.loss_scale, scale.dtype)
                for name, scale in loss_factors.items()
            }
        pass_inputs = dataclasses.replace(
            self.pass_inputs(inputs),
            loss_factors=loss_factors,
            accumulators=inputs.accumulators,
        )
        return self._shares(
            pass_inputs, functools.partial(self._analysis.training_pass, outputs=outputs)
        )

    def _shares(self, inputs: PassInputs, pass_of: Callable[[int], network.Pass]) -> list[Share]:
        """Return what each replica computes; those without micro-batches are left out.

        Args:
            inputs: inputs of all micro-batches.
            pass_of: number of micro-batches → the pass.
        """
        shares = []
        for replica, own in enumerate(self._computed(len(inputs.seeds))):
            part = dataclasses.replace(
                inputs,
                fields=inputs.fields.piece(replica),
                seeds=inputs.seeds[own.start : own.stop],
            )
            shares.append(Share(replica, own.start, len(inputs.seeds), pass_of(len(own)), part))
        return shares

    def _computed(self, num_micro_batches: int) -> list[range]:
        """Return the micro-batches of each replica that has any."""
        shares = replicas.shares(num_micro_batches, self._params.num_replicas)
        return [own for own in shares if own]

    def evaluate(self, inputs: MiniBatchInputs, *, outputs: bool) -> MiniBatchResult:
        """Run only forward slots, as in evaluation: no dropout, moving statistics.

        Args:
            inputs: the mini-batch.
            outputs: whether to return the network's outputs.
        """
        pass_outputs = self.executor.forward(self._evaluation(inputs, outputs=outputs))
        return self._result(pass_outputs, inputs.loss_weights)

    def _evaluation(self, inputs: MiniBatchInputs, *, outputs: bool) -> list[Share]:
        """Return what each replica computes in evaluation; see `evaluate`."""
        pass_of = functools.partial(self._analysis.evaluation_pass, outputs=outputs)
        return self._shares(self.pass_inputs(inputs), pass_of)

    def explain(
        self,
        inputs: MiniBatchInputs,
        error: tf.errors.OpError,
        *,
        training: bool,
        place: tuple[int, int | None] = (0, None),
    ) -> errors.UserError:
        """Return the cause of an error: the mini-batch is checked, then run again, slot by slot.

        Args:
            inputs: the mini-batch of the step that failed.
            error: what the step raised.
            training: whether it was a step of training, or an evaluation.
            place: number of its first micro-batch in the whole mini-batch, and how many that has;
                None: it is the whole one.
        """
        try:
            self._analysis.check_values(*inputs.fields)
        except errors.InputError as at_fault:
            return at_fault
        first, num = place
        num = len(self._sizes(inputs.fields)) if num is None else num
        if training:
            shares, issue = self._training(inputs), PassRun.train
        else:
            shares, issue = self._evaluation(inputs, outputs=True), PassRun.forward
        failure = failures.first_failure(self.executor, shares, issue)
        if failure is not None:
            number = first + failure.slot.micro_batch
            slot = dataclasses.replace(failure.slot, micro_batch=number)
            failure = dataclasses.replace(failure, slot=slot)
        return failures.to_error(self._analysis, failure, error, num)

    def under_tape(
        self, fields: dict[str, Nest], weights: Mapping[str, tf.Tensor], ctx: Context
    ) -> tuple[dict[str, Nest], Collected]:
        """Run forward slots, each differentiable by the caller's tape.

        Args:
            fields: all fields of the mini-batch.
            weights: path → every variable's value.
            ctx: context of the call; its seed is that of the run.

        Returns:
            Name → output of the network, and what the layers collected.
        """
        num_micro_batches = self.num_micro_batches(fields)
        read = variables.in_read_dtypes(self.executor, weights)
        cut = self._cut((fields,))
        micro_batch_seeds = [
            seeds.micro_batch_seed(ctx.root_seed, ctx.step, m) for m in range(num_micro_batches)
        ]
        pass_of = functools.partial(self._analysis.tape_pass, training=ctx.training)
        shares = self._shares(PassInputs(read, cut, micro_batch_seeds, ctx.step), pass_of)
        outputs = custom_gradient.forward(self.executor, shares)
        return self._merged(outputs), outputs.collected

    def pass_inputs(self, inputs: MiniBatchInputs) -> PassInputs:
        """Cut a mini-batch into micro-batches, and read every variable once."""
        cut = self._cut(inputs.fields)
        base_seed = seeds.base_seed(self._params.seed)
        return PassInputs(
            variables=variables.read_variables(self.executor, self.variables.by_path),
            fields=cut,
            seeds=[
                seeds.micro_batch_seed(base_seed, inputs.step, inputs.first_micro_batch + m)
                for m in range(len(self._sizes(inputs.fields)))
            ],
            step=inputs.step,
        )

    def _num_examples(self, fields: Mapping[str, Nest]) -> int:
        params = self._params
        return micro_batches.batch_size(fields, params.batch_dim, params.unbatched)

    def _sizes(self, parts: Sequence[Mapping[str, Nest]]) -> tuple[int, ...]:
        return micro_batches.sizes_of(self._params, *parts)

    def _cut(self, parts: Sequence[Mapping[str, Nest]]) -> CutFields:
        """Return the fields of the micro-batches, a piece for each replica that has any."""
        analysis, batch_dim = self._analysis, self._params.batch_dim
        sizes = self._sizes(parts)
        of_replicas = [sizes[own.start : own.stop] for own in self._computed(len(sizes))]
        expected = [sum(of_replica) for of_replica in of_replicas]
        found_sizes = [self._num_examples(fields) for fields in parts]
        if len(parts) > 1 and found_sizes != expected:
            raise errors.InputError(
                f"the parts of the mini-batch have {found_sizes} examples, but those of the "
                f"replicas' micro-batches are {expected}. Cut it by network.parts.Part"
            )
        unbatched = {analysis.wiring.fields[name] for name in self._params.unbatched}
        pieces: list[dict[int, Nest]] = []
        for number, fields in enumerate(parts):
            with self.executor.beside_input(number):
                read = read_fields(analysis, fields)
                if len(parts) > 1:
                    pieces.append(read)
                else:
                    whole = CutFields([read], [expected], batch_dim, unbatched)
                    of_fields = {v: whole.of_version(v) for v in read}
                    pieces += [
                        {v: cut[piece] for v, cut in of_fields.items()}
                        for piece in range(len(expected))
                    ]
        return CutFields(pieces, of_replicas, batch_dim, unbatched)

    def _coefficients(self) -> dict[str, float]:
        return {loss.name: loss.coefficient for loss in self._analysis.losses}

    def _result(
        self, outputs: PassOutputs, loss_weights: Mapping[str, tf.Tensor]
    ) -> MiniBatchResult:
        master = self._params.policy.variable
        collected = outputs.collected
        means = {
            name: tf.math.divide_no_nan(tf.cast(collected.losses[name], weight.dtype), weight)
            for name, weight in loss_weights.items()
            if name in collected.losses  # an auxiliary head has no loss in evaluation
        }
        coefficients = self._coefficients()
        parts = [tf.constant(coefficients[name], master) * mean for name, mean in means.items()]
        return MiniBatchResult(
            loss=in_order(parts) if parts else tf.zeros([], master),
            losses=means,
            sums=collected.sums,
            gradients=outputs.gradients,
            moments=collected.moments,
            outputs=self._merged(outputs),
        )

    def _merged(self, outputs: PassOutputs) -> dict[str, Nest]:
        """Join the micro-batches' outputs; one that depends on no batched field is whole already.

        Raises:
            LayerError: an output has no batch dimension along which it can be merged.
        """
        analysis, batch_dim = self._analysis, self._params.batch_dim
        whole = analysis.wiring.made_of(self._params.unbatched)
        merged = {}
        for name, v in analysis.wiring.outputs.items():
            if v not in outputs.outputs:
                continue  # not requested
            parts = outputs.outputs[v]
            if v in whole:
                merged[name] = parts[0]
                continue
            if len(parts) > 1:
                micro_batches.check_batched(name, analysis.specs[v], max(analysis.sizes), batch_dim)
            with tf.device(self.executor.device_of_version(v)):
                merged[name] = micro_batches.merge(parts, batch_dim)
        return merged


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
