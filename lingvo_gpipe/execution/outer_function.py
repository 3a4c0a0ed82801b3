"""Outer functions: they call the cells' programs, and TensorFlow does not optimise them.

An outer function consists of calls. The graph optimizer would visit the function of every call and
change nothing; with 128 layers, this is most of the time to the first step. The programs themselves
are optimised where they are called. TensorFlow's option for this has no public interface.

Nothing is ordered by automatic control dependencies. They would copy every result by an operation
without a device, which TensorFlow places in the process that calls; and that process would receive
a message for every assignment. A function that assigns waits for its assignments once on each
device, before its results are copied so: it should return only scalars.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping

import tensorflow as tf

from lingvo_gpipe.nests import Nest


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Let functions that are called inside the `with` block run their graphs as traced."""
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context as tf_context

    context = tf_context.context()
    before = context.function_call_options
    options = copy.copy(before)
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    options.config_proto_serialized = config
    context.function_call_options = options
    try:
        yield
    finally:
        context.function_call_options = before


class OuterFunction:
    """A function of nests of tensors that calls programs; traced for each shape, never optimised.

    It is traced under the caller's options, so that the programs inside are optimised. When it is
    called inside another function, its calls become part of that function.

    Attributes:
        traces: how often it was traced.
    """

    def __init__(self, function: Callable[..., Nest], *, assigns: bool = False) -> None:
        """Make it; nothing is traced yet.

        Args:
            function: nests of tensors → nest of tensors.
            assigns: whether its results wait for what it assigns. Only its own data and control
                edges order assignments: a value that is assigned must depend on whatever has to
                be read of the variable before.
        """
        self._function = function
        self._traced = tf.function(
            functools.partial(_after_effects, function) if assigns else function,
            autograph=False,
            experimental_attributes={"_disable_acd": True},
        )
        self._concretes: dict[Hashable, tf.types.experimental.ConcreteFunction] = {}

    @property
    def traces(self) -> int:
        """How often it was traced."""
        return len(self._concretes)

    def __call__(self, *arguments: Nest) -> Nest:
        """Call it; trace it first if the shapes are new. None stands for no tensor."""
        if tf.inside_function():
            return self._function(*arguments)
        shapes = tuple(
            None if leaf is None else (tuple(leaf.shape), leaf.dtype)
            for leaf in tf.nest.flatten(arguments)
        )
        key = shapes, _structure(arguments)
        if key not in self._concretes:
            self._concretes[key] = self._traced.get_concrete_function(*arguments)
        with unoptimized():
            return self._concretes[key](*arguments)


def _after_effects(function: Callable[..., Nest], *arguments: Nest) -> Nest:
    """Return what a function returns, once all operations with effects that it made have run."""
    result = function(*arguments)
    effects: dict[str, list[tf.Operation]] = {}
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation.type != "ReadVariableOp" and operation.op_def.is_stateful:
            effects.setdefault(operation.device, []).append(operation)
    done = []
    for device, operations in effects.items():
        with tf.device(device), tf.control_dependencies(operations):
            done.append(tf.no_op())
    with tf.control_dependencies(done):
        return tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), result)


def _structure(nest: Nest) -> Hashable:
    """Return the structure of a nest; the order of a dictionary's keys does not matter."""
    if isinstance(nest, Mapping):
        return tuple((key, _structure(nest[key])) for key in sorted(nest))
    if isinstance(nest, list | tuple):
        return tuple(map(_structure, nest))
    return None
