"""The graph of a subclassed Keras model, from calls with symbolic inputs.

A class with its own `call` has no graph. But if its `call` only calls layers and operations of
Keras, then a call with symbolic tensors records them, as in a functional model. What would be lost
is refused: random numbers outside of layers, and what depends on `training` there. Last, the graph
and the model compute an example.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from lingvo_gpipe import errors
from lingvo_gpipe.keras_layers.config import first_line
from lingvo_gpipe.keras_layers.live import example
from lingvo_gpipe.keras_layers.model import Given, graph_of, nodes_of
from lingvo_gpipe.nests import Nest

_TOLERANCE = 1e-3


class _Reads(keras.StatelessScope):
    """Remembers the variables that are read, other than in a layer with symbolic inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: list[keras.Variable] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.variables.append(variable)
        return super().get_current_value(variable)


@contextlib.contextmanager
def _recording(model: keras.Model, inputs: Nest) -> Iterator[None]:
    """Record also what depends on no input, in the `with` block.

    That is weights of the model itself, and calls of layers with values alone, such as positions.
    """
    first = keras.tree.flatten(inputs)[0]

    def symbolic(value: Any, name: str | None = None) -> keras.KerasTensor:
        return Given(value, name, model.dtype_policy)(first)

    def given(leaf: Any) -> Any:
        return symbolic(leaf) if isinstance(leaf, tf.Tensor) else leaf

    def recorded(layer: keras.layers.Layer) -> Callable[..., Any]:
        original = layer.call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = keras.tree.flatten((args, kwargs))
            if any(map(tf.is_symbolic_tensor, leaves)) or not any(map(tf.is_tensor, leaves)):
                return original(*args, **kwargs)
            args, kwargs = keras.tree.map_structure(given, (args, kwargs))
            return layer(*args, **kwargs)

        return call

    attributes = vars(model)
    weights = {name: v for name, v in attributes.items() if isinstance(v, keras.Variable)}
    try:
        for layer in model.layers:
            layer.call = recorded(layer)
        for name, weight in weights.items():
            attributes[name] = symbolic(weight, name)
        yield
    finally:
        attributes.update(weights)
        for layer in model.layers:
            vars(layer).pop("call", None)


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
    with tf.init_scope(), tf.device("CPU:0"):  # a device might be too small for all weights
        graph = _checked(model, x, in_model=False)
        return {id(model): graph} | _inner_graphs(graph)


def _inner_graphs(graph: Functional) -> dict[int, Functional]:
    found: dict[int, Functional] = {}
    for node in nodes_of(graph):
        operation, called = node.operation, [*node.arguments.keras_tensors, *node.outputs]
        if (inner := graph_of(operation)) is not None:
            found |= _inner_graphs(inner)
        elif isinstance(operation, keras.Model) and not any(map(_has_mask, called)):
            with contextlib.suppress(errors.LayerError):
                args = node.arguments.args
                if len(args) == 1 and set(node.arguments.kwargs) <= {"training", "mask"}:
                    inner = _checked(operation, args[0], in_model=True)
                    if not any(map(_has_mask, inner.outputs)):
                        found |= {id(operation): inner} | _inner_graphs(inner)
    return found


def _has_mask(tensor: keras.KerasTensor) -> bool:
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
    outputs = []
    try:
        model(inputs)  # as Keras builds it
        with _Reads() as reads, _recording(model, inputs):
            in_inference, graph = (
                _graph(model, inputs, training, in_model) for training in (False, True)
            )
        for each in (graph, model):
            with keras.StatelessScope():  # both draw the same numbers
                outputs.append(keras.tree.flatten(each(drawn, training=False)))
    except Exception as error:  # whatever a user's code raises
        reason = first_line(error).partition(". ")[0]
        raise _refused(model, f"cannot be called with symbolic tensors ({reason})") from error
    if reads.variables:
        raise _refused(model, f"reads {reads.variables[0].path!r} outside of a layer")
    if not _is_same(list(_described(in_inference, False)), list(_described(graph, True))):
        raise _refused(model, "depends on the argument training, other than by handing it on")
    for one, other in zip(*outputs, strict=True):
        if not np.allclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True):
            raise _refused(model, "computes something else with symbolic tensors")
    return graph


def _inputs(model: keras.Model, x: Nest) -> Nest:
    """Return symbolic inputs for the tensors; a model casts floating ones to its own dtype."""

    def symbolic(path: tuple[Any, ...], tensor: Any) -> keras.KerasTensor:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        dtype = model.compute_dtype if "float" in dtype else dtype
        own = path[-1] if path and isinstance(path[-1], str) else None
        name = own or "_".join(map(str, ("inputs", *path)))
        return keras.Input(tensor.shape[1:], dtype=dtype, name=name)

    flat = [symbolic(path, tensor) for path, tensor in keras.tree.flatten_with_path(x)]
    return keras.tree.pack_sequence_as(x, flat)


def _graph(model: keras.Model, inputs: Nest, training: bool, in_model: bool) -> Functional:
    is_taken = "training" in inspect.signature(model.call).parameters
    outputs = model.call(inputs, **({"training": training} if is_taken else {}))
    graph = keras.Model(inputs, outputs, name=model.name)
    for node in nodes_of(graph):
        if isinstance(node.operation, keras.layers.Layer) and not (is_taken or in_model):
            node.arguments.kwargs.setdefault("training", False)
    return graph


def _described(graph: Functional, training: bool) -> Iterator[Any]:
    """Yield what each node of a graph calls with which arguments.

    Without the argument `training` where it is that of the model, or False.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(graph.inputs)}
    for node in nodes_of(graph):
        numbers |= {id(tensor): len(numbers) + n for n, tensor in enumerate(node.outputs)}
        operation: Any = node.operation
        if isinstance(operation, Given):  # made in each call, as operations are
            operation = operation.given
        elif not isinstance(operation, keras.layers.Layer):
            settings = {k: v for k, v in vars(operation).items() if k[0] != "_" and k != "name"}
            operation = [type(operation), settings]
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
