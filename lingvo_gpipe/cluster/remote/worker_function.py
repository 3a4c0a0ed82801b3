"""A Python function of one process that another one calls, by an operation on its device.

What it returns stays in the process that ran it, until an operation reads it elsewhere. A
`tf.numpy_function` would run in the process that calls, whatever its device, so that all it returns
would pass there: here the process of the device has registered the function itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors

TOKEN = "pyfunc_0"
"""The name of the first function that a process registers, and a worker registers no other."""

Function = Callable[[bytes], Sequence[Any]]
"""A request → arrays, or bytes, as many as the caller expects."""


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """A function while operations can call it: as long as this object lives.

    Attributes:
        token: its name in this process.
        graph: what TensorFlow ties its life to.
    """

    token: str
    graph: tf.Graph


def register(function: Function) -> Registered:
    """Let operations on the devices of this process call `function`, on threads of TensorFlow."""
    graph = tf.Graph()
    with graph.as_default():
        made = tf.nest.flatten(tf.numpy_function(function, [tf.constant(b"")], [tf.string]))
    return Registered(made[0].op.get_attr("token").decode(), graph)


def register_first(function: Function) -> Registered:
    """Register the function that other processes call by `TOKEN`.

    Raises:
        DeviceError: this process has registered another one before.
    """
    made = register(function)
    if made.token != TOKEN:
        raise errors.DeviceError(
            f"this process has registered other Python functions (its own is {made.token}, "
            f"expected {TOKEN}). Leave out what is imported besides the worker"
        )
    return made


def call(
    device: str, request: tf.Tensor, dtypes: Sequence[tf.DType], token: str = TOKEN
) -> list[tf.Tensor]:
    """Call a function eagerly.

    Args:
        device: a device of the process that registered it; what it returns stays there.
        request: scalar string.
        dtypes: of the tensors that it returns; their number is not checked elsewhere.
        token: name of the function.

    Raises:
        tf.errors.OpError: the process is gone, or has registered no such function, or the function
            raises or returns other dtypes.
    """
    with tf.device(device):
        found = tf.raw_ops.PyFuncStateless(input=[request], token=token, Tout=list(dtypes))
    return list(found)
