"""A step of plain Keras on one device: what every rival has to compute, and what a step costs.

`python -m benchmarks.rivals.plain KIND reference FILE` writes the mini-batch, weights, loss and
gradients to FILE; `… KIND step FILE` and `… KIND single FILE` print one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals import measures
from benchmarks.support import blocks

SINGLE_ROWS = 512
SINGLE_TURNS = 40
_ATTENTION = ("query", "key", "value", "output")


class Model:
    """The blocks of a kind in plain Keras, with the weights of the reference."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        weights: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        """Make the model.

        Args:
            kind: of `blocks.KINDS`.
            shape: of x, without the batch.
            weights: path → value.
        """
        import keras

        self._values = weights
        self._variables: dict[str, Any] = {}
        x = inputs = keras.Input(shape)
        for layer in dict.fromkeys(path.split("/")[0] for path in weights):
            if kind == "transformer":
                x = self._transformer(layer, x)
            elif kind == "mlp":
                kernel = weights[f"{layer}/kernel"]
                dense = keras.layers.Dense(kernel.shape[1], activation="gelu", use_bias=False)
                x = self._called(layer, dense, x, "kernel")
            else:
                conv = keras.layers.Conv2D(
                    weights[f"{layer}/bias"].size, 3, padding="same", activation="relu"
                )
                x = self._called(layer, conv, x, "kernel", "bias")
        self._model = keras.Model(inputs, x)

    def loss_and_gradients(self, x: Any, target: Any) -> tuple[Any, list[Any]]:
        """Return the mean squared error and its gradients, in the order of `paths`."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self._model(x, training=True) - target))
        return loss, tape.gradient(loss, [v.value for v in self._variables.values()])

    def by_path(self, gradients: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return gradients of `loss_and_gradients` by path, in the reference's shapes."""
        found = zip(self._variables, gradients, strict=True)
        return {path: value.numpy().reshape(self._values[path].shape) for path, value in found}

    def _called(self, path: str, layer: Any, x: Any, *names: str) -> Any:
        """Call a layer and set its weights, in their order, to the values of those names."""
        y = layer(*x) if isinstance(x, tuple) else layer(x)
        for variable, name in zip(layer.trainable_variables, names, strict=True):
            value = self._values[f"{path}/{name}"]
            variable.assign(value.reshape(variable.shape))
            self._variables[f"{path}/{name}"] = variable
        return y

    def _transformer(self, path: str, x: Any, heads: int = 4) -> Any:
        """Pre-norm self-attention and feed-forward part of x [B, T, D]."""
        import keras

        depth = x.shape[-1]
        norm = keras.layers.LayerNormalization(epsilon=1e-6)
        y = self._called(f"{path}/attention_norm", norm, x, "gamma", "beta")
        attention = keras.layers.MultiHeadAttention(heads, depth // heads)
        names = [f"{part}/{name}" for part in _ATTENTION for name in ("kernel", "bias")]
        built = (y, y)
        x = x + self._called(f"{path}/attention", attention, built, *names)
        norm = keras.layers.LayerNormalization(epsilon=1e-6)
        y = self._called(f"{path}/feed_forward_norm", norm, x, "gamma", "beta")
        start = f"{path}/feed_forward/"
        dense = dict.fromkeys(p.split("/")[2] for p in self._values if p.startswith(start))
        for name, activation in zip(dense, ("relu", "linear"), strict=True):
            units = self._values[f"{start}{name}/bias"].size
            y = self._called(
                f"{start}{name}", keras.layers.Dense(units, activation), y, "kernel", "bias"
            )
        return x + y


def write_reference(kind: str, path: Path) -> None:
    """Write the first weights of our network, and the loss and gradients of plain Keras."""
    from lingvo_gpipe import pipelining

    layers, batch = blocks.network(kind)
    pipe = pipelining.PipeliningLayer.Params(layers=layers).instantiate()
    pipe.build(batch)
    weights = {path: variable.numpy() for path, variable in pipe.weights.items()}
    model = Model(kind, tuple(batch["x"].shape[1:]), weights)
    loss, gradients = model.loss_and_gradients(batch["x"], batch["target"])
    metas = [info.meta for info in pipe.analysis.layers]
    measures.Reference(
        loss=float(loss),
        flops=sum(meta.flops_forward + meta.flops_backward for meta in metas),
        batch={"x": batch["x"].numpy()},
        weights=weights,
        gradients=model.by_path(gradients),
    ).write(path)


def measure(kind: str, path: Path) -> dict[str, Any]:
    """Return what a step on the whole mini-batch takes."""
    import tensorflow as tf

    _one_thread()
    known = measures.Reference.read(path)
    x = tf.constant(known.batch["x"])
    target = tf.zeros_like(x)
    resident = measures.Resident()
    model = Model(kind, tuple(x.shape[1:]), known.weights)
    step = tf.function(model.loss_and_gradients, autograph=False)
    loss, by_variable = step(x, target)
    gradients = model.by_path(by_variable)
    return {
        "loss": float(loss),
        "error": known.worst_error(gradients),
        "paths": list(gradients),
        "s": blocks.seconds(lambda: float(step(x, target)[0])),
        "resident_mib": resident.grown_mib(),
        "product_s": measures.product_s(product(1)),
    }


def measure_single(kind: str, path: Path) -> dict[str, Any]:
    """Return how much longer our step with K=1, M=1 takes than the plain one, turn by turn."""
    import tensorflow as tf

    from lingvo_gpipe import pipelining

    _one_thread()
    known = measures.Reference.read(path)
    x = tf.constant(known.batch["x"][:SINGLE_ROWS])
    batch = {"x": x, "target": tf.zeros_like(x)}
    model = Model(kind, tuple(x.shape[1:]), known.weights)
    plain = tf.function(model.loss_and_gradients, autograph=False)
    loss, by_variable = plain(x, batch["target"])
    single = dataclasses.replace(known, loss=float(loss), gradients=model.by_path(by_variable))
    layers, _ = blocks.network(kind)
    steps: dict[str, Callable[[], float]] = {
        "plain": lambda: float(plain(x, batch["target"])[0]),
    }
    for name, schedule, recompute in (("kept", "gpipe", "never"), ("fused", "1f1b", "full")):
        pipe = pipelining.PipeliningLayer.Params(
            layers=layers, schedule=schedule, recompute=recompute
        ).instantiate()
        pipe.build(batch)
        own = pipe.value_and_gradients(batch)
        given = {"loss": float(own.loss), "error": single.worst_error(_numpy(own.gradients))}
        single.check(f"{kind}, K=1, {name}", {**given, "paths": list(own.gradients)})
        steps[name] = _step(pipe, batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    products = []
    multiply = product(1)
    for turn in range(SINGLE_TURNS + 3):
        for name, step in steps.items():
            begun_s = time.perf_counter()
            step()
            if turn > 2:
                times[name].append(time.perf_counter() - begun_s)
        products.append(measures.product_s(multiply, 3))

    def over(name: str) -> float:
        pairs = zip(times[name], times["plain"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs) - 1

    flops = known.flops * SINGLE_ROWS / len(known.batch["x"])
    rate = 2 * measures.SIDE**3 / statistics.median(products)
    shares = {
        f"{name}_share": flops / statistics.median(found) / rate for name, found in times.items()
    }
    seconds = statistics.median(times["plain"])
    return {"kept": over("kept"), "fused": over("fused"), "plain_s": seconds, **shares}


def _numpy(tensors: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {path: tensor.numpy() for path, tensor in tensors.items()}


def _step(pipe: Any, batch: Mapping[str, Any]) -> Callable[[], float]:
    """Return a function that runs a step of a pipeline and waits for it."""
    return lambda: float(pipe.value_and_gradients(batch).loss)


def product(devices: int) -> Callable[[], Any]:
    """Return a product of two 1,024² matrices on each of some devices at the same time."""
    import tensorflow as tf

    one = tf.ones([measures.SIDE, measures.SIDE])

    @tf.function(autograph=False)
    def multiplied(matrix: tf.Tensor) -> tf.Tensor:
        corners = []
        for device in range(devices):
            with tf.device(f"/device:CPU:{device}"):
                scaled = matrix if device == 0 else tf.identity(matrix)
                corners.append(tf.matmul(scaled, matrix)[0, 0])
        return tf.add_n(corners)

    return lambda: float(multiplied(one))


def _one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=blocks.KINDS)
    parser.add_argument("what", choices=("reference", "step", "single"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.what == "reference":
        write_reference(options.kind, options.file)
        print("{}")
        return
    run = measure if options.what == "step" else measure_single
    print(json.dumps(run(options.kind, options.file)))


if __name__ == "__main__":
    main()
