"""Losses of Keras: those of micro-batches together are those of the whole mini-batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, keras_layers, layers, pipelining
from lingvo_gpipe.layers import losses
from lingvo_gpipe.layers.context import Context
from tests.cases import layer_cases

hyperparams.register_package(__name__)

ROWS, CLASSES = 10, 4
PARTS = (slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10))


class Quartic(keras.losses.Loss):
    """A loss of a user, whose config is complete."""

    def __init__(self, factor: float = 1.0, **more: Any) -> None:
        super().__init__(**more)
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * keras.ops.mean((y_true - y_pred) ** 4, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class Centred(keras.losses.Loss):
    """The distance of each example from the mean over the batch: no loss of micro-batches."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        error = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        return keras.ops.square(error - keras.ops.mean(error))


def absolute(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def given(labels: str) -> tuple[Any, Any]:
    """Return predictions and labels."""
    random = np.random.default_rng(7)
    x = random.random((ROWS, CLASSES)) * 0.8 + 0.1
    x /= x.sum(-1, keepdims=True)
    classes = random.integers(0, CLASSES, ROWS).astype("int32")
    label = {
        "classes": classes,
        "column": classes[:, None],
        "one hot": np.eye(CLASSES)[classes],
        "floating": random.random((ROWS, CLASSES)),
        "signs": 2.0 * np.eye(CLASSES)[classes] - 1.0,
    }
    return x, label[labels]


def loss_of(params: Any, x: Any, label: Any, weights: Any = None) -> tuple[float, int]:
    """Return the loss of ragged micro-batches, and what their sum is divided by."""
    params.set(dtype="float64")
    fields = {"x": x, "label": label} | ({} if weights is None else {"weights": weights})
    fields = {name: tf.convert_to_tensor(value) for name, value in fields.items()}
    params.reads = tuple(fields)
    meta = params.fprop_meta(*[tf.TensorSpec(v[:3].shape, v.dtype) for v in fields.values()])
    total = 0.0
    for part in PARTS:
        ctx: Context = layer_cases.context({}, training=True)
        params.instantiate().run({}, tuple(value[part] for value in fields.values()), ctx)
        total += float(ctx.collected.losses["loss"])
    weight = meta.losses[0].weight(fields)
    return total / float(weight), round(float(weight))


LOSSES = [
    *[(name, {}, "floating") for name in ("MeanSquaredError", "mae", "MAPE", "MSLE", "LogCosh")],
    ("CosineSimilarity", {}, "floating"),
    ("Huber", {"delta": 0.3}, "floating"),
    ("Poisson", {}, "floating"),
    ("KLDivergence", {}, "one hot"),
    ("Hinge", {}, "signs"),
    ("SquaredHinge", {}, "signs"),
    ("categorical_hinge", {}, "one hot"),
    ("BinaryCrossentropy", {"label_smoothing": 0.1}, "one hot"),
    ("BinaryFocalCrossentropy", {"gamma": 1.5}, "one hot"),
    ("CategoricalCrossentropy", {"from_logits": True}, "one hot"),
    ("CategoricalFocalCrossentropy", {}, "one hot"),
    ("CategoricalGeneralizedCrossEntropy", {}, "classes"),
    ("SparseCategoricalCrossentropy", {"from_logits": True}, "classes"),
    ("SparseCategoricalCrossentropy", {"ignore_class": 1}, "column"),
    ("Dice", {"axis": -1}, "one hot"),
    ("Tversky", {"axis": -1}, "one hot"),
]


@pytest.mark.parametrize(("name", "config", "labels"), LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_micro_batches_is_that_of_keras(
    name: str, config: dict[str, Any], labels: str, weighted: bool
) -> None:
    x, label = given(labels)
    weights = np.random.default_rng(2).random(ROWS) + 0.5 if weighted else None
    params = layers.Loss.Params(loss=name, config=config)
    found, _ = loss_of(params, x, label, weights)
    kind = losses._class_of(name)
    wanted = kind(**config, dtype="float64")(label, x, sample_weight=weights)
    assert found == pytest.approx(float(wanted), rel=1e-12)


def test_every_loss_of_keras_is_tried() -> None:
    tried = {losses._class_of(name).__name__ for name, _, _ in LOSSES}
    known = {name for name, kind in vars(keras.losses).items() if isinstance(kind, type)}
    assert known - tried == {"Loss", "CTC", "Circle"}


@pytest.mark.parametrize("ignored", [None, 2])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_a_loss_of_positions_is_that_of_keras(ignored: int | None, reduction: str) -> None:
    random = np.random.default_rng(4)
    logits, label = random.normal(size=(ROWS, 3, CLASSES)), random.integers(0, CLASSES, (ROWS, 3))
    config = {"from_logits": True, "ignore_class": ignored, "reduction": reduction}
    for weights in (None, random.random((ROWS, 3))):
        params = layers.Loss.Params(loss="SparseCategoricalCrossentropy", config=config)
        found, _ = loss_of(params, logits, label, weights)
        keras_loss = keras.losses.SparseCategoricalCrossentropy(**config, dtype="float64")
        wanted = keras_loss(label, logits, sample_weight=weights)
        assert found == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(
    ("reduction", "divisor"),
    [("sum", 1), ("mean", ROWS), ("mean_with_sample_weight", 3)],
)
def test_the_reduction_is_that_of_keras(reduction: str, divisor: int) -> None:
    x, label = given("floating")
    weights = np.array([0.5, 1.5, 1.0] + [0.0] * (ROWS - 3))
    params = layers.Loss.Params(loss="mse", config={"reduction": reduction})
    found, weight = loss_of(params, x, label, weights)
    wanted = keras.losses.MeanSquaredError(reduction, dtype="float64")(label, x, weights)
    assert found == pytest.approx(float(wanted), rel=1e-12)
    assert weight == divisor


@pytest.mark.parametrize(
    ("name", "config", "x", "label", "found"),
    [
        ("Sparse", {}, [[0.25, 0.5, 0.25]], [2], ([[0.25, 0.5, 0.25]], [2])),
        ("Sparse", {"ignore_class": 2}, [[0.25, 0.5, 0.25]], [[2.0]], ([[0.25, 0.5, 0.25]], [-1])),
        ("Sparse", {"from_logits": True}, [[0.0, 0.0]], [1], ([[0.5, 0.5]], [1])),
        ("", {"from_logits": True}, [[0.0, 0.0]], [[0.1, 0.9]], ([[0.5, 0.5]], [1])),
        ("", {}, [[0.25, 0.75]], [[1, 0]], ([[0.25, 0.75]], [0])),
        ("Binary", {}, [[0.75]], [1], ([[0.25, 0.75]], [1])),
        ("Binary", {"from_logits": True}, [0.0], [0], ([[0.5, 0.5]], [0])),
        ("Binary", {}, [[0.25, 0.75]], [[1, 1]], None),
        ("Sparse", {}, [[[0.25, 0.75]]], [[1]], None),
        ("Poisson", {}, [[0.25, 0.75]], [[1, 0]], None),
    ],
)
def test_classes_are_read_from_losses_that_compare_them(
    name: str, config: dict[str, Any], x: Any, label: Any, found: Any
) -> None:
    kinds = {"Sparse": "SparseCategoricalCrossentropy", "Binary": "BinaryCrossentropy"}
    params = layers.Loss.Params(loss=kinds.get(name, name or "CategoricalCrossentropy"))
    params.config = config
    x, label = tf.constant(x), tf.constant(label)
    classifier = params.classifier(
        *(tf.TensorSpec([None, *value.shape[1:]], value.dtype) for value in (x, label))
    )
    read = classifier and (classifier.probabilities(x).numpy(), classifier.classes(label).numpy())
    assert (read and tuple(values.tolist() for values in read)) == found


def test_live_losses_and_metrics_keep_their_arguments() -> None:
    made = keras_layers.from_keras_loss(keras.losses.Huber(delta=2.0), reads=("y", "t"))
    assert (made.loss, made.config["delta"], made.reads) == ("Huber", 2.0, ("y", "t"))
    own = keras_layers.from_keras_loss(Quartic(3.0))
    assert (own.loss, own.config["factor"]) == (Quartic, 3.0)
    assert own.from_text(own.to_text()) == own
    x, label = given("floating")
    expected = float(Quartic(3.0, dtype="float64")(label, x))
    assert loss_of(own, x, label)[0] == pytest.approx(expected, rel=1e-12)
    metric = keras_layers.from_keras_metric(keras.metrics.TopKCategoricalAccuracy(k=3))
    assert (metric.metric, metric.config["k"]) == ("TopKCategoricalAccuracy", 3)


def test_a_function_is_a_loss() -> None:
    x, label = given("floating")
    params = keras_layers.from_keras_loss(absolute)
    assert params.from_text(params.to_text()) == params
    assert loss_of(params, x, label)[0] == pytest.approx(np.abs(x - label).mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "labels", "weights", "text"),
    [
        (
            {"loss": "MeanSquareError"},
            "floating",
            None,
            "no Keras loss 'MeanSquareError'; nearest ",
        ),
        (
            {"loss": "mse", "config": {"delta": 1}},
            "floating",
            None,
            r"no Keras loss MeanSquaredErr",
        ),
        ({"loss": "Dice"}, "one hot", None, "the loss 'Dice' of a mini-batch is not a sum ov"),
        ({"loss": "Circle"}, "classes", None, "the loss 'Circle' of a mini-batch is not a sum"),
        ({"loss": Centred}, "floating", None, "the loss 'Centred' of a mini-batch is not a sum"),
        ({"loss": "mse", "config": {"reduction": None}}, "floating", None, "has no reduction, and"),
        ({"loss": "CategoricalCrossentropy"}, "classes", None, "CategoricalCrossentropy refuses l"),
        ({"loss": "mse"}, "floating", (ROWS, 4), r"refuses .*weights of shape \[3, 4\] with pred"),
    ],
)
def test_what_cannot_work_is_refused(
    fields: dict[str, Any], labels: str, weights: Any, text: str
) -> None:
    x, label = given(labels)
    with pytest.raises(errors.LayerError, match=text):
        loss_of(layers.Loss.Params(**fields), x, label, weights and np.ones(weights))


def test_gradients_through_a_pipeline_are_those_of_keras() -> None:
    random = np.random.default_rng(5)
    x, label = random.normal(size=(ROWS, 3)), random.integers(0, CLASSES, ROWS)
    weights = random.random(ROWS)
    own = [
        layers.Dense.Params(name="one", units=5, activation="tanh"),
        layers.Dense.Params(name="logits", units=CLASSES, writes=("logits",)),
        layers.Loss.Params(
            loss="SparseCategoricalCrossentropy",
            config={"from_logits": True},
            coefficient=0.5,
            reads=("logits", "label", "weights"),
        ),
        layers.KerasMetric.Params(
            metric="SparseCategoricalAccuracy", reads=("logits", "label", "weights")
        ),
    ]
    pipe = pipelining.PipeliningLayer.Params(
        layers=own, outputs="logits", num_partitions=2, num_micro_batches=4, dtype="float64"
    ).instantiate()
    result = pipe.value_and_gradients({"x": x, "label": label, "weights": weights})
    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    by = pipe.by_path
    with tf.GradientTape() as tape:
        hidden = tf.tanh(x @ by["one/kernel"] + by["one/bias"])
        logits = hidden @ by["logits/kernel"] + by["logits/bias"]
        loss = 0.5 * keras_loss(label, logits, sample_weight=weights)
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-12)
    for path, wanted in tape.gradient(loss, pipe.weights).items():
        np.testing.assert_allclose(result.gradients[path], wanted, rtol=1e-10, err_msg=path)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(label, logits, sample_weight=weights)
    (name,) = pipe.analysis.metrics
    found = pipe.analysis.metrics[name].finish(result.sums[name])
    assert float(found) == pytest.approx(float(accuracy.result()), rel=1e-6)


def clipped(**settings: Any) -> tuple[Any, ...]:
    """Return loss, gradients and metric of probabilities that a layer before the loss computes."""
    dense = layers.Dense.Params(name="dense", units=2, activation="softmax")
    loss = layers.Loss.Params(loss="SparseCategoricalCrossentropy", writes=("y",))
    metric = layers.KerasMetric.Params(metric="SparseCategoricalCrossentropy")
    pipe = pipelining.PipeliningLayer.Params(
        layers=[dense.set(recompute=settings.pop("recomputed", False)), loss, metric], **settings
    ).instantiate()
    fields = {"x": tf.constant([[30.0], [0.3]]), "label": tf.constant([1, 1])}
    pipe.build(fields)
    pipe.by_path["dense/kernel"].assign([[1.0, -1.0]])
    result = pipe.value_and_gradients(fields)
    ((name, spec),) = pipe.analysis.metrics.items()
    return result.loss, result.gradients, spec.finish(result.sums[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_partitions": 2, "cuts": (2, 1)},
        {"num_partitions": 3, "cuts": (1, 1, 1)},
        {"recomputed": True},
        {"num_partitions": 2, "cuts": (1, 2), "recompute": "full", "num_micro_batches": 2},
    ],
    ids=str,
)
def test_a_loss_of_probabilities_does_not_depend_on_the_cut(settings: dict[str, Any]) -> None:
    """Keras computes with the logits of a softmax wherever it finds them in the same graph."""
    in_one_cell, gradients, metric = clipped()
    rows = 1e-7, 1 / (1 + np.exp(0.6))
    assert float(in_one_cell) == pytest.approx(-np.mean(np.log(rows)), rel=1e-5)
    assert float(metric) == pytest.approx(float(in_one_cell), rel=1e-6)
    found = clipped(**settings)
    assert float(found[0]) == pytest.approx(float(in_one_cell), rel=1e-6)
    assert float(found[2]) == pytest.approx(float(metric), rel=1e-6)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(found[1][path], gradient, rtol=1e-6, atol=1e-7, err_msg=path)
    slope = 0.5 * (1.0 - rows[1])  # of the second example alone
    np.testing.assert_allclose(gradients["dense/bias"], [slope, -slope], rtol=1e-5)
