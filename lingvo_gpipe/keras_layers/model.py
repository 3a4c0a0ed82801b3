"""A Keras Sequential or functional model as layers of a pipeline.

    network = keras_layers.from_keras_model(keras.applications.ResNet50(weights=None))
    params = pipelining.PipeliningLayer.Params(
        layers=network.layers, inputs=network.inputs, outputs=network.outputs, num_partitions=4)
    ...
    model = network.to_keras(pipe.by_path)

Each node of the model's graph becomes a layer, in topological order. Each symbolic tensor gets a
name in the stream, so that skip connections follow the graph. Functional models inside are cut too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers import adapter, config, function, variables
from lingvo_gpipe.keras_layers.live import Live, example, is_of_keras
from lingvo_gpipe.keras_layers.trace import READ
from lingvo_gpipe.layers.base import Layer
from lingvo_gpipe.nests import NameNest, Nest


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """A Keras model as layers.

    Attributes:
        layers: Params of its layers, in order.
        inputs: fields of the mini-batch that it reads, as the model takes its inputs: a name, or a
            list, tuple or dict of names; for `inputs` of a pipeline's Params.
        outputs: names in the stream of its outputs, as the model returns them; for `outputs` of a
            pipeline's Params, and for what losses and metrics read.
        names: Keras name of a layer (`inner/dense_3` in an inner model) → its name here.
        model: the Keras model.
        calls: name here → layer or operation of the model; a shared layer has several names.
    """

    layers: list[Layer.Params]
    inputs: NameNest
    outputs: NameNest
    names: dict[str, str]
    model: keras.Model
    calls: dict[str, keras.Operation]

    def to_keras(self, values: Mapping[str, variables.Value]) -> keras.Model:
        """Assign values of the pipeline to the variables of the Keras model; return the model.

        Weights, frozen weights and statistics of batch norms get new values. The states of the
        model's optimizer, metrics and seed generators stay as they are.

        Args:
            values: path → variable or array, such as `by_path` of the pipeline, or its averages.
                Further paths, such as those of a head, are ignored.

        Raises:
            LayerError: the model is not built, or a value is missing or of another shape. No
                variable has changed then.
        """
        if not self.model.built:
            raise errors.LayerError(
                f"{self.model.name} has no variables yet. Call its build(input_shape) first"
            )
        variables.assign(self.calls, values)
        return self.model


def from_keras_model(
    model: keras.Model,
    *,
    keep_weights: bool = True,
    keras_updates: bool = False,
    graphs: Mapping[int, Functional] | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Network:
    """Cut a Sequential or functional model into layers.

    If a layer is called at several nodes, the first node owns its variables and the others are tied
    to them. A frozen layer stays frozen. Names with Keras' automatic numbers (`dense_7`) are
    renumbered from the first layer of the model, so that they do not depend on other Keras objects
    of the process. A layer in an inner model is named `inner.layer`.

    Args:
        model: built or not; only `Network.to_keras` changes it. A subclassed model is one layer
            (`from_keras`).
        keep_weights: start from the model's current weights; False: from its initializers, with the
            seeds of the pipeline. A recipe that makes its model in every process needs False or
            loaded weights; otherwise its text names different weights in each process.
        keras_updates: whether a Keras optimizer updates the weights, which applies constraints;
            otherwise a layer with a constraint is refused.
        graphs: of subclassed models: `functional_form.graphs`. With them, a layer that is called
            with training=False stays in inference. In a functional model Keras does not heed that.
        inputs: name of an input of the model → field of the mini-batch; None: the same name.

    Raises:
        LayerError: the model has no graph, or one of its layers cannot be made again.
    """
    if not isinstance(model, keras.Model):
        raise errors.LayerError(
            f"expected a keras.Model, got {type(model).__name__}. For a single layer use "
            "keras_layers.from_keras"
        )
    cutter = _Cutter(keep_weights, keras_updates, graphs=graphs or {})
    graph = cutter.graph_of(model)
    if graph is None and isinstance(model, keras.Sequential):
        return _chain(model, keep_weights, keras_updates, dict(inputs or {}).get("x", "x"))
    if graph is None:
        raise errors.LayerError(
            f"{model.name} ({type(model).__name__}) is neither Sequential nor functional, so it "
            "has no graph to cut. Convert the whole model, or each of its layers, by "
            "keras_layers.from_keras"
        )
    cutter.find(graph)
    renamed = dict(inputs or {})
    fields = {}
    for tensor in graph.inputs:
        name = cutter.names[id(tensor._keras_history.operation)]
        fields[id(tensor)] = renamed.pop(name, renamed.pop(tensor.name, name))
    if renamed:
        wanted = next(iter(renamed))
        near = errors.suggestion(wanted, fields.values())
        raise errors.LayerError(f"{model.name} has no input {wanted!r}; {near}")
    streams = dict(fields)
    cutter.taken.update(fields.values())
    cutter.cut(graph, streams)
    layers = cutter.finished(
        next(iter(fields.values())), [streams[id(tensor)] for tensor in graph.outputs]
    )
    return Network(
        layers,
        inputs=_structure(graph.input, fields),
        outputs=_structure(graph.output, streams),
        names=cutter.keras_names,
        model=model,
        calls=cutter.calls,
    )


def _structure(tensors: Any, names: Mapping[int, str]) -> NameNest:
    """Return names in the structure of symbolic tensors; of a list with one, the name alone."""
    if isinstance(tensors, dict):
        return {key: _structure(inner, names) for key, inner in tensors.items()}
    if isinstance(tensors, list | tuple):
        parts = [_structure(inner, names) for inner in tensors]
        if len(parts) == 1:
            return parts[0]
        return tuple(parts) if isinstance(tensors, tuple) else parts
    return names[id(tensors)]


def _chain(model: keras.Sequential, keep_weights: bool, keras_updates: bool, field: str) -> Network:
    """Cut a Sequential model without a known input shape: each layer reads the one before it."""
    cutter = _Cutter(keep_weights, keras_updates, [field])
    cutter.rank(model.layers)
    layers: list[Layer.Params] = []
    read = field
    for layer in model.layers:
        if getattr(layer, "mask_zero", False) or isinstance(layer, keras.layers.Masking):
            raise errors.LayerError(
                f"{model.name}: {layer.name} returns a Keras mask, and only the model's graph "
                "shows which layers receive it. Add a keras.Input before its first layer"
            )
        name = cutter.names[id(layer)]
        params = adapter.from_keras(
            layer,
            name=name,
            reads=(read,),
            writes=(name,),
            keep_weights=keep_weights,
            keras_updates=keras_updates,
        )
        params.examples = field
        _refuse_hidden_state(layer, params, keras_updates=keras_updates)
        layers.append(params)
        read = name
    calls = {cutter.names[id(layer)]: layer for layer in model.layers}
    return Network(layers, field, read, cutter.keras_names, model, calls)


@dataclasses.dataclass(slots=True)
class _Call:
    """A node of the graph, as the call of a layer."""

    operation: keras.Operation
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    reads: list[str]
    writes: list[str]
    masks: dict[str, str]
    picks: tuple[int, ...]
    takes: dict[str, tuple[str, tuple[int | None, ...]]]
    mixes: bool
    unread: bool = False


class Given(keras.layers.Layer):
    """x → a value that does not depend on x: positions, or a weight of a model class."""

    def __init__(self, value: Any, dtype: keras.DTypePolicy) -> None:
        super().__init__(dtype=dtype)
        self.given = value

    def call(self, x: Nest) -> tf.Tensor:
        """Return the value."""
        del x
        is_weight = isinstance(self.given, keras.Variable)
        return tf.identity(self.given.value if is_weight else self.given)


class _Cutter:
    """Turns the nodes of a model's graph, and of graphs inside it, into layers, in order."""

    def __init__(
        self,
        keep_weights: bool,
        keras_updates: bool,
        fields: Iterable[str] = (),
        *,
        graphs: Mapping[int, Functional] = types.MappingProxyType({}),
    ) -> None:
        self.names: dict[int, str] = {}
        self.keras_names: dict[str, str] = {}
        self.taken: set[str] = set(fields)
        self._keep_weights = keep_weights
        self._keras_updates = keras_updates
        self._graphs = graphs
        self._calls: list[_Call] = []
        self._masks: dict[str, str] = {}
        self._given: set[str] = set()  # names of the stream that depend on no input
        self._inputs: set[int] = set()  # ids of the symbolic inputs of graphs

    @property
    def calls(self) -> dict[str, keras.Operation]:
        """Name of a layer here → layer or operation of the model."""
        return {call.name: call.operation for call in self._calls}

    def graph_of(self, operation: object) -> Functional | None:
        """Return the graph of a model that is called as a layer."""
        return self._graphs.get(id(operation)) or graph_of(operation)

    def find(self, graph: Functional, prefix: str = "", keras_prefix: str = "") -> None:
        """Name every operation of a graph, and of graphs inside it."""
        fresh = [op for op in graph.operations if id(op) not in self.names]
        self.rank(fresh, prefix, keras_prefix)
        for operation in fresh:
            inner = self.graph_of(operation)
            if inner is not None:
                name = self.names[id(operation)]
                self.find(inner, f"{name}.", f"{keras_prefix}{operation.name}/")

    def rank(
        self, operations: Sequence[keras.Operation], prefix: str = "", keras_prefix: str = ""
    ) -> None:
        """Name operations; replace Keras' automatic numbers by numbers from 0, in order."""
        numbered: dict[str, list[keras.Operation]] = {}
        for operation in operations:
            stem = config.automatic_stem(operation)
            if stem is None:
                self.names[id(operation)] = prefix + _clean(operation.name)
            else:
                numbered.setdefault(prefix + stem, []).append(operation)
        for stem, same in numbered.items():
            for number, operation in enumerate(sorted(same, key=_number)):
                name = f"{stem}_{number}" if number else stem
                while name in self.names.values():
                    name += "_"
                self.names[id(operation)] = name
        for operation in operations:
            self.keras_names[keras_prefix + operation.name] = self.names[id(operation)]

    def cut(self, graph: Functional, streams: dict[int, str], infers: bool = False) -> None:
        """Turn every node of a graph into a call.

        Args:
            graph: a functional model.
            streams: symbolic tensor's id → its name of the stream; filled.
            infers: whether all of its layers stay in inference.
        """
        self._inputs |= {id(tensor) for tensor in graph.inputs}
        is_of_class = any(graph is each for each in self._graphs.values())
        for node in nodes_of(graph):
            operation = node.operation
            inner = self.graph_of(operation)
            explicit = _explicit_masks(node, lambda t: streams[id(t)] in self._masks)
            stays = infers or (is_of_class and node.arguments.kwargs.get("training") is False)
            if inner is None or explicit:
                self._call(node, streams, explicit, infers=stays)
                continue
            reads = [streams[id(t)] for t in inputs_of(inner, node)]
            inside = {id(tensor): read for tensor, read in zip(inner.inputs, reads, strict=True)}
            self.cut(inner, inside, stays)
            for outer, result in zip(node.outputs, inner.outputs, strict=True):
                streams[id(outer)] = inside[id(result)]

    def finished(self, field: str, outputs: Iterable[str]) -> list[Layer.Params]:
        """Return the layers' params; `field` counts the examples of a mini-batch."""
        self._drop_unread(outputs)
        owners: dict[int, str] = {}
        layers: list[Layer.Params] = []
        for call in self._calls:
            params = adapter.from_keras(
                call.operation,
                name=call.name,
                reads=call.reads,
                writes=call.writes,
                masks=call.masks,
                keep_weights=self._keep_weights,
                keras_updates=self._keras_updates,
            )
            params.set(args=call.args, kwargs=call.kwargs, picks=call.picks)
            params.set(takes=call.takes, mixes=call.mixes, unread=call.unread)
            params.set(examples=field, tie=_ties(call, owners))
            _refuse_hidden_state(call.operation, params, keras_updates=self._keras_updates)
            layers.append(params)
        if any(layer.dtype == "float64" for layer in layers):  # layers without a dtype take it
            for layer, call in zip(layers, self._calls, strict=True):
                policy = getattr(call.operation, "dtype_policy", None)
                if policy is not None and policy.name == "float32":
                    layer.dtype = policy.name
        return layers

    def _call(
        self, node: Any, streams: dict[int, str], explicit: dict[str, Any], *, infers: bool
    ) -> None:
        operation = node.operation
        _refuse_variables(node)
        _refuse_hidden_mask(node)
        name = self._free(self.names[id(operation)])
        reads: list[str] = []
        args = [self._argument(name, arg, streams, reads) for arg in node.arguments.args]
        # The pipeline sets `training`, unless the layer stays in inference.
        kwargs = {
            key: self._argument(name, arg, streams, reads)
            for key, arg in node.arguments.kwargs.items()
            if key != "training" and arg is not None and (key in explicit or not _is_mask(key))
        }
        if infers and isinstance(operation, keras.layers.Layer):
            kwargs["training"] = False
        masks = {}
        if _takes_masks(operation):
            masks = {read: self._masks[read] for read in reads if read in self._masks}
        several = len(node.outputs) > 1
        writes = [f"{name}:{n}" if several else name for n in range(len(node.outputs))]
        for tensor, write, has in zip(
            node.outputs, writes, self._gives_masks(node, streams), strict=True
        ):
            streams[id(tensor)] = write
            if has:
                self._masks[write] = masks[write] = f"{write}.mask"
        for tensor in unmasked_by(node):
            self._masks.pop(streams[id(tensor)], None)
        is_given = isinstance(operation, Given) or self._given.issuperset(reads)
        if is_given:
            self._given.update(writes)
        wanted = [masks[read] for read in reads if read in masks]
        written = [masks[write] for write in writes if write in masks]
        self._calls.append(
            _Call(
                operation,
                name,
                args,
                kwargs,
                reads=[*dict.fromkeys([*reads, *wanted])],
                writes=writes + written,
                masks=masks,
                picks=tuple(range(len(writes))) if several else (),
                takes={
                    streams[id(tensor)]: (tensor.dtype, tuple(tensor.shape))
                    for tensor in node.arguments.keras_tensors
                    if id(tensor) in self._inputs
                },
                mixes=not is_given and _mixes_examples(node),
            )
        )

    def _gives_masks(self, node: Any, streams: Mapping[int, str]) -> list[bool]:
        """Return which tensors of a node have a mask when the model runs.

        Its symbolic tensors say so, unless a mask of its first argument comes from outside of an
        inner graph, or was taken off before.
        """
        known = [getattr(tensor, "_keras_mask", None) is not None for tensor in node.outputs]
        if not getattr(node.operation, "supports_masking", False):
            return known
        if has_mask_argument(node):  # which the graph computes
            return known
        first = first_argument(node)
        read = [t for t in keras.tree.flatten(first) if isinstance(t, keras.KerasTensor)]
        masked = [streams[id(tensor)] in self._masks for tensor in read]
        if masked == [getattr(tensor, "_keras_mask", None) is not None for tensor in read]:
            return known

        def mask_of(tensor: Any) -> keras.KerasTensor | None:
            has = isinstance(tensor, keras.KerasTensor) and streams[id(tensor)] in self._masks
            return keras.KerasTensor(tensor.shape[:2], "bool") if has else None

        masks = keras.tree.map_structure(mask_of, first)
        computed = keras.tree.flatten(node.operation.compute_mask(first, masks))
        return [n < len(computed) and computed[n] is not None for n in range(len(known))]

    def _argument(self, name: str, value: Any, streams: dict[int, str], reads: list[str]) -> Any:
        """Return an argument of a node as Params store it; add names that it reads to `reads`.

        Raises:
            LayerError: a dict in it has keys that are not strings.
        """
        if isinstance(value, keras.KerasTensor):
            reads.append(streams[id(value)])
            return {READ: streams[id(value)]}
        if isinstance(value, list | tuple):
            items = [self._argument(name, item, streams, reads) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise errors.LayerError(
                        f"{name}: an argument is a dict with the key {key!r}, expected a string. "
                        "Use strings as keys"
                    )
            return {key: self._argument(name, v, streams, reads) for key, v in value.items()}
        return config.from_constant(value)

    def _drop_unread(self, outputs: Iterable[str]) -> None:
        """Remove masks and tensors that no layer reads, starting from the last layer."""
        read = set(outputs)
        for call in list(reversed(self._calls)):
            masks = set(call.masks.values())
            tensors = [write for write in call.writes if write not in masks]
            if read.isdisjoint(call.writes):
                # It computed the mask of a removed tensor, or is in an unused head of a model.
                if not _has_losses_or_statistics(call.operation):
                    self._calls.remove(call)
                    continue
                call.unread = True
                read.add(tensors[0])
            if call.picks:
                call.picks = tuple(n for n in call.picks if tensors[n] in read)
            call.writes = [write for write in call.writes if write in read]
            known = {*call.reads, *call.writes}
            call.masks = {t: m for t, m in call.masks.items() if t in known and m in known}
            read.update(call.reads)

    def _free(self, name: str) -> str:
        number, free = 1, name
        while free in self.taken:
            number += 1
            free = f"{name}.{number}"
        self.taken.add(free)
        return free


def inputs_of(inner: Functional, node: Any) -> list[keras.KerasTensor]:
    """Return what a node calls an inner model with, in the order of the model's inputs.

    A dictionary is matched by the names of the `Input`s, unless the model itself was made of one.
    """
    argument = first_argument(node)
    if isinstance(argument, dict) and not isinstance(inner.input, dict):
        names = [tensor.name for tensor in inner.inputs]
        if set(names) <= argument.keys():
            return [argument[name] for name in names]
    flat: list[keras.KerasTensor] = keras.tree.flatten(argument)
    return flat


def first_argument(node: Any) -> Any:
    """Return the first argument of a node's call, whose Keras mask the layer passes on."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    if args:
        return args[0]
    names = inspect.signature(node.operation.call).parameters
    return next((kwargs[name] for name in names if name in kwargs), None)


def has_mask_argument(node: Any) -> bool:
    """Return whether the call of a node has a mask as an argument, given or found by Keras."""
    return node.arguments.kwargs.get("mask") is not None


def unmasked_by(node: Any) -> list[keras.KerasTensor]:
    """Return the tensors from which a call takes the Keras mask, so that later calls see none.

    Keras' MultiHeadAttention does so with its query, value and key.
    """
    operation = node.operation
    if not isinstance(operation, keras.layers.MultiHeadAttention):
        return []
    named = inspect.signature(operation.call).bind(*node.arguments.args, **node.arguments.kwargs)
    given = [named.arguments.get(name) for name in ("query", "value", "key")]
    # A tensor of another dtype is cast before.
    return [t for t in given if t is not None and t.dtype == operation.compute_dtype]


def _mixes_examples(node: Any) -> bool:
    """Return whether an output of a node depends on which examples are in a mini-batch together.

    It is run on examples together and apart, as inference; a user's layer without seeds and batch
    norms also as in training. Layers of Keras itself need no run, as long as the first dimension of
    their outputs, and no other, is the number of examples. If a layer cannot be run, the shapes of
    its outputs decide alone.
    """
    inputs, operation = node.arguments.keras_tensors, node.operation
    batches = {tensor.shape[0] if tensor.shape else 0 for tensor in inputs}
    if len(batches) != 1 or 0 in batches:  # not all of them have examples
        return False
    (batch,) = batches
    is_open = any(size is None for tensor in inputs for size in tensor.shape[1:])
    keeps = all(
        t.shape and t.shape[0] == batch and (is_open or None not in t.shape[1:])
        for t in node.outputs
    )
    modes = [False]
    seeds: Sequence[keras.Variable] = ()
    if isinstance(operation, keras.layers.Layer):
        declared = variables.find(operation)
        seeds = declared.seeds
        if _is_of_keras(operation):
            if keeps or seeds:
                return False
        elif not (seeds or declared.norms):
            modes = [True, False]  # the last leaves what a call stores as it was
    return any(_differs(node, seeds, keeps, training=training) for training in modes)


def _differs(node: Any, seeds: Sequence[keras.Variable], keeps: bool, *, training: bool) -> bool:
    """Return whether outputs of a node differ for examples together and apart.

    Args:
        node: the node.
        seeds: states of the seed generators of its layer.
        keeps: whether the first dimension of its outputs is the number of examples.
        training: argument of the call.
    """
    is_half = any("16" in keras.backend.standardize_dtype(t.dtype) for t in node.outputs)
    tolerance = 0.05 if is_half else 1e-3

    def alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
        return one.shape == other.shape and np.allclose(
            one, other, tolerance, tolerance, equal_nan=True
        )

    try:
        whole = _run(node, slice(0, 4), training=training)
        halves = [_run(node, slice(n, n + 2), training=training) for n in (0, 2)]
        if all(
            (alike(one, first) and alike(one, second))
            or (one.ndim and alike(one, np.concatenate([first, second])))
            for one, first, second in zip(whole, *halves, strict=True)
        ):
            return False
        # Numbers that are drawn differ in any case.
        return all(map(alike, whole, _run(node, slice(0, 4), training=training, seeds=seeds)))
    except Exception:  # noqa: BLE001 (a layer may refuse numbers that are not its user's)
        return not keeps


def _refuse_hidden_mask(node: Any) -> None:
    """Refuse a layer of a user's whose outputs have a mask only when it runs.

    Such a mask is that of a layer in it, which has no `compute_mask` of its own.

    Raises:
        LayerError: naming the layer.
    """
    operation = node.operation
    if not isinstance(operation, keras.layers.Layer) or _is_of_keras(operation):
        return
    try:
        outputs = _called(node, slice(0, 4), training=False)
    except Exception:  # noqa: BLE001 (a layer may refuse numbers that are not its user's)
        return
    for output, symbolic in zip(outputs, node.outputs, strict=True):
        masks = [getattr(each, "_keras_mask", None) for each in (output, symbolic)]
        if masks[0] is not None and masks[1] is None:
            raise errors.LayerError(
                f"{operation.name} ({type(operation).__name__}) returns the mask of a layer in it "
                "only when it runs, so the graph does not show which layers receive it. Define its "
                "compute_mask and set supports_masking=True"
            )


def _run(
    node: Any, part: slice, *, training: bool, seeds: Sequence[keras.Variable] = ()
) -> list[np.ndarray[Any, Any]]:
    """Return the outputs of a node for some of four examples, with other states of `seeds`."""
    outputs = _called(node, part, training=training, seeds=seeds)
    return [keras.ops.convert_to_numpy(keras.ops.cast(value, "float64")) for value in outputs]


def _called(
    node: Any, part: slice, *, training: bool, seeds: Sequence[keras.Variable] = ()
) -> list[tf.Tensor]:
    """Return the outputs of a node, flat; see `_run`."""

    def inputs(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor):
            return value
        sizes = [3 if size is None else size for size in value.shape[1:]]
        return example(keras.KerasTensor((4, *sizes), value.dtype))[part]

    operation, arguments = node.operation, node.arguments
    args, kwargs = keras.tree.map_structure(inputs, (arguments.args, arguments.kwargs))
    if isinstance(operation, keras.layers.Layer):  # or a Resizing in it would begin training
        kwargs = {**kwargs, "training": training}
    states = [(state, state.value + 1) for state in seeds]
    with keras.StatelessScope(states):  # what it writes is not kept
        outputs: list[tf.Tensor] = keras.tree.flatten(operation(*args, **kwargs))
    return outputs


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    """Whether a layer and all layers in it are Keras' own, and none a function of a user's."""
    return all(
        is_of_keras(each) and not isinstance(each, keras.layers.Lambda)
        for each in layer._flatten_layers()
    )


def _has_losses_or_statistics(operation: keras.Operation) -> bool:
    """Whether a layer may do more than return outputs; one of a user's may add a loss."""
    if not isinstance(operation, keras.layers.Layer):
        return False
    declared = variables.find(operation)
    return (
        not _is_of_keras(operation)
        or bool(declared.statistics)
        or any(layer.activity_regularizer is not None for layer in operation._flatten_layers())
        or any(getattr(v, "regularizer", None) is not None for v in declared.weights.values())
    )


def nodes_of(graph: Functional) -> list[Any]:
    """Return the graph's nodes in topological order, without the inputs."""
    by_depth = graph._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]


def graph_of(operation: object) -> Functional | None:
    """Return the graph of a functional or Sequential model that is called as a layer."""
    if isinstance(operation, keras.Sequential):
        plain = type(operation).call is keras.Sequential.call
        return getattr(operation, "_functional", None) if plain else None
    plain = isinstance(operation, Functional) and type(operation).call is Functional.call
    return operation if plain else None


def _refuse_variables(node: Any) -> None:
    """Refuse a call with a variable as an argument: its present value would become a constant.

    Raises:
        LayerError: naming the operation.
    """
    for value in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)):
        if isinstance(value, keras.Variable | tf.Variable):
            operation = node.operation
            raise errors.LayerError(
                f"{operation.name} ({type(operation).__name__}) takes the variable {value.name!r} "
                "as an argument, whose later values the pipeline would not have. Make a layer that "
                "holds it by self.add_weight and computes with it"
            )


def _is_mask(argument: str) -> bool:
    return argument == "mask" or argument.endswith("_mask")


def _explicit_masks(node: Any, masked: Callable[[keras.KerasTensor], bool]) -> dict[str, Any]:
    """Return a node's mask arguments that are not the masks of its tensors when the model runs.

    Args:
        node: the node.
        masked: whether a tensor then has a mask.
    """
    automatic = {
        id(getattr(t, "_keras_mask", None)) for t in node.arguments.keras_tensors if masked(t)
    }
    automatic.add(id(None))
    return {
        key: value
        for key, value in node.arguments.kwargs.items()
        if _is_mask(key) and any(id(t) not in automatic for t in keras.tree.flatten(value))
    }


def _takes_masks(operation: keras.Operation) -> bool:
    if not isinstance(operation, keras.layers.Layer):
        return False
    arguments = operation.call_signature_parameters
    return operation.supports_masking or any(map(_is_mask, arguments))


def _ties(call: _Call, owners: dict[int, str]) -> dict[str, str]:
    """Return path in the layer → path in the network, for variables that an earlier layer owns.

    Raises:
        LayerError: a trained batch norm is shared.
    """
    ties = {}
    declared = variables.find(call.operation)
    for path, variable in declared.weights.items():
        owner = owners.setdefault(id(variable), f"{call.name}/{path}")
        if owner != f"{call.name}/{path}":
            ties[path] = owner
    for path, norm in declared.norms.items():
        shared = ties.get(f"{path}/moving_mean" if path else "moving_mean")
        if norm.trainable and shared is not None:
            raise errors.LayerError(
                f"{call.name}: its batch norm is also called at an earlier node ({shared}), so an "
                "update would change its moving statistics twice. Use one batch norm per node"
            )
    return ties


def _refuse_hidden_state(
    operation: keras.Operation, params: adapter.KerasLayer.Params, *, keras_updates: bool
) -> None:
    """Refuse a layer that cannot be made again, or hides state; its trace shows what else is wrong.

    Args:
        operation: layer or operation of the model.
        params: params of the layer.
        keras_updates: see `from_keras_model`.

    Raises:
        LayerError: it cannot, naming the layer.
    """
    is_built = getattr(operation, "built", False)
    reason = function.hidden_state(operation, keeps_adapted=is_built, keras_updates=keras_updates)
    if reason is not None:
        kind = type(operation).__name__
        raise errors.LayerError(f"{params.name} ({kind}): {reason}")
    settings = params.config
    if isinstance(operation, keras.layers.Layer) and not isinstance(settings, Live):
        try:
            function.without_values(lambda: config.from_config(settings, params.policy))
        except errors.LayerError as error:
            raise errors.LayerError(f"{params.name}: {error}") from error


def _number(operation: keras.Operation) -> int:
    match = re.search(r"_(\d+)$", operation.name)
    return int(match.group(1)) if match else 0


def _clean(name: str) -> str:
    """Return a Keras name without characters that TensorFlow refuses in scopes."""
    clean = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    return clean if clean[0].isalnum() else f"layer{clean}"
