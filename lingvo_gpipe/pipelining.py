"""PipeliningLayer: the builder that users meet.

Two doors lead to the same cell programs: `value_and_gradients`, with the losses inside and any
table, which the trainer uses; and `fprop` (or a plain call), a differentiable layer under the
user's own `tf.GradientTape`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf
from absl import logging

from lingvo_gpipe import errors, hyperparams, network, precision, seeds
from lingvo_gpipe.execution import (
    cell_programs,
    custom_gradient,
    nonfinite,
    outer_function,
    placement,
)
from lingvo_gpipe.execution.executor import (
    Executor,
    Feed,
    Outcome,
    field_versions,
    read_fields,
    read_weights,
)
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.context import Collected, Context
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.schedule import table

_Function = TypeVar("_Function", bound=Callable[..., Any])

_UNBUILT = "the pipeline has no variables yet. Call build(fields) first, or give it a mini-batch"


def _as_it_is(function: _Function) -> _Function:
    """Keep AutoGraph out of a method that is called in a caller's own tf.function."""
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a pass over a mini-batch gives.

    Attributes:
        loss: scalar, the update's loss: Σ coefficient · Σ sum / Σ weight.
        losses: loss name → its weighted mean, a scalar.
        sums: metric name → nest of tensors, added over all examples.
        gradients: path → gradient of `loss` (× `loss_scale`, if given), in the master dtype.
        moments: layer path → additive statistics, for `PipeliningLayer.merge_moments`.
        outputs: name → nest, the micro-batches put together again.
        num_micro_batches: how many the mini-batch was cut into.
    """

    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    sums: dict[str, Any]
    gradients: dict[str, tf.Tensor]
    moments: dict[str, Any]
    outputs: dict[str, Any]
    num_micro_batches: int


class PipeliningLayer(tf.Module, hyperparams.Configurable):
    """A sequence of layers, cut into K cells, run on M micro-batches by a schedule table.

    Whatever K, M and schedule: the gradients of the plain network.

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

    def __init__(self, params: Any) -> None:
        """Make the layers; variables come with `build`, or with the first mini-batch."""
        tf.Module.__init__(self)
        self.params = params.copy().freeze()
        self._named = network.layer_params(params)
        self.layers: list[base.Layer] = [own.instantiate() for own in self._named]
        self._trained = outer_function.OuterFunction(self._train)
        self._evaluated = {
            outputs: outer_function.OuterFunction(self._evaluation(outputs))
            for outputs in (False, True)
        }
        self._built: network.Analysis | None = None
        self._executor: Executor | None = None
        self._variables: dict[str, tf.Variable] = {}
        self._tables: dict[tuple[int, bool], table.Table] = {}

    # What it is made of.

    def build(self, fields: Mapping[str, Any]) -> None:
        """Create the variables, each on the device of its cell.

        Args:
            fields: the mini-batch, name → nest of tensors or `tf.TensorSpec`.

        Raises:
            UserError: the network does not fit the fields or the devices.
        """
        if self._built is not None:
            return
        analysis = network.analyze(self.params, _specs(fields))
        table = analysis.table
        where = placement.place(table.num_devices, self.params.placement, self.params.devices)
        jit = self.params.jit_compile or where.compile_all
        if jit:
            received = {v for route in analysis.routes for v in route.imports}
            placement.refuse_strings(
                {analysis.wiring.versions[v].name: analysis.specs[v] for v in sorted(received)}
            )
        the_cells = [
            cell_programs.Cell(k, analysis, self.layers, jit) for k in range(table.num_cells)
        ]
        devices = [where.devices[table.device_of(k)] for k in range(table.num_cells)]
        self._executor = Executor(analysis, the_cells, devices)
        self._built = analysis
        self._tables[table.num_micro_batches, False] = table
        for path, spec in analysis.variables.items():
            with tf.device(self._executor.device_of(path)):
                value = spec.initializer(
                    spec.shape, spec.dtype, seeds.variable_seed(self.params.seed, path)
                )
                self._variables[path] = tf.Variable(
                    value,
                    trainable=spec.is_trained,
                    name=path.replace("/", "."),
                )

    @property
    def analysis(self) -> network.Analysis:
        """The network as it was built.

        Raises:
            LayerError: it was not built.
        """
        if self._built is None:
            raise errors.LayerError(_UNBUILT)
        return self._built

    @property
    def executor(self) -> Executor:
        """What runs its tables."""
        if self._executor is None:
            raise errors.LayerError(_UNBUILT)
        return self._executor

    @property
    def specs(self) -> dict[str, base.VariableSpec]:
        """Path → spec of every variable."""
        return self.analysis.variables

    @property
    def by_path(self) -> dict[str, tf.Variable]:
        """Path → variable, all of them: weights, frozen weights and statistics."""
        return self._some(lambda _: True)

    @property
    def weights(self) -> dict[str, tf.Variable]:
        """Path → weight that is trained."""
        return self._some(lambda spec: spec.is_trained)

    @property
    def frozen_weights(self) -> dict[str, tf.Variable]:
        """Path → weight that is not trained."""
        return self._some(lambda spec: not spec.trainable and not spec.is_state)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """Path → statistic, such as a batch norm's moving mean."""
        return self._some(lambda spec: spec.is_state)

    def _some(self, wanted: Callable[[base.VariableSpec], bool]) -> dict[str, tf.Variable]:
        specs = self.specs
        return {path: v for path, v in self._variables.items() if wanted(specs[path])}

    @property
    def metrics(self) -> dict[str, base.MetricSpec]:
        """Metric name → how its sums become a result."""
        return self.analysis.metrics

    def device_of(self, path: str) -> str:
        """Return the device of the variable at `path`."""
        return self.executor.device_of(path)

    def layer_of(self, path: str) -> str:
        """Return the name of the layer that owns the variable at `path`."""
        return self.analysis.layers[self.analysis.owner[path]].name

    def trace_counts(self) -> dict[str, int]:
        """Return how many cell programs and outer functions were traced so far."""
        programs = sum(cell.traces for cell in self.executor.cells)
        functions = sum(one.traces for one in (self._trained, *self._evaluated.values()))
        return {"programs": programs, "functions": functions}

    # The door with the losses inside.

    @_as_it_is
    def loss_weights(self, batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Return each loss's weight (examples, real tokens) in a mini-batch; they add up."""
        fields = self._fields(batch)
        policy = precision.policy(self.params.dtype)
        return {
            loss.name: tf.cast(loss.weight(fields), policy.variable)
            for loss in self.analysis.losses
        }

    @_as_it_is
    def value_and_gradients(
        self,
        batch: Mapping[str, Any],
        *,
        step: int | tf.Tensor = 0,
        weights: Mapping[str, tf.Tensor] | None = None,
        first_micro_batch: int | tf.Tensor = 0,
        accumulators: Mapping[str, tf.Tensor] | None = None,
        loss_scale: tf.Tensor | None = None,
    ) -> Result:
        """Run a mini-batch by the schedule: losses, gradients, metrics.

        Eagerly, or inside the caller's own tf.function, whose graph gets the calls.

        Args:
            batch: name → nest of tensors [N, …], all fields of the mini-batch.
            step: number of the update; randomness and schedules depend on it.
            weights: loss weights of the whole update, where it has several mini-batches.
            first_micro_batch: number of this mini-batch's first micro-batch in the update.
            accumulators: path → what gradients are added to.
            loss_scale: factor on the gradients, against underflow in float16.
        """
        given = {
            "batch": self._fields(batch),
            "step": _step(step),
            "weights": dict(weights) if weights is not None else self.loss_weights(batch),
            "first": tf.convert_to_tensor(first_micro_batch, tf.int32),
        }
        if accumulators is not None:
            given["accumulators"] = dict(accumulators)
        if loss_scale is not None:
            given["scale"] = tf.convert_to_tensor(loss_scale)
        return self._call(self._trained, given)

    @_as_it_is
    def evaluate(
        self, batch: Mapping[str, Any], *, step: int | tf.Tensor = 0, outputs: bool = False
    ) -> Result:
        """Run a mini-batch of any size forward alone, without training's randomness.

        Args:
            batch: as in `value_and_gradients`.
            step: as in `value_and_gradients`.
            outputs: gives the network's outputs too.
        """
        given = {
            "batch": self._fields(batch),
            "step": _step(step),
            "weights": self.loss_weights(batch),
        }
        return self._call(self._evaluated[outputs], given)

    @_as_it_is
    def merge_moments(self, moments: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Return path → new value of every statistic, from an update's added-up moments."""
        known: dict[str, dict[str, tf.Variable]] = {}
        for path, variable in self.state.items():
            owner, _, name = path.rpartition("/")
            known.setdefault(owner, {})[name] = variable
        numbers = {layer.name: number for number, layer in enumerate(self._named)}
        values = {}
        for path, added in moments.items():
            top, _, rest = path.partition("/")
            layer, own = self.layers[numbers[top]].find(rest), known[path]
            with tf.device(self.device_of(f"{path}/{next(iter(own))}")):
                read = {name: tf.convert_to_tensor(variable) for name, variable in own.items()}
                for name, value in layer.merge_moments(read, added).items():
                    values[f"{path}/{name}"] = value
        return values

    def _fields(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mini-batch as tensors; the first one builds the pipeline.

        Raises:
            InputError: a field is missing.
        """
        self.build(batch)
        fields = field_versions(self.analysis.wiring)
        missing = sorted(set(fields) - set(batch))
        if missing:
            raise errors.InputError(
                f"the mini-batch has no field {missing[0]!r}, with which the pipeline was built; "
                f"it has {', '.join(sorted(batch)) or 'none'}. Give every field"
            )
        return {name: tf.nest.map_structure(tf.convert_to_tensor, v) for name, v in batch.items()}

    def _call(self, function: outer_function.OuterFunction, given: dict[str, Any]) -> Result:
        """Run inside the caller's function, or in an outer function of these shapes."""
        count = len(self._told_sizes(given["batch"]))
        return Result(**function(given), num_micro_batches=count)

    def _train(self, given: dict[str, Any]) -> dict[str, Any]:
        if not self.analysis.losses:
            raise errors.LayerError(
                "the network gives no loss, so that nothing would be trained. End it in a layer "
                "that gives one (Softmax, MeanSquaredError), or use fprop under your own tape"
            )
        sizes = self._sizes(given["batch"])
        table = self._table(len(sizes))
        if table.is_forward_only:
            raise errors.ScheduleError(
                "the schedule has forward slots alone, so that nothing would be trained. Use "
                "gpipe or 1f1b; evaluate() needs no schedule of its own"
            )
        weights, coefficients = given["weights"], self._coefficients()
        scales = {
            name: tf.math.divide_no_nan(tf.constant(coefficients[name], weight.dtype), weight)
            for name, weight in weights.items()
        }
        if "scale" in given:
            scales = {k: v * tf.cast(given["scale"], v.dtype) for k, v in scales.items()}
        outcome = self.executor.train(
            cell_programs.mode_for(self.analysis, training=True),
            table,
            self._feed(given["batch"], sizes, given["step"], given["first"]),
            scales=scales,
            policies=self.analysis.policies,
            fuse=self.params.fuse,
            accumulators=given.get("accumulators"),
        )
        return self._result(outcome, weights, {})

    def _evaluation(self, outputs: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return what runs a forward-only table, with the network's outputs or without."""

        def evaluate(given: dict[str, Any]) -> dict[str, Any]:
            sizes = self._sizes(given["batch"])
            leaving = dict(self.analysis.wiring.outputs) if outputs else {}
            outcome = self.executor.forward(
                cell_programs.mode_for(self.analysis, training=False, leaving=leaving.values()),
                self._table(len(sizes), forward=True),
                self._feed(given["batch"], sizes, given["step"], tf.constant(0)),
                list(leaving.values()),
            )
            return self._result(outcome, given["weights"], leaving)

        return evaluate

    def _coefficients(self) -> dict[str, float]:
        return {loss.name: loss.coefficient for loss in self.analysis.losses}

    def _table(self, num_micro_batches: int, *, forward: bool = False) -> table.Table:
        """Return the table of training or of going forward alone; a file is read but once."""
        key = num_micro_batches, forward
        if key not in self._tables:
            self._tables[key] = (
                network.forward_table(self.analysis.table, num_micro_batches)
                if forward
                else network.make_table(self.params, num_micro_batches)
            )
        return self._tables[key]

    def _sizes(self, batch: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the examples of each micro-batch."""
        params = self.params
        count = micro_batches.batch_size(batch, params.batch_dim, params.unbatched)
        return micro_batches.sizes(count, params.num_micro_batches, params.micro_batch_size)

    def _told_sizes(self, batch: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the same, and tell in the log where they are fewer than was asked for."""
        sizes, wanted = self._sizes(batch), self.params.num_micro_batches
        if self.params.micro_batch_size is None and len(sizes) < wanted:
            logging.log_first_n(
                logging.WARNING,
                "a mini-batch of %d examples lowers the number of micro-batches from %d to %d",
                10,  # times in all: the last mini-batch of every evaluation may be smaller
                sum(sizes),
                wanted,
                len(sizes),
            )
        return sizes

    def _feed(
        self, batch: Mapping[str, Any], sizes: Sequence[int], step: tf.Tensor, first: tf.Tensor
    ) -> Feed:
        versions = field_versions(self.analysis.wiring)
        fields = read_fields(self.analysis, batch)
        parts = micro_batches.split(fields, sizes, self.params.batch_dim, self.params.unbatched)
        base_seed = seeds.base_seed(self.params.seed)
        return Feed(
            weights=read_weights(self.analysis, self._variables, self.executor),
            fields={versions[name]: values for name, values in parts.items()},
            seeds=[seeds.micro_batch_seed(base_seed, step, first + m) for m in range(len(sizes))],
            step=step,
        )

    def _result(
        self,
        outcome: Outcome,
        weights: Mapping[str, tf.Tensor],
        leaving: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the fields of a `Result` that are tensors."""
        master = precision.policy(self.params.dtype).variable
        means = {
            name: tf.math.divide_no_nan(
                tf.cast(outcome.collected.losses[name], weight.dtype), weight
            )
            for name, weight in weights.items()
            if name in outcome.collected.losses  # an auxiliary head is silent in evaluation
        }
        coefficients = self._coefficients()
        parts = [tf.constant(coefficients[name], master) * mean for name, mean in means.items()]
        return {
            "loss": tf.add_n(parts) if parts else tf.zeros([], master),
            "losses": means,
            "sums": outcome.collected.sums,
            "gradients": outcome.gradients,
            "moments": outcome.collected.moments,
            "outputs": self._outputs(outcome, leaving),
        }

    def _outputs(self, outcome: Outcome, leaving: Mapping[str, int]) -> dict[str, Any]:
        """Put the micro-batches' outputs together; what no batched field is in is one already.

        Raises:
            LayerError: one has no batch side along which they could be.
        """
        analysis, batch_dim = self.analysis, self.params.batch_dim
        whole = analysis.wiring.made_of(self.params.unbatched)
        outputs = {}
        for name, v in leaving.items():
            parts = outcome.outputs[v]
            if v in whole:
                outputs[name] = parts[0]
                continue
            if len(parts) > 1:
                micro_batches.check_batched(name, analysis.specs[v], max(analysis.sizes), batch_dim)
            outputs[name] = micro_batches.merge(parts, batch_dim)
        return outputs

    # The door under the user's own tape.

    def theta(self) -> dict[str, Any]:
        """Return the weights as tensors, nested by layer; a tape sees the variables being read."""
        return self._nested(lambda spec: not spec.is_state)

    @_as_it_is
    def fprop(self, theta: dict[str, Any], inputs: Any, ctx: Context) -> Any:
        """Compute the outputs, cell by cell in the table's order; differentiable.

        Args:
            theta: tensors nested by layer, as `theta()` gives them.
            inputs: the mini-batch: a dictionary of fields, or the value of `x` alone.
            ctx: its `root_seed` is the run's; losses, sums and moments are collected into it,
                added up over micro-batches.

        Returns:
            A dictionary by name where the network has several outputs, else the one.
        """
        batch = self._fields(inputs if isinstance(inputs, dict) else {"x": inputs})
        sizes = self._told_sizes(batch)
        flat = {**_flatten(theta), **_flatten(ctx.state)}
        weights = {
            path: cell_programs.computed(self.specs[path], value) for path, value in flat.items()
        }
        versions = field_versions(self.analysis.wiring)
        fields = read_fields(self.analysis, batch)
        parts = micro_batches.split(fields, sizes, self.params.batch_dim, self.params.unbatched)
        feed = Feed(
            weights,
            {versions[name]: values for name, values in parts.items()},
            [seeds.micro_batch_seed(ctx.root_seed, ctx.step, m) for m in range(len(sizes))],
            ctx.step,
        )
        leaving = self.analysis.wiring.outputs
        mode = cell_programs.mode_for(
            self.analysis,
            training=ctx.training,
            leaving=leaving.values(),
            input_gradients=True,
            output_gradients=True,
        )
        table = self._table(len(sizes), forward=not ctx.training)
        outcome = custom_gradient.forward(
            self.executor, mode, table, feed, list(leaving.values()), self.analysis.policies
        )
        again = sorted(_names(ctx.collected) & _names(outcome.collected))
        if again:
            raise errors.LayerError(
                f"this context has collected {again[0]} before, which would be lost. "
                "Give each call a context of its own: context(training=...)"
            )
        ctx.collected.update(outcome.collected.as_nest())
        outputs = self._outputs(outcome, leaving)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    @_as_it_is
    def __call__(
        self, inputs: Any, *, training: bool = False, step: int = 0, ctx: Context | None = None
    ) -> Any:
        """Call `fprop` on the pipeline's own variables; gradients flow into them.

        Args:
            inputs: as in `fprop`.
            training: whether dropout drops and batch norm uses its micro-batch.
            step: number of the update.
            ctx: a context of the caller's own, to collect losses and moments.
        """
        batch = inputs if isinstance(inputs, dict) else {"x": inputs}
        self.build(batch)
        return self.fprop(self.theta(), batch, ctx or self.context(training=training, step=step))

    def context(self, *, training: bool, step: int | tf.Tensor = 0) -> Context:
        """Return a fresh context for `fprop`: the run's seed, the present statistics."""
        return Context(
            training=training,
            step=_step(step),
            root_seed=seeds.base_seed(self.params.seed),
            state=self._nested(lambda spec: spec.is_state),
            path="",
            frozen=self.analysis.frozen_layers,
            collected=Collected(),
        )

    def _nested(self, wanted: Callable[[base.VariableSpec], bool]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, variable in self._some(wanted).items():
            *parents, last = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            with tf.device(self.device_of(path)):
                node[last] = tf.convert_to_tensor(variable)
        return tree

    # When something is wrong.

    def first_nonfinite(self, batch: Mapping[str, Any], *, step: int | tf.Tensor = 0) -> str:
        """Run a mini-batch layer by layer and name where a value first stops being finite.

        Returns:
            Such as "layer conv_1, output x, micro-batch 2"; or "nowhere".
        """
        fields = self._fields(batch)
        feed = self._feed(
            fields,
            self._sizes(fields),
            _step(step),
            tf.constant(0),
        )
        found = nonfinite.first_nonfinite(self.analysis, self.executor, feed)
        if found != nonfinite.NOWHERE:
            return found
        gradients = self.value_and_gradients(batch, step=step).gradients
        return nonfinite.first_gradient(self.analysis, gradients)


def _step(step: int | tf.Tensor) -> tf.Tensor:
    """Return the number of an update as the int64 scalar that programs take."""
    return tf.cast(tf.convert_to_tensor(step, dtype_hint=tf.int64), tf.int64)


def _specs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specs of a mini-batch of tensors, arrays or specs."""

    def spec(leaf: Any) -> tf.TensorSpec:
        if isinstance(leaf, tf.TensorSpec):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return {name: tf.nest.map_structure(spec, value) for name, value in fields.items()}


def _names(collected: Collected) -> set[str]:
    """Return what each thing that was collected is called."""
    return (
        {f"the loss {name!r}" for name in collected.losses}
        | {f"the metric {name!r}" for name in collected.sums}
        | {f"moments of {path!r}" for path in collected.moments}
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, tf.Tensor]:
    flat: dict[str, tf.Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
