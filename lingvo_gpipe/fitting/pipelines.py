"""The pipelines of one Keras model: with losses and without, on one set of variables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from lingvo_gpipe import errors, keras_layers, schedule
from lingvo_gpipe.execution import placement
from lingvo_gpipe.fitting import planning, variables
from lingvo_gpipe.fitting.compiled import CompiledLosses, MetricSums, Names, Objective
from lingvo_gpipe.keras_layers import functional_form, masks
from lingvo_gpipe.keras_layers.model import graph_of
from lingvo_gpipe.layers.base import Layer
from lingvo_gpipe.network import Analysis, analyze, uncut, wiring
from lingvo_gpipe.network.batch_fields import specs
from lingvo_gpipe.pipelining import PipeliningLayer

_HEAD = "compiled_losses"
_WAY_OUT = (
    "Write it as a functional model, keras.Model(inputs, outputs), or give its layers as a list to "
    "PipeliningLayer"
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LossPipeline:
    """A pipeline with the losses of `compile`.

    Attributes:
        pipe: the pipeline.
        names: of what the losses compare.
        reached: paths of the weights that a loss depends on; Keras leaves the others as they are.
        metrics: those that it computes by micro-batch; None: none.
    """

    pipe: PipeliningLayer
    names: Names
    reached: frozenset[str]
    metrics: MetricSums | None


class Pipelines:
    """Makes the pipelines of a model when they are first needed, from the shapes of a mini-batch.

    Attributes:
        variables: path → variable of the model, on the device of its cell; empty before the first
            pipeline.
        settings: fields of `PipeliningLayer.Params`, with what was chosen so far.
    """

    def __init__(
        self, model: keras.Model, settings: Mapping[str, Any], *, adapts: bool = False
    ) -> None:
        """Refuse settings of other types.

        Args:
            model: the model.
            settings: fields of `PipeliningLayer.Params`.
            adapts: see `planning.settle`.

        Raises:
            ParamsError: a setting has another type.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        PipeliningLayer.Params(**given)  # refuses other types
        self.variables: dict[str, keras.Variable] = {}
        self._model = model
        self._graphs: dict[int, Functional] = {}  # of a subclassed model
        self._is_of_now = True  # whether its call may not have changed since they were found
        self.settings = dict(settings)
        self._always_compiles = settings["jit_compile"]
        self._adapts = adapts
        self._within: dict[str, Any] = {}  # by what the network is cut within the memory
        self._is_built_here = False
        self._is_settled = False  # for the optimizer of `compile`
        self._is_divisible = True  # whether the losses of `compile` are sums over examples
        self._network: keras_layers.Network | None = None
        self._with_losses: dict[str, LossPipeline] = {}  # by the kind of mini-batch
        self._frozen: tuple[bool, ...] = ()  # what was, in those
        self._objects: list[int] = []  # the variables of the model, in all pipelines
        self._predicting: PipeliningLayer | None = None

    @property
    def network(self) -> keras_layers.Network:
        """The layers of the model."""
        if self._network is None:
            self._network = keras_layers.from_keras_model(
                self._model, keras_updates=True, graphs=self._graphs
            )
            if self.settings["num_partitions"] is None:
                gpus = len(tf.config.list_physical_devices("GPU"))
                of_each = max(1, gpus // self.settings["num_replicas"]) if gpus else 2
                self.settings["num_partitions"] = min(of_each, len(self._network.layers))
        return self._network

    def forget(self, *, jit_compile: bool) -> None:
        """Make pipelines again when they are next needed: the model was compiled."""
        self.settings["jit_compile"] = self._always_compiles or jit_compile
        self._with_losses.clear()
        self._predicting = None
        self._is_settled = False
        self._is_divisible = True
        self._is_of_now = False

    def follow_frozen(self) -> None:
        """Make the pipelines with losses again if a layer was frozen, or no longer is."""
        if self._with_losses and self._frozen != self._are_frozen():
            self._with_losses.clear()
            self._is_settled = False

    def _are_frozen(self) -> tuple[bool, ...]:
        return tuple(not variable.trainable for variable in self.variables.values())

    def _follow_variables(self) -> None:
        """Make all pipelines again if another one, of a model with some of the layers, moved them.

        Both then have the same variables, on the devices of the other one. Or the model has others
        now: it was quantized.
        """
        runs = self._with_losses.values()
        pipe = next((run.pipe for run in runs), self._predicting)  # all have the same
        if pipe is None:
            return
        is_same = self._objects == self._objects_now()
        if not (is_same and variables.are_shared(self.variables, pipe.by_path)):
            self._with_losses.clear()
            self._predicting = None

    def _objects_now(self) -> list[int]:
        """Return which objects the variables of the model are."""
        return list(map(id, self._model.variables))

    def inputs(self, x: Any) -> dict[str, tf.Tensor]:
        """Return the inputs of the model by name, with the dtypes and ranks of its `Input`s."""
        if self.graph() is None:
            self._find_graph(x)
        elif self._graphs and not self._is_of_now:
            self._check_graph()
        self._is_of_now = True
        graph = self.graph()
        _check_inputs(graph, x)
        flat = graph._standardize_inputs(x)
        for tensor, taken in zip(flat, graph.inputs, strict=True):
            sizes = zip(taken.shape[1:], tensor.shape[1:], strict=True)
            is_other = any(size not in (None, given) for size, given in sizes)
            if is_other and not self._is_built_here:
                raise errors.InputError(
                    f"input {taken.name!r} has shape {tuple(tensor.shape)}, but the model was made "
                    f"for {taken.shape}"
                )
        return dict(zip(keras.tree.flatten(self.network.inputs), flat, strict=True))

    def _check_graph(self) -> None:
        """Refuse a class whose call does something else since it was compiled.

        Raises:
            LayerError: it does.
        """
        now = functional_form.graphs(self._model, self.graph().input)
        if now.keys() != self._graphs.keys() or not all(
            functional_form.is_same(graph, self._graphs[key]) for key, graph in now.items()
        ):
            raise errors.LayerError(
                f"{self._model.name}: the call of {type(self._model).__name__} does something else "
                "than when it was cut. Wrap the model again"
            )

    def _find_graph(self, x: Any) -> None:
        """Find the graph of a model by its first mini-batch; a Sequential takes other sizes, too.

        Raises:
            LayerError: it has no graph then either.
        """
        if type(self._model).call is not keras.Sequential.call:
            fields = keras.tree.map_structure(tf.convert_to_tensor, x)
            self._graphs = functional_form.graphs(self._model, fields)
            return
        first, *others = keras.tree.flatten(x)
        if not others:
            self._model.build((None, *first.shape[1:]))
            self._is_built_here = True
        if others or graph_of(self._model) is None:
            raise errors.LayerError(
                f"{self._model.name} (Sequential) takes several inputs, or has a layer that does "
                f"not infer its output's shape, so it has no graph of layers to cut. {_WAY_OUT}"
            )

    def outputs(self, outputs: Mapping[str, Any], inputs: Sequence[tf.Tensor]) -> Any:
        """Return outputs by name as the model returns them for these inputs."""
        structured = wiring.in_structure(self.network.outputs, outputs)
        return masks.with_masks(self.graph(), inputs, structured)

    def with_losses(
        self,
        fields: Mapping[str, tf.Tensor],
        names: Names,
        compiled: CompileLoss | None,
        metrics: CompileMetrics | None,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> LossPipeline:
        """Return the pipeline with losses.

        Args:
            fields: a mini-batch: inputs, labels, sample weights.
            names: of what the losses compare.
            compiled: the losses; None: only those that layers add.
            metrics: the metrics; None: none.
            optimizer: of `compile`; None: nothing is trained.

        Raises:
            InputError: there are losses, but no labels.
            PartitionError: see `planning.settle`.
        """
        self._follow_variables()
        kinds = [(fields[n].dtype.is_floating, fields[n].shape.rank) for n in names.compared()]
        key = repr((names.labels, names.weights, kinds))
        if key not in self._with_losses:
            if compiled is not None and names.labels is None:
                raise errors.InputError(
                    "the data has no labels y, with which the loss of compile compares the outputs"
                )
            losses = []
            if compiled is not None:
                losses = [self._losses(fields, names, compiled, metrics)]
            pipe = self._new(fields, losses, optimizer)
            self._with_losses[key] = LossPipeline(
                pipe, names, _reached(pipe.analysis), losses[0].metrics if losses else None
            )
            self._frozen = self._are_frozen()
        return self._with_losses[key]

    def predicting(self, fields: Mapping[str, tf.Tensor]) -> PipeliningLayer:
        """Return the pipeline without the losses of `compile`, which needs no labels."""
        self._follow_variables()
        if self._predicting is None:
            self._predicting = self._new(fields, [], None)
        return self._predicting

    def _new(
        self,
        fields: Mapping[str, tf.Tensor],
        losses: Sequence[Layer.Params],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> PipeliningLayer:
        network, settings = self.network, self.settings
        found = variables.by_path(network.calls)
        # `quantize` puts others in their place.
        self.variables = {p: v for p, v in self.variables.items() if found.get(p) is v}
        self._objects = self._objects_now()
        if settings["devices"] is None:
            settings["devices"] = self._cpus()
        of_fields = self._of_enough_examples(fields)
        inputs = {name: of_fields[name] for name in keras.tree.flatten(network.inputs)}
        until_chosen: dict[str, Any] = {}
        if optimizer is not None and not self._is_settled:
            self._within.clear()
            plain = {"schedule": "1f1b"} if settings["schedule"] == schedule.AUTO else {}
            analyze(self._params([], **plain, device_memory=None), inputs)  # refuses settings
            trained = variables.trained(network.calls)
            settled = planning.settle(
                self._params(losses),
                of_fields,
                lambda: planning.slot_bytes(optimizer, trained),
                adapts=self._adapts,
                divides=self._is_divisible,
            )
            self._within = {name: settled.pop(name) for name in planning.WITHIN if name in settled}
            settings |= settled
            self._is_settled = True
        if settings["schedule"] == schedule.AUTO:  # which is chosen when training begins
            settings["cells_per_device"] = 1
            until_chosen = {"schedule": "1f1b"}
        if settings["cuts"] is None or not self.variables:  # those that were given are checked
            settings["cuts"] = analyze(self._params([], **until_chosen), inputs).cuts
        pipe: PipeliningLayer = self._params(losses, **until_chosen).instantiate()
        pipe.build(of_fields, {path: v.value for path, v in self.variables.items()})
        self._share(pipe)
        return pipe

    def _of_enough_examples(self, fields: Mapping[str, tf.Tensor]) -> dict[str, Any]:
        """Return the specs of a mini-batch with at least one example for each replica."""
        return {
            name: tf.TensorSpec(
                [max(spec.shape[0], self.settings["num_replicas"]), *spec.shape[1:]], spec.dtype
            )
            for name, spec in specs(fields).items()
        }

    def _share(self, pipe: PipeliningLayer) -> None:
        """Let the model have the variables that a pipeline has created."""
        found = variables.by_path(self.network.calls).items()
        new = {path: variable for path, variable in found if path not in self.variables}
        if new:
            variables.share(new, pipe.by_path)
            self.variables |= new
            variables.retrace(self._model)

    def _params(self, losses: Sequence[Layer.Params], **changes: Any) -> PipeliningLayer.Params:
        """Return the params of the network with these losses in its last cell."""
        network, settings = self.network, self.settings | self._within | changes
        if settings["cuts"] is not None:
            *cuts, last = settings["cuts"]
            settings["cuts"] = (*cuts, last + len(losses))
        return PipeliningLayer.Params(
            layers=[*network.layers, *losses],
            inputs=network.inputs,
            outputs=network.outputs,
            **settings,
        )

    def _cpus(self) -> tuple[str, ...] | None:
        """Return a CPU device for each cell, some twice if TensorFlow began with few; None: GPUs.

        On CPUs a device is only a name: the schedule orders the cells, not the device.
        """
        kind = self.settings["placement"]
        has_others = tf.config.list_physical_devices("GPU") or tf.config.list_physical_devices(
            "TPU"
        )
        if kind not in ("auto", "cpu") or (kind == "auto" and has_others):
            return None
        count = self.settings["num_partitions"] * self.settings["num_replicas"]
        try:
            placement.prepare_logical_cpus(count)
        except errors.DeviceError:  # TensorFlow has begun
            names = [device.name for device in tf.config.list_logical_devices("CPU")]
            return tuple(itertools.islice(itertools.cycle(names), count))
        return None

    def _losses(
        self,
        fields: Mapping[str, tf.Tensor],
        names: Names,
        compiled: CompileLoss,
        metrics: CompileMetrics | None,
    ) -> CompiledLosses.Params:
        """Return the layer with the losses of `compile`, and its metrics if they are sums."""
        # The mini-batch has sizes that the model leaves open, such as a length.
        inputs = {name: fields[name] for name in names.inputs}
        analysis = analyze(uncut(self._params([])), specs(inputs))
        written = {name: analysis.specs[n] for name, n in analysis.wiring.outputs.items()}
        values = names.drawn(fields, written)
        symbolic = {n: keras.KerasTensor(v.shape, v.dtype.name) for n, v in values.items()}
        # Keras resolves in the first call which output each loss compares. Nothing is computed.
        backend.compute_output_spec(lambda v: compiled(*names.arguments(v)), symbolic)
        objective = Objective(compiled, names)
        objective.check(values)
        try:
            objective.divide(values)
        except errors.LayerError as error:
            if self.settings["num_micro_batches"] > 1:
                raise errors.LayerError(f"{error}, or num_micro_batches=1") from error
            self._is_divisible = False
        sums = None
        if metrics is not None:
            backend.compute_output_spec(
                lambda v: metrics.update_state(*names.arguments(v)), symbolic
            )
            sums = MetricSums(metrics, names)
            sums = sums if sums.are_sums(values) else None
        reads = [*keras.tree.flatten(names.outputs), *names.inputs, *names.compared()]
        return CompiledLosses.Params(
            name=_HEAD,
            objective=objective,
            metrics=sums,
            reads=tuple(dict.fromkeys(reads)),
            writes=(_HEAD,),
        )

    def graph(self) -> Functional:
        """Return the functional form of the model; a mini-batch may have to show it first."""
        graph: Any = self._graphs.get(id(self._model)) or graph_of(self._model)
        return graph


def _check_inputs(graph: Functional, x: Any) -> None:
    """Refuse a dictionary of inputs that lacks one.

    Raises:
        InputError: it does.
    """
    if isinstance(x, Mapping):
        names = [tensor.name for tensor in graph.inputs]
        wanted = graph.input if isinstance(graph.input, Mapping) else names
        missing = [name for name in wanted if name not in x]
        if missing:
            raise errors.InputError(
                f"the model has an input {missing[0]!r}, but the data has {', '.join(map(repr, x))}"
            )


def _reached(analysis: Analysis) -> frozenset[str]:
    """Return the paths of the trained weights by which a loss has a gradient in Keras."""
    needed: set[int] = set()
    paths: set[str] = set()
    for number, layer in reversed(list(enumerate(analysis.layers))):
        reads = analysis.wiring.reads[number]
        writes = [n for n, v in enumerate(analysis.wiring.writes[number]) if v in needed]
        if not (layer.meta.losses or writes):
            continue
        sources: Collection[str | int] = [*layer.paths, *range(len(reads))]
        if isinstance(layer.params, keras_layers.KerasLayer.Params | CompiledLosses.Params):
            inputs = [analysis.specs[version] for version in reads]
            sources = layer.params.gradient_sources(inputs, writes)
        needed.update(reads[source] for source in sources if isinstance(source, int))
        used = {layer.paths[source] for source in sources if isinstance(source, str)}
        paths.update(used.intersection(analysis.trainable(number)))
    return frozenset(paths)
