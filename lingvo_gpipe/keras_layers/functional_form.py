"""The graph of a subclassed Keras model, from calls with symbolic inputs.

A class with its own `call` has no graph. But if its `call` only calls layers and operations of
Keras, then a call with symbolic tensors records them, as in a functional model. What a graph would
lose is refused (`_refuse_lost`). Last, the graph and the model compute an example.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers.config import first_line, without_names
from lingvo_gpipe.keras_layers.live import example
from lingvo_gpipe.keras_layers.model import Given, graph_of, nodes_of
from lingvo_gpipe.nests import Nest

_TOLERANCE = 1e-3
_CONTEXT = "current_call_ctx"


class _Reads(keras.StatelessScope):
    """Remembers the variables that are read, other than in a layer with symbolic inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: list[keras.Variable] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.variables.append(variable)
        return super().get_current_value(variable)


@contextlib.contextmanager
def _as_in(context: CallContext | None) -> Iterator[None]:
    """Let layers take what they are not given (`training`) from this call; None: from none."""
    before = global_state.get_global_attribute(_CONTEXT)
    global_state.set_global_attribute(_CONTEXT, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CONTEXT, before)


@contextlib.contextmanager
def _recording(model: keras.Model, inputs: Nest) -> Iterator[None]:
    """Record also what depends on no input, in the `with` block.

    That is weights of the model itself, and calls of layers with values alone, such as positions.
    """
    first = keras.tree.flatten(inputs)[0]

    def symbolic(value: Any) -> keras.KerasTensor:
        return Given(value, model.dtype_policy)(first)

    attributes, layers = vars(model), [vars(layer) for layer in model.layers]
    before = [attributes.copy(), *(own.copy() for own in layers)]
    try:
        for layer in model.layers:
            layer.symbolic_call = _of_dense(layer.symbolic_call)
            layer.call = _recorded(layer, symbolic)
        for name, value in before[0].items():
            if isinstance(value, keras.Variable):
                attributes[name] = symbolic(value)
        yield
    finally:
        attributes.update({n: v for n, v in before[0].items() if isinstance(v, keras.Variable)})
        for own, kept in zip(layers, before[1:], strict=True):
            for name in ("call", "symbolic_call"):
                own.pop(name, None)
                if name in kept:
                    own[name] = kept[name]


def _recorded(
    layer: keras.layers.Layer, symbolic: Callable[[tf.Tensor], keras.KerasTensor]
) -> Callable[..., Any]:
    """Return a call that, given values alone, calls the layer again with symbolic tensors."""
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        are_values = all(isinstance(leaf, tf.Tensor) for leaf in leaves)
        if not leaves or not are_values or any(map(tf.is_symbolic_tensor, leaves)):
            return original(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: symbolic(leaf) if isinstance(leaf, tf.Tensor) else leaf, (args, kwargs)
        )
        return layer(*args, **kwargs)

    return call


def _of_dense(symbolic_call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a symbolic call whose tensors are dense: Keras takes `x * 2.0` for sparse."""

    @functools.wraps(symbolic_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        for leaf in keras.tree.flatten((args, kwargs)):
            if isinstance(leaf, keras.KerasTensor):
                leaf._sparse = False
        return symbolic_call(*args, **kwargs)

    return call


def graphs(model: keras.Model, x: Nest) -> dict[int, Functional]:
    """Return the graph of a subclassed model, and those of subclassed models in it.

    The inner ones need no graph: without it, one is a single layer.

    Args:
        model: of a class with its own `call`. It is built if it was not.
        x: inputs of a mini-batch, a nest of tensors. The graph is for their sizes, and any number
            of examples.

    Returns:
        id of a model → functional model of the same layers, which computes the same. A layer that
        is called with training=False stays in inference, as do all if `call` of `model` has no
        argument `training`: then Keras trains them so, too.

    Raises:
        LayerError: the call of `model` does more than calling layers and operations of Keras.
    """
    # A device might be too small for all weights.
    with tf.init_scope(), tf.device("CPU:0"), _as_in(None):
        graph = _checked(model, x, in_model=False)
        return {id(model): graph} | _inner_graphs(model, graph)


def is_same(one: Functional, other: Functional) -> bool:
    """Return whether two graphs of a model call the same with the same arguments."""
    return _is_same(list(_described(one, True)), list(_described(other, True)))


def _inner_graphs(outer: keras.Model, graph: Functional) -> dict[int, Functional]:
    """Return the graphs of models that are called once, with one argument and without masks."""
    found: dict[int, Functional] = {}
    nodes = nodes_of(graph)
    operations = [node.operation for node in nodes]
    for node in nodes:
        operation, called = node.operation, [*node.arguments.keras_tensors, *node.outputs]
        args, kwargs = node.arguments.args, node.arguments.kwargs
        if (
            isinstance(operation, keras.Model)
            and graph_of(operation) is None
            and operations.count(operation) == 1
            and operation.dtype_policy.name == outer.dtype_policy.name
            and not any(map(_has_mask, called))
            and len(args) == 1
            and set(kwargs) <= {"training"}
        ):
            with contextlib.suppress(errors.LayerError):
                inner = _checked(operation, args[0], in_model=True)
                if not any(map(_has_mask, inner.outputs)):
                    found |= {id(operation): inner} | _inner_graphs(operation, inner)
    return found


def _has_mask(tensor: Any) -> bool:
    return getattr(tensor, "_keras_mask", None) is not None


def _checked(model: keras.Model, x: Nest, *, in_model: bool) -> Functional:
    """Return the graph of one model, after all checks.

    Args:
        model: see `graphs`.
        x: see `graphs`.
        in_model: it is a layer of another one, from which it has the argument `training`.

    Raises:
        LayerError: see `graphs`.
    """
    inputs = _inputs(model, x)
    drawn = keras.tree.map_structure(example, inputs)
    layers = model._flatten_layers(include_self=False)
    try:
        model(inputs)  # as Keras builds it
        before = [len(layer._inbound_nodes) for layer in layers]
        with _Reads() as reads, _recording(model, inputs):
            inference, graph = (_graph(model, inputs, mode, in_model) for mode in (False, True))
        with keras.StatelessScope():  # both draw the same numbers
            found, masked = _run(graph, drawn)
        with keras.StatelessScope():
            wanted = keras.tree.flatten(model(drawn, training=False))
    except Exception as error:  # whatever a user's code raises
        reason = first_line(error).partition(". ")[0]
        raise _refused(model, f"cannot be called with symbolic tensors ({reason})") from error
    if reads.variables:
        raise _refused(model, f"reads {reads.variables[0].path!r} outside of a layer")
    _refuse_lost(model, graph)
    recorded = {id(node) for each in (graph, inference) for node in nodes_of(each)}
    for layer, count in zip(layers, before, strict=True):
        if any(id(node) not in recorded for node in layer._inbound_nodes[count:]):
            raise _refused(model, f"calls {layer.name!r} for something that it does not return")
    if not _is_same(list(_described(inference, False)), list(_described(graph, True))):
        raise _refused(model, "depends on the argument training, other than by handing it on")
    for node in nodes_of(graph):
        if any(map(_has_mask, node.outputs)) != (id(node.operation) in masked):
            name = node.operation.name
            raise _refused(model, f"has a mask from {name!r}, which defines no compute_mask")
    for one, other in zip(found, wanted, strict=True):
        if not np.allclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True):
            raise _refused(model, "computes something else with symbolic tensors")
    return graph


def _run(graph: Functional, inputs: Nest) -> tuple[list[tf.Tensor], set[int]]:
    """Return outputs of a graph in inference, and the operations that return a masked tensor."""
    masked: set[int] = set()

    def watched(operation: keras.Operation) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "training" in kwargs:
                kwargs["training"] = False
            outputs = operation(*args, **kwargs)
            if any(map(_has_mask, keras.tree.flatten(outputs))):
                masked.add(id(operation))
            return outputs

        return call

    outputs = graph._run_through_graph(keras.tree.flatten(inputs), watched)
    return keras.tree.flatten(outputs), masked


def _refuse_lost(model: keras.Model, graph: Functional) -> None:
    """Refuse what a graph would lose.

    Raises:
        LayerError: see `graphs`.
    """
    inside = {id(weight) for weight in graph.weights}
    for weight in model.weights:
        if getattr(weight, "regularizer", None) is not None and id(weight) not in inside:
            raise _refused(model, f"leaves {weight.path!r} out, which has a penalty")
    if model.activity_regularizer is not None:
        raise _refused(model, "has an activity_regularizer of its own")
    if any(isinstance(value, tf.Variable) for value in vars(model).values()):
        raise _refused(model, "may read a tf.Variable")
    if not _is_plain(graph.output):
        raise _refused(model, f"returns a {type(graph.output).__name__} that is not kept")
    for node in nodes_of(graph):
        given = node.arguments
        settings = (
            () if isinstance(node.operation, keras.layers.Layer) else _settings(node.operation)
        )
        if any(map(callable, keras.tree.flatten((given.args, given.kwargs, settings)))):
            raise _refused(model, f"hands a function to {node.operation.name!r}")
        if type(given.kwargs.get("training")) not in (bool, type(None)):
            raise _refused(model, "has an argument training that is no bool")


def _is_plain(outputs: Any) -> bool:
    """Return whether a pipeline returns outputs in this structure."""
    if type(outputs) in (list, tuple):
        return len(outputs) > 1 and all(map(_is_plain, outputs))
    if type(outputs) is dict:
        return all(map(_is_plain, outputs.values()))
    return isinstance(outputs, keras.KerasTensor)


def _inputs(model: keras.Model, x: Nest) -> Nest:
    """Return symbolic inputs for the tensors; a model casts floating ones to its own dtype."""

    def symbolic(path: tuple[Any, ...], tensor: Any) -> keras.KerasTensor:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        dtype = model.compute_dtype if "float" in dtype and model.autocast else dtype
        name = path[0] if len(path) == 1 else None  # Keras wants the keys of a dict as names
        if not isinstance(name, str):
            name = re.sub(r"\W", "_", "_".join(map(str, ("inputs", *path))))
        return keras.Input(tensor.shape[1:], dtype=dtype, name=name)

    flat = [symbolic(path, tensor) for path, tensor in keras.tree.flatten_with_path(x)]
    return keras.tree.pack_sequence_as(x, flat)


def _graph(model: keras.Model, inputs: Nest, training: bool, in_model: bool) -> Functional:
    is_taken = "training" in inspect.signature(model.call).parameters
    context = CallContext(entry_layer=model)
    context.set_value("training", training if is_taken or in_model else None)
    with _as_in(context):
        outputs = model.call(inputs, **({"training": training} if is_taken else {}))
    graph = keras.Model(inputs, outputs, name=model.name)
    for node in nodes_of(graph):
        if isinstance(node.operation, keras.layers.Layer) and not (is_taken or in_model):
            node.arguments.kwargs.setdefault("training", False)
            inner = graph_of(node.operation)
            if inner is not None and _trains_always(inner):
                raise ValueError(f"{node.operation.name!r} has layers that were made with training")
    return graph


def _trains_always(graph: Functional) -> bool:
    """Return whether a functional model has a layer that was called with training=True."""
    return any(
        node.arguments.kwargs.get("training") is True
        or ((inner := graph_of(node.operation)) is not None and _trains_always(inner))
        for node in nodes_of(graph)
    )


def _settings(operation: keras.Operation) -> dict[str, Any]:
    """Return the attributes of an operation, which is made in each call."""
    return {name: v for name, v in vars(operation).items() if name[0] != "_" and name != "name"}


def _described(graph: Functional, training: bool) -> Iterator[Any]:
    """Yield what each node of a graph calls with which arguments.

    Without the argument `training` where it is that of the model, or False.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(graph.inputs)}
    for node in nodes_of(graph):
        numbers |= {id(tensor): len(numbers) + n for n, tensor in enumerate(node.outputs)}
        operation: Any = node.operation
        if isinstance(operation, Given):
            operation = operation.given
        elif not isinstance(operation, keras.layers.Layer):
            operation = [type(operation), _settings(operation)]
        elif not operation.variables:  # it may be made in each call, too
            operation = [type(operation), without_names(operation.get_config())]
        kwargs = dict(node.arguments.kwargs)
        if kwargs.get("training") in (None, False, training):
            kwargs.pop("training", None)
        yield [operation, _numbered(node.arguments.args, numbers), _numbered(kwargs, numbers)]
    yield _numbered(graph.output, numbers)


def _numbered(value: Any, numbers: Mapping[int, int]) -> Any:
    def number(leaf: Any) -> Any:
        return ("tensor", numbers[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf

    return keras.tree.map_structure(number, value)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two nests have equal leaves, arrays among them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, tf.Tensor | np.ndarray) and isinstance(other, tf.Tensor | np.ndarray):
        return np.array_equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _refused(model: keras.Model, reason: str) -> errors.LayerError:
    return errors.LayerError(
        f"{model.name}: the call of {type(model).__name__} {reason}, so its layers cannot be cut. "
        "Let it only call layers and operations of Keras (keras.ops), and put the rest into layers"
    )
