"""Small pipelines with their plain TensorFlow equals, and helpers to inspect their graphs."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import layers, pipelining

N = 8  # examples of a mini-batch

CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def data(*shape: int, seed: int, dtype: tf.DType = tf.float64) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 91], dtype=dtype)


def batch(count: int = N, dtype: tf.DType = tf.float64) -> dict[str, tf.Tensor]:
    return {"x": data(N, 5, seed=1, dtype=dtype)[:count], "target": data(N, 3, seed=2)[:count]}


def dense(name: str, units: int, **fields: Any) -> Any:
    return layers.Dense.Params(name=name, units=units, activation="tanh", **fields)


def mlp(*between: Any) -> list[Any]:
    """Six dense layers of different widths and a loss; `between` comes in the middle."""
    widths = (7, 6, 8, 4, 9, 3)
    stack = [dense(f"d{n}", units) for n, units in enumerate(widths)]
    return [*stack[:3], *between, *stack[3:], layers.MeanSquaredError.Params(name="error")]


def pipe(given: list[Any] | None = None, **fields: Any) -> pipelining.PipeliningLayer:
    settings: dict[str, Any] = {"layers": given or mlp(), "dtype": "float64", "seed": 3}
    made: pipelining.PipeliningLayer = pipelining.PipeliningLayer.Params(
        **(settings | fields)
    ).instantiate()
    return made


def three(**fields: Any) -> pipelining.PipeliningLayer:
    """K=3 of two dense layers each, M=4."""
    settings: dict[str, Any] = {
        "num_partitions": 3,
        "num_micro_batches": 4,
        "cuts": (2, 2, 3),
    }
    return pipe(**(settings | fields))


def plain(weights: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
    for n in range(6):
        x = tf.tanh(tf.matmul(x, weights[f"d{n}/kernel"]) + weights[f"d{n}/bias"])
    return x


def plain_loss(weights: dict[str, Any], fields: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.reduce_mean(tf.square(plain(weights, fields["x"]) - fields["target"]))


def graph_of(run: Any) -> Any:
    """Return the graph of a caller's own function around `run`."""
    return tf.function(run, autograph=False).get_concrete_function().graph


def step_graph(own: pipelining.PipeliningLayer, fields: dict[str, Any] | None = None) -> Any:
    given = batch() if fields is None else fields
    own.build(given)

    def step() -> Any:
        result = own.value_and_gradients(given)
        return result.loss, result.gradients

    return graph_of(step)


def calls(graph: Any) -> list[tf.Operation]:
    """Return the calls of programs, in the order of issue."""
    return [op for op in graph.get_operations() if op.type in CALLS]


def called(op: tf.Operation) -> str:
    """Return the kind of the program that a call runs."""
    name = op.get_attr("f").name
    return next(kind for kind in ("forward", "backward", "fused") if f"_{kind}_" in name)


def before(op: tf.Operation) -> set[tf.Operation]:
    """Return all operations that must have run before one."""
    found: set[tf.Operation] = set()
    left = [op]
    while left:
        one = left.pop()
        new = {t.op for t in one.inputs}.union(one.control_inputs) - found
        found |= new
        left += new
    return found


def trace_counts(own: pipelining.PipeliningLayer) -> dict[str, int]:
    """Return how many cell programs and outer functions were traced so far."""
    functions = sum(function.traces for function in own._functions.values())
    return {"programs": own.executor.num_traces, "functions": functions}


def count(graph: Any) -> collections.Counter[str]:
    return collections.Counter(op.type for op in graph.get_operations())


def close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert set(got) == set(wanted)
    for path, value in wanted.items():
        largest = float(np.abs(value).max())
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance * largest, err_msg=path)
