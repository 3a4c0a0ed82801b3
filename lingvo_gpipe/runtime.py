"""How outer functions are called: an option of TensorFlow's runtime that has no public door.

An outer function, which is calls and little else, is not optimised as a graph: the optimizer would
walk every call's function again for nothing (128 layers: most of the time to the first step); the
programs themselves are optimised where they are called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as tf_context


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Let functions that are called inside the `with` block run their graphs as traced."""
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


def outer_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a tf.function that issues calls of programs, and is not optimised.

    Traced under the caller's options, so that the programs inside are.
    """
    traced = tf.function(function, autograph=False)
    concretes: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        if tf.inside_function():
            return function(*arguments)
        key = (
            tuple((tuple(t.shape), t.dtype) for t in tf.nest.flatten(arguments)),
            repr(tf.nest.map_structure(lambda _: 0, arguments)),
        )
        if key not in concretes:
            concretes[key] = traced.get_concrete_function(*arguments)
        with unoptimized():
            return concretes[key](*arguments)

    return call
