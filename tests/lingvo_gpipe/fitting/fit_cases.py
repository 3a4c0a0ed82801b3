"""Models, `compile` and `fit` as people write them, for a plain model and for a pipelined one.

Every case trains in float64 on 23 examples in mini-batches of 10, so the last has 3: fewer than a
pipeline's four micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

EXAMPLES, BATCH = 23, 10
_random = np.random.default_rng(0)
X = _random.normal(size=(EXAMPLES, 6))
IDS = _random.integers(1, 9, size=(EXAMPLES, 5)) * (_random.random((EXAMPLES, 5)) < 0.7)
CLASSES = _random.integers(0, 3, size=EXAMPLES)
BINARY = _random.integers(0, 2, size=(EXAMPLES, 1)).astype("float64")
TARGET = _random.normal(size=(EXAMPLES, 2))
TAGS = _random.integers(0, 3, size=(EXAMPLES, 5))
WEIGHTS = _random.uniform(0.2, 2.0, size=EXAMPLES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        model: makes the model.
        compile: makes the arguments of `compile`; objects must not be shared between models.
        fit: makes the arguments of `fit`, other than epochs.
        one_micro_batch: the numbers are Keras' only with M=1.
    """

    model: Callable[[], keras.Model]
    compile: Callable[[], dict[str, Any]]
    fit: Callable[[], dict[str, Any]] = lambda: arrays(CLASSES)
    one_micro_batch: bool = False


def arrays(y: Any, x: Any = X, **more: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, **more}


def dataset(*parts: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def batches(*parts: Any) -> Iterator[Any]:
    while True:
        for first in range(0, EXAMPLES, BATCH):
            yield tuple(part[first : first + BATCH] for part in parts)


class Batches(keras.utils.PyDataset):
    """Mini-batches by number."""

    def __len__(self) -> int:
        return -(-EXAMPLES // BATCH)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return X[rows], CLASSES[rows]


# --- Models -------------------------------------------------------------------------------------


def classifier(outputs: int = 3, activation: str | None = "softmax") -> keras.Model:
    x = keras.Input([6], name="numbers")
    hidden = layers.Dense(8, activation="relu")(layers.Dense(16, activation="tanh")(x))
    return keras.Model(x, layers.Dense(outputs, activation=activation, name="out")(hidden))


def binary() -> keras.Model:
    return classifier(1, "sigmoid")


def regression() -> keras.Model:
    return classifier(2, None)


class Block(layers.Layer):
    """x + attention(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, 3)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.attention.build(shape, shape)

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = self.norm(x)
        return x + self.attention(y, y, training=training)


class Attentive(keras.Model):
    """Attention over three positions, in a loop, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(12), layers.Dense(2)
        self.blocks = [Block() for _ in range(2)]

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = keras.ops.reshape(self.first(x), (-1, 3, 4)) * 1.5
        for block in self.blocks:
            x = block(x, training=training)
        return self.last(keras.ops.mean(x, 1))


class Encoder(keras.Model):
    """Dense layer, dropout and batch norm."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.dense, self.dropout = layers.Dense(8, "tanh"), layers.Dropout(rate)
        self.norm = layers.BatchNormalization()

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.norm(self.dropout(self.dense(x), training=training), training=training)


class TwoHeaded(keras.Model):
    """Two encoders, which train, and a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = [Encoder(), Encoder()]
        self.left, self.right = layers.Dense(2), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        first, second = self.encoders
        hidden = second(first(x, training=training))
        return {"left": self.left(hidden), "right": self.right(hidden) * 0.5}


class Inferring(keras.Model):
    """Encoders that stay in inference, below a dropout that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = [Encoder(0.5), Encoder(0.5)]
        self.dropout, self.last = layers.Dropout(0.0), layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        first, second = self.encoders
        hidden = keras.ops.add(first(x, training=False), second(x, training=False))
        return self.last(self.dropout(hidden, training=training))


class Untold(Inferring):
    """A call without `training`, so that `fit` has all its layers infer."""

    def call(self, x: Any) -> Any:  # type: ignore[override]
        for encoder in self.encoders:
            x = encoder(x)
        return self.last(self.dropout(x))


class OnABase(keras.Model):
    """A functional model, which trains as Keras has it, whatever its norm was called with."""

    def __init__(self) -> None:
        super().__init__()
        x = keras.Input([6])
        hidden = layers.BatchNormalization()(layers.Dense(8)(x), training=False)
        self.base, self.last = keras.Model(x, hidden), layers.Dense(2)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.last(self.base(x, training=training))


class Doubles(layers.Layer):
    """x → 2x in training, which by default it is not."""

    def call(self, x: Any, training: bool = False) -> Any:
        return 2 * x if training else x


class Defaulted(keras.Model):
    """Calls without `training` for layers that have it from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.doubles = layers.Dense(6), layers.Dense(2), Doubles()

    def call(self, x: Any, training: bool = False) -> Any:
        del training
        return self.last(self.doubles(self.first(x)))


class Positioned(keras.Model):
    """A table of positions and a weight of the model itself; neither depends on an input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(1, 1, 2), name="scale", initializer="ones")
        self.first, self.last = layers.Dense(6), layers.Dense(2)
        self.positions = layers.Embedding(3, 2)

    def call(self, x: Any, training: bool | None = None) -> Any:
        del training
        x = keras.ops.reshape(self.first(x), (-1, 3, 2)) * self.scale
        x = x + self.positions(keras.ops.arange(keras.ops.shape(x)[1])) * self.scale
        return self.last(keras.ops.reshape(x, (-1, 6)))


def spectral() -> keras.Model:
    """Return a model whose middle is complex: with three cells, complex numbers cross a cut."""

    def part(function: Callable[[Any], Any]) -> keras.Layer:
        return layers.Lambda(function, output_shape=(8,), dtype="float64")

    x = keras.Input([6])
    hidden = part(lambda v: tf.signal.fft(tf.cast(v, tf.complex128)))(layers.Dense(8)(x))
    hidden = part(lambda v: v * (2 + 0.5j))(hidden)
    return keras.Model(x, layers.Dense(2)(part(lambda v: tf.math.real(tf.signal.ifft(v)))(hidden)))


def folded() -> keras.Model:
    """Return a model with penalties on a layer that reads three rows of each example."""
    x = keras.Input([6])
    rows = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")(
        keras.ops.reshape(x, (-1, 2))
    )
    return keras.Model(x, layers.Dense(2)(keras.ops.reshape(rows, (-1, 12))))


def pairwise() -> keras.Model:
    """Return a model that adds each number of an example to each other one."""
    x = keras.Input([6])
    hidden = layers.Dense(4)(x)
    sums = keras.ops.expand_dims(hidden, 2) + keras.ops.expand_dims(hidden, 1)
    return keras.Model(x, layers.Dense(2)(keras.ops.sum(keras.ops.tanh(sums), axis=-1)))


class Hinge(layers.Layer):
    """Adds a loss of large numbers alone."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.relu(keras.ops.abs(x) - 5.0)))
        return x


def hinged() -> keras.Model:
    x = keras.Input([6])
    return keras.Model(x, layers.Dense(2)(Hinge()(layers.Rescaling(10.0)(layers.Dense(4)(x)))))


def third_regularized() -> keras.Model:
    """Return a model of three equal layers. The last one gets a penalty after it was made."""
    x = keras.Input([6])
    equal = [layers.Dense(6) for _ in range(3)]
    hidden = x
    for layer in equal:
        hidden = layer(hidden)
    equal[2].kernel.regularizer = keras.regularizers.L2(1.0)
    return keras.Model(x, hidden)


def certain_tags() -> keras.Model:
    """Return a model with masked probabilities of nearly 0. Its loss needs their logits."""
    ids = keras.Input([5], dtype="int32")
    large = keras.initializers.RandomNormal(stddev=100.0, seed=3)
    hidden = layers.Dense(4)(layers.Embedding(9, 4, mask_zero=True)(ids))
    return keras.Model(ids, layers.Dense(3, "softmax", kernel_initializer=large)(hidden))


class Tenth(keras.optimizers.SGD):
    """A user's own optimizer, which changes gradients where Keras hands them over."""

    def apply_gradients(self, pairs: Any) -> Any:
        return super().apply_gradients([(0.1 * gradient, weight) for gradient, weight in pairs])


def column() -> keras.Model:
    """Return a model that adds a column to a table; a micro-batch may have as many rows as it."""
    x = keras.Input([6])
    hidden = layers.Dense(16, activation="tanh")(x)
    parts = [layers.Dense(size)(hidden) + layers.Dense(1)(hidden) for size in (2, 3, 5)]
    return keras.Model(x, layers.Dense(2)(layers.Concatenate()(parts)))


def lengths() -> keras.Model:
    """Return a Sequential without an Input, for sequences of any length."""
    return keras.Sequential(
        [layers.Embedding(9, 4), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    )


def bucketed() -> Iterator[Any]:
    """Yield mini-batches of sequences of three lengths."""
    while True:
        for number, first in enumerate(range(0, EXAMPLES, BATCH)):
            rows = slice(first, first + BATCH)
            yield IDS[rows, : 3 + number % 3], TARGET[rows]


def sequential() -> keras.Model:
    """Return a model that has not seen an input."""
    return keras.Sequential(
        [
            layers.Dense(16, activation="tanh"),
            layers.Dense(8),
            layers.Dense(3, "softmax"),
        ]
    )


def regularized() -> keras.Model:
    x = keras.Input([6])
    hidden = layers.Dense(16, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1")(x)
    hidden = layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))(hidden)
    return keras.Model(x, layers.Dense(2)(hidden))


class AddsLoss(layers.Layer):
    """Adds a loss of its inputs, and passes them on."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__(**more)
        self.kind = kind

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * getattr(keras.ops, self.kind)(x**2))
        return x


def adds_loss(kind: str, *, last: bool = False) -> keras.Model:
    x = keras.Input([6])
    if last:
        return keras.Model(x, AddsLoss(kind)(layers.Dense(2)(layers.Dense(8)(x))))
    return keras.Model(x, layers.Dense(2)(AddsLoss(kind)(layers.Dense(8)(x))))


def constrained() -> keras.Model:
    x = keras.Input([6])
    hidden = layers.Dense(16, kernel_constraint=keras.constraints.MaxNorm(0.5), activation="tanh")(
        x
    )
    return keras.Model(x, layers.Dense(2, bias_constraint="non_neg")(layers.Dense(4)(hidden)))


def frozen() -> keras.Model:
    model = regression()
    model.layers[1].trainable = False
    return model


def tied() -> keras.Model:
    shared = layers.Dense(8, activation="tanh")
    x, z = keras.Input([6], name="one"), keras.Input([6], name="other")
    return keras.Model(
        [x, z],
        layers.Dense(2)(layers.Concatenate()([shared(x), layers.Dense(8)(shared(z))])),
    )


def several(outputs: type) -> keras.Model:
    x, z = keras.Input([6], name="numbers"), keras.Input([5], dtype="int32", name="ids")
    words = layers.Flatten()(layers.Embedding(9, 4)(z))
    hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([layers.Dense(8)(x), words]))
    kind, value = (
        layers.Dense(3, name="kind", activation="softmax")(hidden),
        layers.Dense(2, name="value")(x),
    )
    ends: Any = {"kind": kind, "value": value} if outputs is dict else [kind, value]
    return keras.Model({"numbers": x, "ids": z} if outputs is dict else [x, z], ends)


def recurrent() -> keras.Model:
    ids = keras.Input([5], dtype="int32")
    return keras.Model(
        ids,
        layers.Dense(3, "softmax")(layers.LSTM(6)(layers.Embedding(9, 4, mask_zero=True)(ids))),
    )


def tagger() -> keras.Model:
    """Return a model whose output has a mask."""
    ids = keras.Input([5], dtype="int32")
    hidden = layers.LSTM(6, return_sequences=True)(layers.Embedding(9, 4, mask_zero=True)(ids))
    return keras.Model(ids, layers.Dense(3, "softmax")(hidden))


def convolution() -> keras.Model:
    x = keras.Input([6])
    grid = layers.Conv2D(4, 2, activation="relu")(layers.Reshape([2, 3, 1])(x))
    return keras.Model(x, layers.Dense(3, "softmax")(layers.Flatten()(grid)))


def normalized() -> keras.Model:
    x = keras.Input([6])
    hidden = layers.BatchNormalization()(layers.Dense(16)(x))
    return keras.Model(
        x, layers.Dense(3, "softmax")(layers.BatchNormalization(momentum=0.9)(hidden))
    )


def swapped_averages() -> dict[str, Any]:
    """Return arguments of `fit` that swap averaged weights in for each validation."""
    return arrays(
        CLASSES,
        validation_data=(X[:9], CLASSES[:9]),
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )


# --- What compile takes -------------------------------------------------------------------------


class KeepsAll(keras.metrics.Metric):
    """The median error of all examples, of which it keeps a list."""

    def __init__(self, name: str = "median", **more: Any) -> None:
        super().__init__(name=name, **more)
        self.errors = self.add_weight(shape=(200,), initializer="zeros", name="errors")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del sample_weight
        error = keras.ops.mean(keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred), -1)
        places = keras.ops.arange(keras.ops.shape(error)[0]) + self.count
        self.errors.assign(keras.ops.scatter_update(self.errors, places[:, None], error))
        self.count.assign(self.count + keras.ops.shape(error)[0])

    def result(self) -> Any:
        return keras.ops.median(self.errors.value[: self.count.value])


def huber(y_true: Any, y_pred: Any) -> Any:
    """Return a value for each example."""
    error = keras.ops.abs(y_true - y_pred)
    return keras.ops.mean(keras.ops.where(error < 1, 0.5 * error**2, error - 0.5), -1)


def mean_error(y_true: Any, y_pred: Any) -> Any:
    """Return one value for a mini-batch."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def partial_error(y_true: Any, y_pred: Any) -> Any:
    """Return a value for each example, without its labels above one half."""
    error = keras.ops.where(y_true > 0.5, keras.ops.zeros_like(y_pred), y_true - y_pred)
    return keras.ops.mean(error**2, -1)


def total_error(y_true: Any, y_pred: Any) -> Any:
    """Return one value for a mini-batch, which grows with it."""
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


def with_loss(loss: Any, optimizer: Any = "sgd", **more: Any) -> Callable[[], dict[str, Any]]:
    """Return the arguments of `compile`; a lambda makes an argument anew for each model."""

    def arguments() -> dict[str, Any]:
        given = {"loss": loss, "optimizer": optimizer, **more}
        return {
            name: value() if getattr(value, "__name__", "") == "<lambda>" else value
            for name, value in given.items()
        }

    return arguments


SPARSE = "sparse_categorical_crossentropy"
OPTIMIZERS = keras.optimizers
# Each model, loss, optimizer and kind of data is in one case at least; the name says which. Losses
# are with SGD: Adam and clipping hide by how much a gradient is too large.
CASES = {
    "penalties-on-rows": Case(folded, with_loss("mse"), lambda: arrays(TARGET)),
    "pairwise-sums": Case(pairwise, with_loss("mse"), lambda: arrays(TARGET)),
    "added-loss-of-large-numbers": Case(hinged, with_loss("mse"), lambda: arrays(TARGET)),
    "penalty-on-one-of-three": Case(third_regularized, with_loss("mse"), lambda: arrays(X)),
    "masked-probabilities": Case(certain_tags, with_loss(SPARSE), lambda: arrays(TAGS, IDS)),
    "complex-numbers": Case(spectral, with_loss("mse"), lambda: arrays(TARGET)),
    "adam-later-epochs": Case(
        classifier,
        with_loss(SPARSE, lambda: OPTIMIZERS.Adam(0.01), metrics=["accuracy"]),
        lambda: arrays(CLASSES, initial_epoch=1),
    ),
    "unbuilt-sequential-labels-of-columns": Case(
        sequential,
        with_loss(SPARSE, metrics=["accuracy"]),
        lambda: arrays(CLASSES[:, None]),
    ),
    "convolution-rmsprop-dataset": Case(
        convolution,
        with_loss(SPARSE, lambda: OPTIMIZERS.RMSprop(0.01)),
        lambda: {"x": dataset(X, CLASSES), "shuffle": False},
    ),
    "column-beside-a-table-global-clipnorm": Case(
        column,
        with_loss("mse", lambda: OPTIMIZERS.Adam(0.01, global_clipnorm=0.5)),
        lambda: arrays(TARGET),
    ),
    "loss-function": Case(regression, with_loss(huber), lambda: arrays(TARGET)),
    "loss-of-one-number": Case(regression, with_loss(mean_error), lambda: arrays(TARGET)),
    "loss-that-leaves-labels-out": Case(
        regression, with_loss(partial_error), lambda: arrays(TARGET)
    ),
    "loss-of-a-sum": Case(
        regression, with_loss(total_error, lambda: OPTIMIZERS.SGD(1e-3)), lambda: arrays(TARGET)
    ),
    "reduction-sum-moving-average": Case(
        regression,
        with_loss(
            lambda: keras.losses.MeanSquaredError(reduction="sum"),
            lambda: OPTIMIZERS.SGD(1e-3, use_ema=True, ema_overwrite_frequency=4),
        ),
        lambda: arrays(TARGET),
    ),
    "mean-with-sample-weight": Case(
        regression,
        with_loss(lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        lambda: arrays(TARGET, sample_weight=WEIGHTS),
    ),
    "ignored-class-validation-split": Case(
        classifier,
        with_loss(
            lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=1),
            metrics=["accuracy"],
        ),
        lambda: arrays(CLASSES, validation_split=0.3, validation_freq=2),
    ),
    "sample-weight-validation-data": Case(
        classifier,
        with_loss(SPARSE, metrics=["accuracy"], weighted_metrics=["accuracy"]),
        lambda: arrays(
            CLASSES, sample_weight=WEIGHTS, validation_data=(X[:9], CLASSES[:9], WEIGHTS[:9])
        ),
    ),
    "class-weight-py-dataset": Case(
        classifier,
        with_loss(SPARSE),
        lambda: {"x": Batches(), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "shuffle": False},
    ),
    "metrics": Case(
        binary,
        with_loss(
            "binary_crossentropy",
            metrics=lambda: [
                keras.metrics.AUC(num_thresholds=20, name="auc"),
                keras.metrics.F1Score(threshold=0.5),
                keras.metrics.BinaryIoU(name="iou"),
                KeepsAll(),
                "mae",
            ],
        ),
        lambda: arrays(BINARY),
    ),
    "dicts": Case(
        lambda: several(dict),
        with_loss(
            {"kind": SPARSE, "value": "mse"},
            loss_weights={"kind": 0.5, "value": 2.0},
            metrics={"kind": ["accuracy"], "value": ["mae"]},
        ),
        lambda: arrays({"kind": CLASSES, "value": TARGET}, {"numbers": X, "ids": IDS}),
    ),
    "lists": Case(
        lambda: several(list),
        with_loss([SPARSE, "mse"], loss_weights=[0.5, 2.0], metrics=[["accuracy"], ["mae"]]),
        lambda: arrays([CLASSES, TARGET], [X, IDS], sample_weight=[WEIGHTS, WEIGHTS[::-1]]),
    ),
    "one-loss-for-two-outputs": Case(
        lambda: several(list),
        with_loss([SPARSE, None]),
        lambda: arrays([CLASSES, TARGET], [X, IDS]),
    ),
    "regularizers": Case(regularized, with_loss("mse"), lambda: arrays(TARGET)),
    "add-loss-mean-gradient-accumulation": Case(
        lambda: adds_loss("mean"),
        with_loss("mse", lambda: OPTIMIZERS.SGD(0.1, gradient_accumulation_steps=2)),
        lambda: arrays(TARGET),
    ),
    "add-loss-sum": Case(lambda: adds_loss("sum"), with_loss("mse"), lambda: arrays(TARGET)),
    "no-compiled-loss": Case(
        lambda: adds_loss("mean", last=True),
        with_loss(None, metrics=["mae"]),
        lambda: arrays(TARGET),
    ),
    "constraints-generator": Case(
        constrained,
        with_loss("mse"),
        lambda: {"x": batches(X, TARGET), "steps_per_epoch": 3, "shuffle": False},
    ),
    "frozen-clipnorm": Case(
        frozen,
        with_loss("mse", lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, clipnorm=0.3)),
        lambda: arrays(TARGET),
    ),
    "shared-layer-rate-schedule": Case(
        tied,
        with_loss(
            "mse",
            lambda: OPTIMIZERS.AdamW(OPTIMIZERS.schedules.CosineDecay(0.05, 10), weight_decay=0.1),
        ),
        lambda: arrays(TARGET, [X, X[::-1]]),
    ),
    "masked-inside": Case(recurrent, with_loss(SPARSE), lambda: arrays(CLASSES, IDS)),
    "masked-outputs": Case(
        tagger, with_loss(SPARSE, metrics=["accuracy"]), lambda: arrays(TAGS, IDS)
    ),
    "masked-outputs-weighted": Case(
        tagger,
        with_loss(SPARSE),
        lambda: arrays(TAGS, IDS, sample_weight=np.outer(WEIGHTS, np.arange(1.0, 6))),
    ),
    "steps-per-execution": Case(
        classifier, with_loss(SPARSE, steps_per_execution=2, metrics=["accuracy"])
    ),
    "run-eagerly": Case(classifier, with_loss(SPARSE, run_eagerly=True)),
    "several-run-eagerly": Case(
        lambda: several(list),
        with_loss(lambda: [SPARSE, "mse"], run_eagerly=True),
        lambda: arrays([CLASSES, TARGET], [X, IDS]),
    ),
    "batch-norm": Case(normalized, with_loss(SPARSE), one_micro_batch=True),
    "dict-for-one-input": Case(
        regression,
        with_loss("mse"),
        lambda: {"x": dataset({"numbers": X}, TARGET), "shuffle": False},
    ),
    "dict-for-a-list": Case(
        lambda: several(list),
        with_loss([SPARSE, "mse"]),
        lambda: arrays([CLASSES, TARGET], {"numbers": X, "ids": IDS}),
    ),
    "sequential-of-several-lengths": Case(
        lengths, with_loss("mse"), lambda: {"x": bucketed(), "steps_per_epoch": 3, "shuffle": False}
    ),
    "averaged-weights-for-validation": Case(
        classifier,
        with_loss(SPARSE, lambda: OPTIMIZERS.SGD(0.1, use_ema=True, ema_momentum=0.5)),
        swapped_averages,
    ),
    "xla": Case(
        binary,
        with_loss(
            "binary_crossentropy",
            "adam",
            metrics=lambda: ["accuracy", keras.metrics.AUC(name="auc")],
            jit_compile=True,
        ),
        lambda: arrays(BINARY),
    ),
    "subclassed-attention": Case(
        Attentive, with_loss("mse", metrics=lambda: ["mae"]), lambda: arrays(TARGET)
    ),
    "subclassed-in-subclassed": Case(
        TwoHeaded,
        with_loss({"left": "mse", "right": "mae"}, "adam"),
        lambda: arrays({"left": TARGET, "right": X[:, :3]}),
        one_micro_batch=True,
    ),
    "subclassed-default-training": Case(Defaulted, with_loss("mse"), lambda: arrays(TARGET)),
    "subclassed-positions": Case(Positioned, with_loss("mse", "adam"), lambda: arrays(TARGET)),
    "subclassed-on-a-functional": Case(
        OnABase, with_loss("mse"), lambda: arrays(TARGET), one_micro_batch=True
    ),
    "subclassed-inference": Case(Inferring, with_loss("mse"), lambda: arrays(TARGET)),
    "subclassed-without-training": Case(Untold, with_loss("mse"), lambda: arrays(TARGET)),
    "two-losses-for-one-output": Case(
        regression, with_loss(["mse", "mae"]), lambda: arrays(TARGET)
    ),
    "own-optimizer": Case(regression, with_loss("mse", lambda: Tenth(0.5)), lambda: arrays(TARGET)),
}
