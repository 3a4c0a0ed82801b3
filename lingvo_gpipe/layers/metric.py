"""Keras' metrics, as layers that read predictions and labels where they lie."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, joining
from lingvo_gpipe.layers.base import Layer, Meta, MetricSpec, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class KerasMetric(Layer):
    """x: predictions, label: what Keras' metric compares them with → x; gives the metric.

    The metric runs on zeros in each micro-batch, and its variables are added over micro-batches,
    so it must be one whose variables add up over examples (means, AUC, F1, MeanIoU, R2, confusion
    counts); another is refused. A third name it reads is Keras' `sample_weight`.

    >>> auc = KerasMetric.Params(metric="AUC", reads=("x", "label"), writes=("x",))
    >>> auc.metric_name = "auc"
    """

    class Params(Layer.Params):
        reads = ("x", "label")
        metric: str = hyperparams.required("Class of Keras' metric, such as AUC.")
        config: dict[str, Any] = hyperparams.field({}, "Arguments of the class.")
        metric_name: str = hyperparams.field("", "Name of the result; empty: that of the metric.")
        activation: str = hyperparams.field(
            "linear", "Keras activation of x that the metric is given, such as softmax for logits."
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x, label", "x, label, weights"))
            made = _metric(self)
            dtype = self.policy.variable

            def finish(sums: Any) -> Any:
                return made.stateless_result([sums[name] for name in sorted(sums)])

            def output(spec: tf.TensorSpec) -> tf.TensorSpec:
                return tf.TensorSpec(spec.shape, dtype if spec.dtype.is_floating else spec.dtype)

            metrics = (MetricSpec(_name(self), finish),)
            return Meta(tf.nest.map_structure(output, inputs[0]), metrics=metrics)

        def compared(self) -> tuple[str, ...]:
            """Name label and weights; see `Layer.compared`."""
            return tuple(self.reads[1:])

        def _inference(self, available: Collection[str]) -> Layer.Params | None:
            """Hand predictions on; see `Layer.inference`."""
            del available
            return joining.passing(self)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, label, *weights = inputs
        x = tf.nest.map_structure(lambda t: precision.cast(t, self.policy.variable), x)
        with tf.init_scope():
            _check_additive(self.params, _like(x), _like(label))
        ctx.add_sum(
            _name(self.params), _update(self.params, _metric(self.params), x, label, weights)
        )
        return x


def _name(params: Any) -> str:
    return str(params.metric_name or _metric(params).name)


def _metric(params: Any) -> Any:
    """Return the Keras metric; its variables are never written.

    Raises:
        LayerError: Keras has none of that name, or refuses its arguments.
    """
    return _made(params.metric, json.dumps(params.config, sort_keys=True, default=repr))


@functools.cache
def _made(name: str, config: str) -> Any:
    try:
        with tf.init_scope():
            metric = keras.metrics.get({"class_name": name, "config": json.loads(config)})
            return metric
    except (ValueError, TypeError) as error:
        known = [n for n in dir(keras.metrics) if n[0].isupper()]
        near = errors.nearest(name, known)
        hint = f"; nearest {', '.join(near)}" if near and name not in known else ""
        raise errors.LayerError(
            f"no Keras metric {name}({config}){hint}. Give the name of its class and its arguments"
        ) from error


def _update(params: Any, metric: Any, x: Any, label: Any, weights: Any) -> dict[str, tf.Tensor]:
    """Return the metric's variables after one update from zeros, by their number."""
    own = tf.as_dtype(metric.dtype)  # confusion matrices count in integers
    dtype = own if own.is_floating else tf.float32
    x, label, weights = tf.nest.map_structure(
        lambda leaf: precision.cast(leaf, dtype), (x, label, list(weights))
    )
    given = keras.activations.get(params.activation)(x) if params.activation != "linear" else x
    zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    after = metric.stateless_update_state(zeros, label, given, *weights)
    return {f"{number:03d}": tf.convert_to_tensor(v) for number, v in enumerate(after)}


def _like(value: tf.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(side or 2 for side in value.shape), value.dtype.name


@functools.cache
def _additive(
    name: str, config: str, activation: str, x: tuple[Any, str], label: tuple[Any, str]
) -> bool:
    """Try whether an update by all examples is the sum of updates by two halves."""
    params = KerasMetric.Params(metric=name, config=json.loads(config), activation=activation)
    metric = _metric(params)
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...], dtype: str) -> Any:
        kind = tf.as_dtype(dtype)
        sides = (4, *shape[1:])
        values = random.random(sides) if kind.is_floating else random.integers(0, 2, sides)
        return tf.cast(values, kind)

    predicted, wanted = draw(*x), draw(*label)
    whole = _update(params, metric, predicted, wanted, [])
    halves = [
        _update(params, metric, predicted[part], wanted[part], [])
        for part in (slice(0, 1), slice(1, 4))
    ]
    starts_at_zero = all(not np.any(v.numpy()) for v in metric.variables)
    return starts_at_zero and all(
        np.allclose(whole[key], halves[0][key] + halves[1][key], rtol=1e-4, atol=1e-5)
        for key in whole
    )


def _check_additive(params: Any, x: tuple[Any, str], label: tuple[Any, str]) -> None:
    config = json.dumps(params.config, sort_keys=True, default=repr)
    if not _additive(params.metric, config, params.activation, x, label):
        raise errors.LayerError(
            f"{base.describe(params)}: the variables of Keras' {params.metric} do not add up over "
            "examples, so it cannot be taken from micro-batches. Use a metric that counts or sums"
        )
