"""Outer functions: they call the cells' programs, and TensorFlow does not optimise them.

An outer function consists of calls. The graph optimizer would visit the function of every call and
change nothing; with 128 layers, this is most of the time to the first step. The programs themselves
are optimised where they are called. TensorFlow's option for this has no public interface.

Results stay on the devices that made them. With automatic control dependencies, every result would
be copied by an operation without a device, which TensorFlow places in the process that calls. So a
function is traced without them unless it assigns variables that it reads; then it should return
only scalars.
"""

from __future__ import annotations

import contextlib
import copy
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
            assigns: whether it assigns variables that it reads. In any other function, nothing
                orders an assignment except the data and control edges that the function makes.
        """
        self._function = function
        attributes = {} if assigns else {"_disable_acd": True}
        self._traced = tf.function(function, autograph=False, experimental_attributes=attributes)
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


def _structure(nest: Nest) -> Hashable:
    """Return the structure of a nest; the order of a dictionary's keys does not matter."""
    if isinstance(nest, Mapping):
        return tuple((key, _structure(nest[key])) for key in sorted(nest))
    if isinstance(nest, list | tuple):
        return tuple(map(_structure, nest))
    return None
