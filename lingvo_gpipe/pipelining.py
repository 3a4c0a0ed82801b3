"""PipeliningLayer: a sequence of layers that users build, train and call.

There are two ways to run it, by the same passes and cell programs: `value_and_gradients`, with the
losses inside, which the trainer uses; and `fprop` (or a plain call), a differentiable layer under
the caller's own `tf.GradientTape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, network, packing, seeds
from lingvo_gpipe.execution import custom_gradient, diagnosis, placement
from lingvo_gpipe.execution import variables as pipeline_variables
from lingvo_gpipe.execution.executor import Executor, MiniBatch
from lingvo_gpipe.execution.executor import Result as Result
from lingvo_gpipe.execution.outer_function import OuterFunction
from lingvo_gpipe.graphs.sums import in_order
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.network import batch_fields, host_order, parts, wiring

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_autograph(method: _Function) -> _Function:
    """Keep AutoGraph out of a method that is called in a caller's own tf.function."""
    without: _Function = tf.autograph.experimental.do_not_convert(method)
    return without


class PipeliningLayer(tf.Module, hyperparams.Configurable):
    """A sequence of layers, cut into K cells, run on M micro-batches by a schedule table.

    Whatever K, M and schedule: the gradients of the plain network. It is a `tf.Module`.

    >>> from lingvo_gpipe import layers
    >>> pipe = PipeliningLayer.Params(
    ...     layers=[layers.Dense.Params(units=8), layers.Dense.Params(units=2)],
    ...     num_micro_batches=2,
    ... ).instantiate()
    >>> pipe(tf.ones([4, 3])).shape
    TensorShape([4, 2])
    """

    class Params(network.PipelineParams):
        """Fields of a pipelined network."""

    def __init__(self, params: Params) -> None:
        """Make the layers; variables come with `build`, or with the first mini-batch."""
        tf.Module.__init__(self)
        self.params = params.copy().freeze()
        self.layers: list[base.Layer] = [p.instantiate() for p in network.layer_params(params)]
        self._functions = {
            (training, outputs): OuterFunction(functools.partial(self._compute, training, outputs))
            for training in (True, False)
            for outputs in (True, False)
        }
        self._variables: tf.Module | None = None  # for tf.Module to see
        self._executor: Executor | None = None

    def build(
        self,
        fields: Mapping[str, Nest | SpecNest],
        variables: Mapping[str, packing.Variable] | None = None,
    ) -> None:
        """Create the variables, each on the device of its cell.

        Args:
            fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.
            variables: path → variable of another pipeline, which this one shares.

        Raises:
            UserError: the network does not fit the fields or the devices.
        """
        if self._executor is not None:
            return
        specs = batch_fields.specs(fields)
        analysis = network.analyze(self.params, specs)
        num_devices, num_replicas = analysis.table.num_devices, self.params.num_replicas
        devices = placement.place(
            num_devices, self.params.placement, self.params.devices, num_replicas=num_replicas
        )
        if self.params.devices is None:
            order = host_order.of_network(analysis, placement.workers(devices))
            devices = tuple(devices[place] for place in order.places)
        on_tpu = any(":TPU:" in name for name in devices)
        self._executor = Executor(
            analysis,
            self.layers,
            devices=[
                [devices[r * num_devices + cell.device_number] for cell in analysis.cells]
                for r in range(num_replicas)
            ],
            compiled=[cell.compiled or on_tpu for cell in analysis.cells],
            existing=variables,
        )
        self._variables = self._executor.variables

    @property
    def analysis(self) -> network.Analysis:
        """The network as it was built.

        Raises:
            LayerError: it was not built.
        """
        return self.executor.analysis

    @property
    def executor(self) -> Executor:
        """Runs mini-batches through its cells.

        Raises:
            LayerError: it was not built.
        """
        if self._executor is None:
            raise errors.LayerError(
                "the pipeline has no variables yet. Call build(fields) first, or run a mini-batch"
            )
        return self._executor

    @property
    def by_path(self) -> dict[str, packing.Variable]:
        """Path → variable, all of them: weights, frozen weights and statistics."""
        return dict(self.executor.variables.by_path)

    @property
    def weights(self) -> dict[str, packing.Variable]:
        """Path → weight that is trained."""
        return self.executor.variables.where(lambda spec: spec.is_trained)

    @property
    def state(self) -> dict[str, packing.Variable]:
        """Path → statistic, such as a batch norm's moving mean."""
        return self.executor.variables.where(lambda spec: spec.is_state)

    @_without_autograph
    def loss_weights(self, batch: parts.Batch) -> dict[str, tf.Tensor]:
        """Return each loss's weight (examples, real tokens) in a mini-batch; they add up."""
        master = self.params.policy.variable
        weights: dict[str, list[tf.Tensor]] = {loss.name: [] for loss in self.analysis.losses}
        for number, fields in enumerate(self._fields(batch)):
            with self.executor.on_input_device(number):
                for loss in self.analysis.losses:
                    if not (number and loss.of_batch):
                        weights[loss.name].append(tf.cast(loss.weight(fields), master))
        with self.executor.on_input_device():
            return {name: in_order(added) for name, added in weights.items()}

    @_without_autograph
    def value_and_gradients(
        self,
        batch: parts.Batch,
        *,
        step: int | tf.Tensor = 0,
        loss_weights: Mapping[str, tf.Tensor] | None = None,
        first_micro_batch: int | tf.Tensor = 0,
        accumulators: Mapping[str, tf.Tensor] | None = None,
        loss_scale: tf.Tensor | None = None,
        outputs: bool = False,
    ) -> Result:
        """Run a mini-batch by the schedule: losses, gradients, metrics.

        Eagerly, or inside the caller's own tf.function, whose graph gets the calls.

        Args:
            batch: name → nest of tensors [N, …], all fields of the mini-batch; or the examples of
                each replica, as a tuple of such dictionaries.
            step: number of the update; randomness and schedules depend on it.
            loss_weights: loss name → its weight in the whole update, where that has several
                mini-batches; None: `self.loss_weights(batch)`.
            first_micro_batch: number of this mini-batch's first micro-batch in the update.
            accumulators: path → what gradients are added to.
            loss_scale: factor on the gradients, against underflow in float16.
            outputs: returns the network's outputs, too.
        """
        fields = self._fields(batch, training=True)
        dtype = self.params.policy.variable
        if accumulators is not None:
            accumulators = batch_fields.by_name("accumulators", accumulators, self.weights, dtype)
        if loss_weights is None:
            loss_weights = self.loss_weights(batch)
        losses = [loss.name for loss in self.analysis.losses]
        mini_batch = MiniBatch(
            fields,
            _step(step),
            batch_fields.by_name("loss_weights", loss_weights, losses, dtype),
            tf.convert_to_tensor(first_micro_batch, tf.int32),
            accumulators,
            None if loss_scale is None else tf.convert_to_tensor(loss_scale),
        )
        return self._run(mini_batch, training=True, outputs=outputs)

    @_without_autograph
    def evaluate(
        self, batch: parts.Batch, *, step: int | tf.Tensor = 0, outputs: bool = False
    ) -> Result:
        """Run a mini-batch of any size forward only, without training's randomness.

        Args:
            batch: as in `value_and_gradients`.
            step: as in `value_and_gradients`.
            outputs: returns the network's outputs too.
        """
        return self._run(self._mini_batch(batch, step), training=False, outputs=outputs)

    @_without_autograph
    def merge_moments(self, moments: Mapping[str, Nest]) -> dict[str, tf.Tensor]:
        """Return path → new value of each statistic of the layers that added moments.

        Args:
            moments: path of a layer → its moments, added up over an update.
        """
        layers = {layer.params.name: layer for layer in self.layers}
        return self.executor.variables.merge_moments(layers, moments)

    def add_moments(self, one: Mapping[str, Nest], other: Mapping[str, Nest]) -> dict[str, Nest]:
        """Add the moments of two mini-batches, each on the device of its layer."""
        return self.executor.variables.add_moments(one, other)

    def theta(self) -> dict[str, Nest]:
        """Return the weights as tensors, nested by layer; a tape sees the variables being read.

        Variables on workers are packed: a tape sees them only if it watches what this returns.
        """
        return self.executor.variables.read_nested(lambda spec: not spec.is_state)

    @_without_autograph
    def fprop(self, theta: dict[str, Nest], inputs: Nest, ctx: Context) -> Nest:
        """Compute the outputs, cell by cell in the table's order; differentiable, once.

        A tape gets gradients of `theta` and of the floating fields from floating outputs and from
        the losses in `ctx`. Second derivatives are refused with a `LayerError`.

        Args:
            theta: tensors nested by layer, as `theta()` returns them.
            inputs: the mini-batch: a dictionary of fields, or what the field `inputs` of the Params
                says; without it, the value of `x` alone.
            ctx: its `root_seed` is the run's; losses, sums and moments are collected into it,
                added up over micro-batches.

        Returns:
            The network's outputs, as the field `outputs` of the Params says.
        """
        if any(ctx.collected.as_nest().values()):
            raise errors.LayerError(
                "this context has collected losses, metrics or moments before, which would be "
                "lost. Use a new context for each call: context(training=...)"
            )
        (fields,) = self._fields(self._by_field(inputs))  # builds the pipeline
        (fields,) = self.executor.checked(fields)
        weights = {**pipeline_variables.flatten(theta), **pipeline_variables.flatten(ctx.state)}
        outputs, collected = custom_gradient.forward(self.executor, fields, weights, ctx)
        ctx.collected.update(collected.as_nest())
        structure = self.params.outputs
        if not isinstance(structure, tuple):
            return wiring.in_structure(structure, outputs)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    @_without_autograph
    def __call__(
        self, inputs: Nest, *, training: bool = False, step: int = 0, ctx: Context | None = None
    ) -> Nest:
        """Call `fprop` on the pipeline's own variables; gradients flow into them.

        Not where they are on workers; see `theta`.

        Args:
            inputs: as in `fprop`.
            training: whether dropout drops and batch norm uses its micro-batch.
            step: number of the update.
            ctx: a context of the caller's, to collect losses and moments; it has a `training` and a
                `step` of its own, and these are not read.
        """
        self.build(self._by_field(inputs))
        return self.fprop(self.theta(), inputs, ctx or self.context(training=training, step=step))

    def context(self, *, training: bool, step: int | tf.Tensor = 0) -> Context:
        """Return a new context for `fprop`: the run's seed, the present statistics."""
        return Context(
            training=training,
            step=_step(step),
            root_seed=seeds.base_seed(self.params.seed),
            state=self.executor.variables.read_nested(lambda spec: spec.is_state),
            path="",
            frozen=self.analysis.frozen_layers,
            collected=Collected(),
        )

    def first_nonfinite(
        self,
        batch: parts.Batch,
        *,
        step: int | tf.Tensor = 0,
        first_micro_batch: int = 0,
    ) -> str:
        """Run a mini-batch layer by layer and name where a value first stops being finite.

        Args:
            batch: the mini-batch.
            step: number of the update.
            first_micro_batch: number of its first micro-batch in the update, for the seeds.

        Returns:
            Such as "layer conv_1, output x, micro-batch 2"; or "nowhere".
        """
        mini_batch = self._mini_batch(batch, step, first_micro_batch)  # builds the pipeline
        place = diagnosis.first_nonfinite_value(self.executor.training_passes(mini_batch))
        if place != diagnosis.NOWHERE:
            return place
        first = tf.constant(first_micro_batch)
        gradients = self.value_and_gradients(batch, step=step, first_micro_batch=first).gradients
        return diagnosis.first_nonfinite_gradient(self.analysis, gradients)

    def explain(
        self,
        error: tf.errors.OpError,
        batch: parts.Batch,
        *,
        step: int | tf.Tensor = 0,
        first_micro_batch: int = 0,
    ) -> errors.UserError:
        """Return the cause of an error of a step: its layer, micro-batch, and the field at fault.

        A step over several devices raises what the error caused elsewhere, such as "RecvAsync is
        cancelled". The mini-batch is run again, slot by slot, to the first that fails.

        Args:
            error: what a step of training raised, such as in the caller's own tf.function.
            batch: mini-batch of the step.
            step: number of the update.
            first_micro_batch: number of its first micro-batch in the update, for the seeds.
        """
        return diagnosis.explain(
            self.executor,
            self._mini_batch(batch, step, first_micro_batch),
            error,
            training=True,
        )

    def _mini_batch(
        self, batch: parts.Batch, step: int | tf.Tensor, first_micro_batch: int = 0
    ) -> MiniBatch:
        """Return a mini-batch whose losses are divided by its own weights."""
        fields = self._fields(batch)
        first = tf.constant(first_micro_batch)
        return MiniBatch(fields, _step(step), self.loss_weights(batch), first)

    def _by_field(self, inputs: Nest) -> dict[str, Nest]:
        """Return the fields of a call: in the structure of `inputs` of the Params, or by name."""
        structure = self.params.inputs
        if structure == ():
            return inputs if isinstance(inputs, dict) else {"x": inputs}
        is_by_name = isinstance(inputs, dict) and inputs.keys() >= set(wiring.names(structure))
        return inputs if is_by_name else wiring.by_name(structure, inputs)

    def _fields(self, batch: parts.Batch, *, training: bool = False) -> tuple[dict[str, Nest], ...]:
        """Return the parts of a mini-batch as tensors; one that is whole builds the pipeline."""
        if isinstance(batch, Mapping) and not isinstance(batch, parts.InParts):
            self.build(batch)
        of_batch = batch_fields.mappings(parts.of_batch(batch))
        names, built = self.analysis.wiring.fields, self.analysis.fields if training else None
        return tuple(batch_fields.tensors(part, names, built) for part in of_batch)

    def _run(self, batch: MiniBatch, *, training: bool, outputs: bool) -> Result:
        """Run inside the caller's function, or in an outer function of these shapes."""
        count = self.executor.num_micro_batches(*batch.fields)
        batch = batch._replace(fields=self.executor.checked(*batch.fields))
        try:
            return Result._make((*self._functions[training, outputs](batch), count))
        except tf.errors.OpError as error:
            if tf.inside_function():
                raise
            raise diagnosis.explain(self.executor, batch, error, training=training) from error

    def _compute(self, training: bool, outputs: bool, batch: MiniBatch) -> tuple[Nest, ...]:
        """Return the fields of a `Result` that are tensors: all results of a function are."""
        run = self.executor.train if training else self.executor.evaluate
        return run(batch, outputs=outputs)[:-1]


def _step(step: int | tf.Tensor) -> tf.Tensor:
    """Return the number of an update as the int64 scalar that programs take."""
    return tf.cast(tf.convert_to_tensor(step, dtype_hint=tf.int64), tf.int64)
