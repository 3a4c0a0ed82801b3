"""How a cell's programs are traced: never inlined, and pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.graphs import purity

Traced: TypeAlias = "tf.types.experimental.ConcreteFunction"


def trace(
    name: str,
    compute: Callable[..., list[tf.Tensor]],
    arguments: Sequence[tf.Tensor | tf.TensorSpec],
    *,
    cell: int,
    jit: bool,
) -> Traced:
    """Trace a program of a cell.

    Args:
        name: name of the program in profiles and error messages.
        compute: its computation, from one flat list of tensors to another.
        arguments: have the shapes and dtypes of its arguments.
        cell: number of the cell, for messages.
        jit: whether it is compiled with XLA.

    Raises:
        LayerError: it has a stateful operation, or reads a variable.
    """
    compute.__name__ = name
    traced = tf.function(
        compute,
        autograph=False,
        jit_compile=jit or None,
        # A pure program has no order but that of its data, so no control dependencies either.
        experimental_attributes={"_noinline": True, "_disable_acd": True},
    )
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    concrete = traced.get_concrete_function(*specs)
    _check_pure(concrete.graph, cell)
    return concrete


def _check_pure(graph: tf.Graph, cell: int) -> None:
    """Refuse a traced program that has a stateful operation or captures a variable.

    Raises:
        LayerError: naming the operation; its name begins with that of its layer.
    """
    impure = [op for op in graph.get_operations() if not purity.is_pure(op)]
    if impure:
        worst = next((op for op in impure if op.type != "Placeholder"), impure[0])
        raise errors.LayerError(
            f"cell {cell}: {worst.name} ({worst.type}) is stateful, which would serialise "
            "the devices and break recomputation. Use stateless operations seeded by ctx.seed, and "
            "theta and ctx.state in place of variables"
        )
