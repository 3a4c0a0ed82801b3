"""Operations on a cell's device for which TensorFlow has no kernel there.

TensorFlow's registry lists the kernels of GPUs in the build for Linux even where there is no GPU,
and those of XLA once XLA has compiled something. An operation without a kernel for a GPU runs on
the host, and its tensors travel there and back; one without a kernel of XLA cannot be compiled, and
on TPUs every cell is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels

Graph: TypeAlias = Any  # a GraphDef
GPU = ("GPU", "DEFAULT")
XLA = ("XLA_GPU_JIT",)
# The runtime itself makes arguments and results of functions, and copies between devices.
_OF_THE_RUNTIME = ("Placeholder", "_Arg", "_Retval", "_Send", "_Recv", "_HostSend", "_HostRecv")


def graphs_of(run: Callable[[], Any]) -> list[Graph]:
    """Return the graphs of the functions that `run` calls, each with the functions inside it."""
    with context.collect_graphs(optimized=False) as graphs:
        run()
    return list(graphs)


def without_kernel(
    graphs: Sequence[Graph], devices: Sequence[str] | None, kinds: Sequence[str]
) -> dict[str, str]:
    """Return the operations on some devices that have no kernel: what and types → an example.

    Args:
        graphs: as `graphs_of` returns them.
        devices: devices of the cells, such as "/device:CPU:1", which no other operation has;
            None: look at every operation.
        kinds: the devices for which a kernel is looked up: `GPU` or `XLA`.
    """
    lacking: dict[str, str] = {}
    for graph in graphs:
        for name, node in operations(graph, devices):
            types = _types(node)
            if not has_kernel(node.op, types, kinds):
                text = ", ".join(f"{key}={'|'.join(types[key])}" for key in sorted(types))
                lacking.setdefault(f"{node.op} ({text})", name)
    return lacking


def operations(graph: Graph, devices: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the operations on some devices, with their names: function/operation."""
    functions = {function.signature.name: function for function in graph.library.function}
    visited = set()

    def visit(nodes: Sequence[Any], path: str, inherited: bool) -> Iterator[tuple[str, Any]]:
        for node in nodes:
            is_there = inherited
            if node.device and devices is not None:
                is_there = any(node.device.endswith(device) for device in devices)
            if is_there and node.op not in _OF_THE_RUNTIME:
                yield f"{path}{node.name}", node
            for called in _functions(node):
                if called in functions and (called, is_there) not in visited:
                    visited.add((called, is_there))
                    yield from visit(functions[called].node_def, f"{called}/", is_there)

    yield from visit(graph.node, "", devices is None)


def _functions(node: Any) -> Iterator[str]:
    """Yield the names of the functions that an operation calls."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def _types(node: Any) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of an operation by attribute; those of lists, each once."""
    types = {}
    for name, value in node.attr.items():
        if value.HasField("type"):
            types[name] = (tf.dtypes.as_dtype(value.type).name,)
        elif value.list.type:
            types[name] = tuple(sorted({tf.dtypes.as_dtype(t).name for t in value.list.type}))
    return {name: of_one for name, of_one in types.items() if not name.startswith("_")}


def has_kernel(op: str, types: dict[str, tuple[str, ...]], kinds: Sequence[str]) -> bool:
    """Return whether an operation of these types has a kernel for one of the kinds of devices."""
    return any(
        all(set(types.get(name, ())) <= allowed for name, allowed in constraints.items())
        for kind, constraints in _kernels(op)
        if kind in kinds
    )


@functools.cache
def _kernels(op: str) -> list[tuple[str, dict[str, set[str]]]]:
    """Return the kernels of an operation: kind of device, and the dtypes that it takes."""
    _register_xla()
    return [
        (
            kernel.device_type,
            {
                constraint.name: {
                    tf.dtypes.as_dtype(t).name for t in constraint.allowed_values.list.type
                }
                for constraint in kernel.constraint
            },
        )
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
        if not kernel.label
    ]


@functools.cache
def _register_xla() -> None:
    """Let XLA compile something: it registers its kernels then."""
    tf.function(lambda x: x + 1.0, jit_compile=True)(tf.zeros([]))
