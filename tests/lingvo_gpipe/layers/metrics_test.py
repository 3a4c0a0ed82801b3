"""Keras metrics of micro-batches together equal those of the whole mini-batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, pipelining

ROWS = 10  # 4 micro-batches are ragged


@keras.saving.register_keras_serializable(package="metric_test")
class Largest(keras.metrics.Metric):
    """The largest prediction, which cannot be summed over examples."""

    def __init__(self, name: str = "largest", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


def _run(metric: str, config: dict[str, Any], x: Any, label: Any, **fields: Any) -> Any:
    reads = ("x", "label", *fields)
    pipe = pipelining.PipeliningLayer.Params(
        layers=[layers.KerasMetric.Params(metric=metric, config=config, reads=reads)],
        num_micro_batches=4,
    ).instantiate()
    result = pipe.evaluate({"x": x, "label": label, **fields})
    (name,) = pipe.analysis.metrics
    return pipe.analysis.metrics[name].finish(result.sums[name])


@pytest.mark.parametrize(
    ("metric", "config", "columns", "labels"),
    [
        ("AUC", {}, 1, "binary"),
        ("F1Score", {"threshold": 0.5}, 3, "one hot"),
        ("R2Score", {}, 2, "floating"),
        ("MeanSquaredError", {}, 2, "floating"),
        ("SparseTopKCategoricalAccuracy", {"k": 2}, 4, "classes"),
        ("MeanIoU", {"num_classes": 3, "sparse_y_pred": False}, 3, "classes"),
    ],
)
def test_metric_is_that_of_the_whole_mini_batch(
    metric: str, config: dict[str, Any], columns: int, labels: str
) -> None:
    random = np.random.default_rng(3)
    x = tf.constant(random.random((ROWS, columns)), tf.float32)
    label = {
        "binary": tf.constant(random.integers(0, 2, (ROWS, 1)), tf.int32),
        "one hot": tf.one_hot(random.integers(0, columns, ROWS), columns),
        "floating": tf.constant(random.random((ROWS, columns)), tf.float32),
        "classes": tf.constant(random.integers(0, columns, ROWS), tf.int32),
    }[labels]
    whole = getattr(keras.metrics, metric)(**config)
    whole.update_state(label, x)
    np.testing.assert_allclose(_run(metric, config, x, label), whole.result(), rtol=1e-5)


def test_weights_are_handed_on() -> None:
    x, label = tf.range(10.0)[:, tf.newaxis], tf.zeros([10, 1])
    weights = tf.constant([1.0] * 3 + [0.0] * 7)
    got = _run("MeanAbsoluteError", {}, x, label, weights=weights)
    np.testing.assert_allclose(got, 1.0)  # the mean of 0, 1 and 2


def test_metric_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(errors.LayerError, match="do not add up over examples"):
        _run("metric_test>Largest", {}, tf.random.normal([ROWS, 2]), tf.zeros([ROWS, 2]))


def test_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(errors.LayerError, match=r"no Keras metric AUCC.*nearest 'AUC'"):
        _run("AUCC", {}, tf.zeros([ROWS, 1]), tf.zeros([ROWS, 1]))


def test_a_nest_of_predictions_is_refused() -> None:
    nest = {"a": tf.TensorSpec((2, 3))}
    with pytest.raises(errors.LayerError) as caught:
        layers.KerasMetric.Params(metric="AUC").fprop_meta(nest, tf.TensorSpec((2, 3)))
    assert str(caught.value) == (
        "KerasMetric: expected one tensor [...], got dict. Set its field reads to one tensor"
    )
