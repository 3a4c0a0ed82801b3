"""Networks for the sameness tests, each with its reference in plain TensorFlow.

A reference does not depend on the pipeline. It receives weights by path, one micro-batch of the
fields and a function that returns a layer's seed, and returns the sums of its losses, the inputs of
its batch norms and its hits. Widths differ from layer to layer, so that a swap is detected.
"""

# ruff: noqa: ARG001, ARG002 (one signature for all references and layers)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import hyperparams, layers
from lingvo_gpipe.layers import base
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest

N = 10  # examples: 3 and 8 micro-batches are ragged


@dataclasses.dataclass
class Sums:
    """Results of a reference for one micro-batch."""

    losses: dict[str, tf.Tensor]
    norm_inputs: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    hits: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Net:
    """A network, its mini-batch and its reference."""

    name: str
    layers: Callable[[], list[Any]]
    fields: Callable[[], dict[str, Any]]
    reference: Callable[[dict[str, tf.Tensor], dict[str, Any], Callable[[str], tf.Tensor]], Sums]
    weights: dict[str, tuple[float, float]]  # loss → (coefficient, weight of the mini-batch)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    momentum: float = 0.9  # momentum of its batch norms


def data(*shape: int, seed: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 77], dtype=tf.float64)


def ids(*shape: int, seed: int, below: int) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, [seed, 78], 0, below, dtype=tf.int32)


def dense(w: dict[str, tf.Tensor], name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.matmul(x, w[f"{name}/kernel"]) + w[f"{name}/bias"]


def dropped(x: tf.Tensor, rate: float, seed: tf.Tensor) -> tf.Tensor:
    keep = tf.random.stateless_uniform(tf.shape(x), seed) >= rate
    return tf.where(keep, x / (1.0 - rate), tf.zeros_like(x))


def normed(w: dict[str, tf.Tensor], name: str, x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    return (x - mean) / tf.sqrt(variance + 1e-3) * w[f"{name}/gamma"] + w[f"{name}/beta"]


def cross_entropy(logits: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
    return -tf.gather(tf.nn.log_softmax(logits), label, batch_dims=label.shape.rank)


def right(logits: tf.Tensor, label: tf.Tensor, real: Any = 1.0) -> tf.Tensor:
    hits = tf.argmax(logits, -1, tf.int32) == label
    return tf.reduce_sum(tf.cast(hits, tf.float64) * real)


def squared(x: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(x - target)) / float(target.shape[1])


# --- convolution, batch norm, dropout -------------------------------------------------------------


def _conv_layers() -> list[Any]:
    return [
        layers.Conv2D.Params(name="conv1", filters=4, reads=("image",)),
        layers.BatchNorm.Params(name="bn1", momentum=0.9),
        layers.Activation.Params(name="relu1", activation="relu"),
        layers.Dropout.Params(name="drop1", rate=0.3),
        layers.Conv2D.Params(name="conv2", filters=6, strides=2),
        layers.BatchNorm.Params(name="bn2", momentum=0.9),
        layers.Activation.Params(name="relu2", activation="relu"),
        layers.Flatten.Params(name="flat"),
        layers.Dropout.Params(name="drop2", rate=0.5),
        layers.Softmax.Params(name="head", classes=3),
    ]


def _conv(w: Any, field: Any, draw: Any) -> Sums:
    x = field["image"]
    first = tf.nn.conv2d(x, w["conv1/kernel"], 1, "SAME") + w["conv1/bias"]
    x = dropped(tf.nn.relu(normed(w, "bn1", first)), 0.3, draw("drop1"))
    second = tf.nn.conv2d(x, w["conv2/kernel"], 2, "SAME") + w["conv2/bias"]
    x = tf.nn.relu(normed(w, "bn2", second))
    x = dropped(tf.reshape(x, [x.shape[0], -1]), 0.5, draw("drop2"))
    logits = dense(w, "head", x)
    return Sums(
        {"loss": tf.reduce_sum(cross_entropy(logits, field["label"]))},
        {"bn1": first, "bn2": second},
        right(logits, field["label"]),
    )


CONV = Net(
    "conv",
    _conv_layers,
    lambda: {"image": data(N, 6, 6, 2, seed=1) * 2 + 1, "label": ids(N, seed=2, below=3)},
    _conv,
    {"loss": (1.0, N)},
)

# --- dense ----------------------------------------------------------------------------------------


def _dense_layers() -> list[Any]:
    return [
        layers.Dense.Params(name="d0", units=7, activation="tanh"),
        layers.Dense.Params(name="d1", units=6, activation="tanh"),
        layers.Dense.Params(name="d2", units=6, activation="tanh"),
        layers.Dense.Params(name="d3", units=6, activation="tanh"),
        layers.Dense.Params(name="d4", units=3),
        layers.MeanSquaredError.Params(name="error"),
    ]


def _dense(w: Any, field: Any, draw: Any) -> Sums:
    x = field["x"]
    for name in ("d0", "d1", "d2", "d3"):
        x = tf.tanh(dense(w, name, x))
    return Sums({"loss": squared(dense(w, "d4", x), field["target"])})


DENSE = Net(
    "dense",
    _dense_layers,
    lambda: {"x": data(N, 5, seed=3), "target": data(N, 3, seed=4)},
    _dense,
    {"loss": (1.0, N)},
)

# --- skips with several consumers, an auxiliary loss in the middle, a field without batch ---------


class Gain(base.Layer):
    """x: [B, D], gain: [D] (no batch dimension) → x · gain."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(inputs[0])

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        x, gain = inputs
        return x * gain


def _skip_layers() -> list[Any]:
    def linear(name: str, units: int, read: str, write: str) -> Any:
        return layers.Dense.Params(
            name=name, units=units, activation="tanh", reads=(read,), writes=(write,)
        )

    return [
        linear("d0", 5, "x", "a"),
        linear("d1", 6, "a", "b"),
        layers.AuxiliaryLoss.Params(
            name="aux", reads=("b",), writes=("b2",), examples="target", coefficient=0.3
        ),
        linear("d2", 6, "b2", "c"),
        layers.Add.Params(name="add", reads=("c", "b", "b2"), writes=("d",)),
        linear("d3", 5, "d", "e"),
        Gain.Params(name="gain", reads=("e", "gain"), writes=("e",)),
        layers.Concat.Params(name="cat", reads=("e", "a", "x"), writes=("f",)),
        linear("d4", 3, "f", "y"),
        layers.MeanSquaredError.Params(name="error", reads=("y", "target"), writes=("y",)),
    ]


def _skip(w: Any, field: Any, draw: Any) -> Sums:
    def linear(name: str, x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(dense(w, name, x))

    a = linear("d0", field["x"])
    b = linear("d1", a)
    e = linear("d3", linear("d2", b) + b + b) * field["gain"]
    y = linear("d4", tf.concat([e, a, field["x"]], -1))
    return Sums(
        {
            "auxiliary_loss": tf.reduce_sum(tf.reduce_mean(tf.square(b), -1)),
            "loss": squared(y, field["target"]),
        }
    )


SKIP = Net(
    "skip",
    _skip_layers,
    lambda: {"x": data(N, 4, seed=5), "target": data(N, 3, seed=6), "gain": data(N, 5, seed=7)},
    _skip,
    {"loss": (1.0, N), "auxiliary_loss": (0.3, N)},
)

# --- tied embedding and softmax, losses by real tokens --------------------------------------------


def _tied_layers() -> list[Any]:
    return [
        layers.Embedding.Params(name="emb", vocabulary=11, units=6, reads=("ids",), writes=("x",)),
        layers.Dense.Params(name="d0", units=8, activation="tanh"),
        layers.Dropout.Params(name="drop", rate=0.25),
        layers.Dense.Params(name="d1", units=6, activation="tanh"),
        layers.Dense.Params(name="d2", units=6, tie={"kernel": "d3/kernel"}),
        layers.Dense.Params(name="d3", units=6, activation="tanh"),
        layers.SequenceSoftmax.Params(
            name="head",
            vocabulary=11,
            reads=("x", "label", "real"),
            tie={"kernel": "emb/table"},
        ),
    ]


def _tied(w: Any, field: Any, draw: Any) -> Sums:
    x = tf.tanh(dense(w, "d0", tf.gather(w["emb/table"], field["ids"])))
    x = tf.tanh(dense(w, "d1", dropped(x, 0.25, draw("drop"))))
    x = tf.matmul(x, w["d3/kernel"]) + w["d2/bias"]
    x = tf.tanh(dense(w, "d3", x))
    logits = tf.matmul(x, w["emb/table"], transpose_b=True) + w["head/bias"]
    each = cross_entropy(logits, field["label"]) * field["real"]
    hits = right(logits, field["label"], field["real"])
    return Sums({"loss": tf.reduce_sum(each)}, hits=hits)


LENGTHS = (7, 1, 4, 2, 7, 3, 1, 5, 6, 2)
TIED = Net(
    "tied",
    _tied_layers,
    lambda: {
        "ids": ids(N, 7, seed=8, below=11),
        "label": ids(N, 7, seed=9, below=11),
        "real": tf.cast(tf.sequence_mask(LENGTHS, 7), tf.float64),
    },
    _tied,
    {"loss": (1.0, float(sum(LENGTHS)))},
)

# --- nested values of mixed dtypes ----------------------------------------------------------------


class Gather(base.Layer):
    """A nest {image, parts: (ids, mask)} → {"mean": [B, 3] floating, "count": [B] int32}."""

    class Params(base.Layer.Params):
        scale: float = hyperparams.field(1.0, "Factor on the mean.")

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            size = inputs[0]["image"].shape[0]
            dtype = inputs[0]["image"].dtype
            table = base.VariableSpec("table", (9, 3), dtype, base.initializer("glorot_uniform"))
            return base.Meta(
                {"mean": tf.TensorSpec([size, 3], dtype), "count": tf.TensorSpec([size], tf.int32)},
                (table,),
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        numbers, mask = inputs["parts"]
        present = tf.cast(mask, inputs["image"].dtype)[..., tf.newaxis]
        mean = tf.reduce_sum(tf.gather(theta["table"], numbers) * present, 1)
        pixels = tf.reduce_mean(inputs["image"], [1, 2], keepdims=False)
        count = tf.reduce_sum(tf.cast(mask, tf.int32), 1)
        return {"mean": mean * self.params.scale + pixels, "count": count}


class Divide(base.Layer):
    """{"mean": [B, 3], "count": [B]} → mean / (1 + count)."""

    class Params(base.Layer.Params):
        def _meta(self, *inputs: SpecNest) -> base.Meta:
            return base.Meta(inputs[0]["mean"])

    def fprop(self, theta: Theta, inputs: Nest, ctx: base.Context) -> Nest:
        mean = inputs["mean"]
        return mean / (1 + tf.cast(inputs["count"], mean.dtype))[:, tf.newaxis]


def _mixed_layers() -> list[Any]:
    return [
        Gather.Params(name="gather", scale=0.5, reads=("inputs",), writes=("pair",)),
        Divide.Params(name="divide", reads=("pair",), writes=("x",)),
        layers.Dense.Params(name="d0", units=6, activation="tanh"),
        layers.Dense.Params(name="d1", units=4, activation="tanh"),
        layers.Dense.Params(name="d2", units=5, reads=("x",), writes=("logits",)),
        layers.Softmax.Params(name="head", classes=3, reads=("logits", "label")),
    ]


def _mixed(w: Any, field: Any, draw: Any) -> Sums:
    numbers, mask = field["inputs"]["parts"]
    present = tf.cast(mask, tf.float64)
    rows = tf.einsum("btd,bt->bd", tf.gather(w["gather/table"], numbers), present)
    x = rows * 0.5 + tf.reduce_mean(field["inputs"]["image"], [1, 2])
    x = x / (1 + tf.reduce_sum(present, 1, keepdims=True))
    x = tf.tanh(dense(w, "d1", tf.tanh(dense(w, "d0", x))))
    logits = dense(w, "head", dense(w, "d2", x))
    total = tf.reduce_sum(cross_entropy(logits, field["label"]))
    return Sums({"loss": total}, hits=right(logits, field["label"]))


MIXED = Net(
    "mixed",
    _mixed_layers,
    lambda: {
        "inputs": {
            "image": data(N, 2, 2, 3, seed=10),
            "parts": (ids(N, 4, seed=11, below=9), ids(N, 4, seed=12, below=2) > 0),
        },
        "label": ids(N, seed=13, below=3),
    },
    _mixed,
    {"loss": (1.0, N)},
)

# --- a wholly frozen cell, a tie with one frozen side, cells without weights ----------------------


def _frozen_layers() -> list[Any]:
    return [
        layers.Dense.Params(name="f0", units=6, activation="tanh", trainable=False),
        layers.BatchNorm.Params(name="bn", trainable=False),
        layers.Dense.Params(name="f1", units=6),
        layers.Activation.Params(name="tanh", activation="tanh"),
        layers.Dense.Params(name="d0", units=6, activation="tanh"),
        layers.Dense.Params(name="d1", units=6, tie={"kernel": "f1/kernel"}),
        layers.Dropout.Params(name="drop", rate=0.4),
        layers.Dense.Params(name="d2", units=3),
        layers.MeanSquaredError.Params(name="error"),
    ]


def _frozen(w: Any, field: Any, draw: Any) -> Sums:
    x = tf.tanh(dense(w, "f0", field["x"]))
    scale = w["bn/gamma"] / np.sqrt(1.0 + 1e-3)  # moving mean 0, variance 1: as initialised
    x = tf.tanh(dense(w, "f1", x * scale + w["bn/beta"]))
    x = tf.tanh(dense(w, "d0", x))
    x = dropped(tf.matmul(x, w["f1/kernel"]) + w["d1/bias"], 0.4, draw("drop"))
    return Sums({"loss": squared(dense(w, "d2", x), field["target"])})


FROZEN = Net(
    "frozen",
    _frozen_layers,
    lambda: {"x": data(N, 5, seed=14), "target": data(N, 3, seed=15)},
    _frozen,
    {"loss": (1.0, N)},
    options={"frozen": ("f1/*",)},
    frozen=("f0/kernel", "f0/bias", "bn/gamma", "bn/beta", "f1/kernel", "f1/bias"),
)

# --- a layer recomputed inside its cell, which collects a loss and draws --------------------------


def _recomputed_layers() -> list[Any]:
    return [
        layers.Dense.Params(name="d0", units=6, activation="tanh"),
        layers.Residual.Params(
            name="block",
            recompute=True,
            body=[
                layers.Dense.Params(name="inner", units=6, activation="tanh"),
                layers.BatchNorm.Params(name="bn", momentum=0.8),
                layers.AuxiliaryLoss.Params(name="aux", examples="target", coefficient=2.0),
                layers.Dropout.Params(name="drop", rate=0.2),
            ],
        ),
        layers.Dense.Params(name="d1", units=7, activation="tanh"),
        layers.Dense.Params(name="d2", units=3),
        layers.MeanSquaredError.Params(name="error", coefficient=0.5),
    ]


def _recomputed(w: Any, field: Any, draw: Any) -> Sums:
    x = tf.tanh(dense(w, "d0", field["x"]))
    inside = tf.tanh(dense(w, "block/body/inner", x))
    y = normed(w, "block/body/bn", inside)
    auxiliary = tf.reduce_sum(tf.reduce_mean(tf.square(y), -1))
    x = x + dropped(y, 0.2, draw("block/body/drop"))
    x = dense(w, "d2", tf.tanh(dense(w, "d1", x)))
    return Sums(
        {"auxiliary_loss": auxiliary, "loss": squared(x, field["target"])},
        {"block/body/bn": inside},
    )


RECOMPUTED = Net(
    "recomputed",
    _recomputed_layers,
    lambda: {"x": data(N, 5, seed=16), "target": data(N, 3, seed=17)},
    _recomputed,
    {"loss": (0.5, N), "auxiliary_loss": (2.0, N)},
    momentum=0.8,
)

NETS = {n.name: n for n in (CONV, DENSE, SKIP, TIED, MIXED, FROZEN, RECOMPUTED)}
