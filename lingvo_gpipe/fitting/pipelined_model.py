"""A Keras model whose `fit`, `evaluate` and `predict` run as a pipeline over several devices."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.fitting import variables
from lingvo_gpipe.fitting.compiled import Names
from lingvo_gpipe.fitting.pipelines import LossPipeline, Pipelines
from lingvo_gpipe.keras_layers.trace import ACTIVITY
from lingvo_gpipe.nests import Nest
from lingvo_gpipe.pipelining import PipeliningLayer, Result


class PipelinedModel(keras.Model):
    """A Keras model that trains, evaluates and predicts as a pipeline of cells on several devices.

        model = lg.PipelinedModel(model, num_partitions=4, num_micro_batches=32)
        model.compile(optimizer="adamw", loss="sparse_categorical_crossentropy")
        model.fit(dataset, epochs=3)
        model.save("trained.keras")  # the plain model

    The layers of the model are cut into `num_partitions` cells, and each mini-batch into
    `num_micro_batches` micro-batches. Losses, gradients and weights are those of the plain model,
    with two exceptions: batch norm normalises over a micro-batch, and dropout draws other masks.

    Everything that belongs to the model rather than to its training is that of the plain model:
    `save`, `save_weights`, `load_weights`, `summary`, `get_layer`, `count_params`, `export`.

    Attributes:
        model: the plain model. It holds the same variables, so it always has the trained weights.
    """

    def __init__(
        self,
        model: keras.Model,
        num_partitions: int | None = None,
        num_micro_batches: int = 1,
        *,
        schedule: str = "1f1b",
        recompute: str = "full",
        cells_per_device: int | None = None,
        num_replicas: int = 1,
        devices: Sequence[str] | None = None,
        placement: str = "auto",
        cuts: Sequence[int] | None = None,
        device_memory: str | None = None,
        adapt_to_memory: bool = False,
        jit_compile: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap a model; nothing is cut before the first mini-batch.

        Args:
            model: functional, Sequential or of a class of its own, built or not. A class gets its
                graph from its `call` with the first mini-batch (`functional_form`).
            num_partitions: K, the number of devices of a replica; None: all GPUs divided between
                the replicas, or two logical CPU devices, and no more than there are layers.
            num_micro_batches: M, of each mini-batch. A mini-batch of fewer examples has fewer.
            schedule: see `PipeliningLayer.Params`, as for all further arguments. With auto, the
                first `fit` takes the one whose simulated step is the shortest.
            recompute: what a backward computes again: full, early, except_last, never or
                recompute_grad.
            cells_per_device: V.
            num_replicas: R; the mini-batch is divided between as many equal pipelines.
            devices: names of the devices, such as GPU:0; None: `placement` chooses them.
            placement: auto, cpu, gpu or tpu.
            cuts: number of layers of the model in each cell; None: balanced by FLOPs.
            device_memory: memory of each device, such as 8GiB, that no cell may exceed; None: that
                of the GPUs. The first `fit` plans a step, and says what would fit if it does not.
            adapt_to_memory: whether a step that does not fit takes more micro-batches, and
                recomputes more, until it does. The results stay the same.
            jit_compile: whether XLA compiles the cells.
            name: name of this model; None: that of `model`.

        Raises:
            LayerError: it is no model, or a PipelinedModel.
            ParamsError: an argument has another type.
        """
        if not isinstance(model, keras.Model):
            raise errors.LayerError(
                f"expected a keras.Model, got {type(model).__name__}. Load a file by "
                "keras.saving.load_model, and put a layer into a keras.Sequential"
            )
        if isinstance(model, PipelinedModel):
            raise errors.LayerError(
                f"{model.name} is a PipelinedModel already. To cut it otherwise, give its .model"
            )
        super().__init__(name=name or model.name, dtype=model.variable_dtype)
        # As in a functional model: inputs stay as they are, and each layer has its own dtype.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.model = model
        settings = {
            "num_partitions": num_partitions,
            "num_micro_batches": num_micro_batches,
            "schedule": schedule,
            "recompute": recompute,
            "cells_per_device": cells_per_device,
            "num_replicas": num_replicas,
            "devices": _as_tuple(devices),
            "placement": placement,
            "cuts": _as_tuple(cuts),
            "device_memory": device_memory,
            "jit_compile": jit_compile,
            "seed": _seed(),
        }
        self._pipelines = Pipelines(model, settings, adapts=adapt_to_memory)
        self.train_function: Any = None
        self.test_function: Any = None
        self.predict_function: Any = None
        self._step = 0
        self._draws = 0
        self._counts_examples = True
        self._has_slots = False  # of the optimizer, on the devices of the cells
        self.built = True

    # --- The plain model -------------------------------------------------------------------------

    def save(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the plain model, with the state of the optimizer."""
        self.model.save(filepath, *args, **kwargs)

    def save_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the weights of the plain model, and the state of the optimizer."""
        self.model.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Load what `save_weights` has saved, of this or of the plain model."""
        self.model.load_weights(filepath, *args, **kwargs)

    def export(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Export the plain model."""
        return self.model.export(filepath, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Refuse to be saved, copied or cloned by its config.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{self.name}: a PipelinedModel has no config. Save it by its method save; copy, "
            "pickle or clone its attribute model, the plain model, and wrap that again"
        )

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print a summary of the plain model."""
        self.model.summary(*args, **kwargs)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs of the plain model, by which losses and metrics are named."""
        names: list[str] = self.model.output_names
        return names

    @property
    def settings(self) -> dict[str, Any]:
        """How the model runs: the arguments above, with what was chosen in their place."""
        return dict(self._pipelines.settings)

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers of the plain model."""
        layers: list[keras.layers.Layer] = self.model.layers
        return layers

    @property
    def input(self) -> Any:
        """The symbolic inputs of the plain model."""
        return self.model.input

    @property
    def output(self) -> Any:
        """The symbolic outputs of the plain model."""
        return self.model.output

    @property
    def input_shape(self) -> Any:
        """The shapes of the inputs of the plain model."""
        return self.model.input_shape

    @property
    def output_shape(self) -> Any:
        """The shapes of the outputs of the plain model."""
        return self.model.output_shape

    def get_layer(self, name: str | None = None, index: int | None = None) -> keras.layers.Layer:
        """Return a layer of the plain model."""
        return self.model.get_layer(name, index)

    # --- What Keras calls ------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.Model.compile`; with `jit_compile`, XLA compiles the cells, each on its own.

        Raises:
            LayerError: the model has steps of its own, which a pipeline would not call; or a
                strategy of `tf.distribute` is in scope.
        """
        if tf.distribute.has_strategy():
            raise errors.LayerError(
                f"{self.name}: a pipeline does not train under a strategy of tf.distribute. "
                "Compile it outside of strategy.scope(); num_replicas copies the pipeline"
            )
        _refuse_own_steps(self.model)
        _refuse_own_steps(self)
        given = inspect.signature(super().compile).bind(*args, **kwargs).arguments
        super().compile(**{**given, "jit_compile": False})
        self.model.compile(**given)
        self.optimizer = self.model.optimizer  # which scales losses if the model is in float16
        self._has_slots = False
        self._pipelines.forget(jit_compile=bool(self.model.jit_compile))

    def make_train_function(self, force: bool = False) -> None:
        """Make what `fit` calls for some mini-batches."""
        if self.train_function is None or force:
            self._pipelines.follow_frozen()
            self._update = _ByShape(self._updated)
            self.train_function = self._on_batches(self._train_batch)

    def make_test_function(self, force: bool = False) -> None:
        """Make what `evaluate` calls for some mini-batches."""
        if self.test_function is None or force:
            self._measure = _ByShape(self._measured)
            self.test_function = self._on_batches(self._test_batch)

    def make_predict_function(self, force: bool = False) -> None:
        """Make what `predict` calls for some mini-batches."""
        if self.predict_function is None or force:
            self.predict_function = self._predict_batches

    def symbolic_call(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be a layer of another model.

        Raises:
            LayerError: always.
        """
        del args, kwargs
        raise errors.LayerError(
            f"{self.name}: a PipelinedModel cannot be a layer of a model. Call its attribute model "
            "there, the plain model, and wrap the outer model"
        )

    def call(self, inputs: Nest, training: bool | None = None) -> Nest:
        """Return the outputs of the model, by the pipeline; differentiable.

        Each call draws other random numbers. In training it updates moving statistics and adds
        losses of layers to `losses`, as in Keras.
        """
        fields = self._pipelines.inputs(inputs)
        pipe = self._pipelines.predicting(fields)
        ctx = pipe.context(training=bool(training), step=self._draw())
        outputs = pipe(fields, ctx=ctx)
        if not training:
            return outputs
        self._assign_statistics(pipe, ctx.collected.moments)
        weights = pipe.loss_weights(fields)
        for name, total in ctx.collected.losses.items():
            if name.endswith(f"/{ACTIVITY}"):  # Keras finds those of weights by itself
                self.add_loss(total / tf.cast(weights[name], total.dtype))
        return outputs

    def _assign_statistics(self, pipe: PipeliningLayer, moments: Mapping[str, Nest]) -> None:
        for path, value in pipe.merge_moments(moments).items():
            self._pipelines.variables[path].assign(value)

    def _on_batches(self, run: Callable[[Any], dict[str, Any]]) -> Callable[[Iterable[Any]], Any]:
        run = self._autoconvert_optionals(run)  # a generator's None

        def function(batches: Iterable[Any]) -> dict[str, Any]:
            logs = None
            self._counts_examples = self.run_eagerly or _has_known_size(batches)
            for _, batch in zip(range(self.steps_per_execution), batches, strict=False):
                logs = run(batch)
            if logs is None:
                raise StopIteration
            return logs

        return function

    def _train_batch(self, batch: Any) -> dict[str, Any]:
        fields, run = self._prepared(batch)
        if not run.pipe.analysis.losses:
            raise errors.InputError(
                "nothing would be trained: compile has no loss, and no layer adds one"
            )
        if not self._has_slots:
            variables.build(self.optimizer, self.model.trainable_variables)
            self._has_slots = True
            self._step = max(self._step, int(self.optimizer.iterations))  # of a loaded one
        one = tf.constant(1.0)
        scale = self.optimizer.scale_loss(one)
        result = run.pipe.value_and_gradients(
            fields,
            step=self._step,
            loss_scale=None if scale is one else scale,
            outputs=self._reads_outputs(run),
        )
        self._step += 1
        return self._update(
            run, result.gradients, result.moments, self._measured_of(fields, result)
        )

    def _test_batch(self, batch: Any) -> dict[str, Any]:
        fields, run = self._prepared(batch)
        result = run.pipe.evaluate(fields, step=self._draw(), outputs=self._reads_outputs(run))
        return self._measure(run, self._measured_of(fields, result))

    def _measured_of(self, fields: dict[str, tf.Tensor], result: Result) -> Measured:
        size = next(iter(fields.values())).shape[0]
        weight = tf.constant(size if self._counts_examples else 1)
        return Measured(fields, result.loss, result.losses, weight, result.sums, result.outputs)

    def _predict_batches(self, batches: Sequence[Any]) -> Nest:
        results = []
        for batch in batches:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            fields = self._pipelines.inputs(x)
            pipe = self._pipelines.predicting(fields)
            result = pipe.evaluate(fields, step=self._draw(), outputs=True)
            results.append(self._pipelines.outputs(result.outputs, list(fields.values())))
        if len(results) == 1:
            return results[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *results)

    def _draw(self) -> int | tf.Tensor:
        """Return a number that no update has, by which layers draw outside of `fit`.

        It takes none of TensorFlow's random numbers, unless a function of the caller's is traced.
        """
        if not tf.executing_eagerly():
            return tf.random.uniform([], -(2**31), 0, tf.int64)
        self._draws += 1
        return -self._draws

    def _prepared(self, batch: Any) -> tuple[dict[str, tf.Tensor], LossPipeline]:
        """Return a mini-batch by the names of its fields, and the pipeline that runs it."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        pipelines = self._pipelines
        fields = pipelines.inputs(x)
        compared = _names("labels", y), _names("weights", weights)
        names = Names(pipelines.graph(), tuple(fields), pipelines.network.outputs, *compared)
        fields |= _leaves("labels", y) | _leaves("weights", weights)
        run = pipelines.with_losses(
            fields, names, self._compile_loss, self._compile_metrics, self.optimizer
        )
        return fields, run

    # --- Updates and metrics ---------------------------------------------------------------------

    def _updated(
        self,
        run: LossPipeline,
        gradients: Mapping[str, tf.Tensor],
        moments: Mapping[str, Nest],
        measured: Measured,
    ) -> dict[str, tf.Tensor]:
        """Update weights, statistics and metrics; return the logs."""
        self._assign_statistics(run.pipe, moments)
        by_path = self._pipelines.variables
        reached = {id(by_path[path]): gradients[path] for path in gradients if path in run.reached}
        trained = self.model.trainable_variables  # in the order in which Keras saves their slots
        if trained:
            with variables.unreduced(self.optimizer):
                self.optimizer.apply_gradients(
                    [(reached.get(id(weight)), weight) for weight in trained]
                )
        return self._measured(run, measured)

    def _measured(self, run: LossPipeline, measured: Measured) -> dict[str, tf.Tensor]:
        """Update the metrics; return the logs."""
        size = tf.shape(measured.fields[run.names.inputs[0]])[0]
        self._loss_tracker.update_state(measured.loss, sample_weight=size)
        trackers = [] if self._compile_loss is None else self._compile_loss.metrics
        for number, tracker in enumerate(trackers):
            if (name := f"loss_{number}") in measured.losses:
                tracker.update_state(measured.losses[name], sample_weight=measured.weight)
        if run.metrics is not None:
            run.metrics.add(measured.sums)
        if not self._reads_outputs(run):
            return self.get_metrics_result()
        compared = run.names.arguments(measured.fields | measured.outputs)
        return self.compute_metrics(None, *compared)

    def _reads_outputs(self, run: LossPipeline) -> bool:
        """Return whether metrics of `compile` read the model's outputs for a whole mini-batch."""
        return self._compile_metrics is not None and run.metrics is None


class Measured(NamedTuple):
    """What a mini-batch gave, from which metrics are computed; a nest of tensors.

    Attributes:
        fields: the mini-batch by name.
        loss: as in `pipelining.Result`, and so the others.
        losses: see `loss`.
        weight: of this mini-batch in the mean of each loss over an epoch, as in Keras: the number
            of its examples if the data's shapes have it, else 1.
        sums: what its examples add to the metrics; empty where these read the outputs.
        outputs: by name; empty where no metric reads them.
    """

    fields: dict[str, tf.Tensor]
    loss: tf.Tensor
    losses: dict[str, tf.Tensor]
    weight: tf.Tensor
    sums: dict[str, Nest]
    outputs: dict[str, Nest]


def _as_tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _seed() -> int:
    """Return a seed that follows `keras.utils.set_random_seed`; layers that come draw as before."""
    own = random.Random()
    own.setstate(random.getstate())
    return own.randrange(2**31)


def _refuse_own_steps(model: keras.Model) -> None:
    """Refuse a model whose class replaces what `fit`, `evaluate` or `predict` calls."""
    for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
        if not owner.__module__.startswith(("keras.", "lingvo_gpipe.")):
            raise errors.LayerError(
                f"{model.name}: {owner.__name__} defines its own {name}, which a pipeline does not "
                "call. Give losses and metrics to compile, or train in a loop of your own by "
                "PipeliningLayer.value_and_gradients"
            )


def _has_known_size(batches: Iterable[Any]) -> bool:
    """Return whether the shapes of mini-batches have the number of examples."""
    specs = keras.tree.flatten(getattr(batches, "element_spec", ()))
    return all(spec.shape.rank and spec.shape[0] is not None for spec in specs)


class _ByShape:
    """A TensorFlow function of nests of tensors, traced for each combination of shapes.

    Its operations run on the devices of their inputs, so that what an update computes of a weight
    (an average, a clipped gradient) stays on the device of the weight.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traced: dict[Hashable, Any] = {}

    def __call__(self, run: LossPipeline, *arguments: Nest) -> Any:
        flat = tf.nest.flatten(arguments)
        key = run, tuple((tuple(leaf.shape), leaf.dtype) for leaf in flat)
        if key not in self._traced:
            devices = [leaf.backing_device for leaf in flat]

            def call(*flat: tf.Tensor) -> Any:
                with variables.on_largest_input(flat, devices):
                    return self._function(run, *tf.nest.pack_sequence_as(arguments, flat))

            function = tf.function(call, autograph=False)
            self._traced[key] = function.get_concrete_function(*flat)
        return self._traced[key](*flat)


def _leaves(stem: str, nest: Any) -> dict[str, tf.Tensor]:
    """Return labels or weights by the names of their fields."""
    flat = [] if nest is None else keras.tree.flatten(nest)
    return {
        f"{stem}[{n}]": tf.convert_to_tensor(leaf)
        for n, leaf in enumerate(flat)
        if leaf is not None
    }


def _names(stem: str, nest: Any) -> Any:
    """Return the names of the fields of labels or weights, in their structure."""
    if nest is None:
        return None
    flat = enumerate(keras.tree.flatten(nest))
    return keras.tree.pack_sequence_as(
        nest, [None if leaf is None else f"{stem}[{n}]" for n, leaf in flat]
    )
