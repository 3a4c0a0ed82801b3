"""Keras' metrics, as layers that read predictions and labels in the cell that has them."""

from __future__ import annotations

import functools
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, keras_references, reshaping, trials
from lingvo_gpipe.layers.base import Layer, Meta, MetricSpec, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class KerasMetric(Layer):
    """x: [B, ...], label: of any shape → x in the master dtype; adds a Keras metric.

    x are predictions, and `label` what the metric compares them with. The metric starts from zeros
    in each micro-batch, and its variables are summed over micro-batches, so it must be one whose
    variables add up over examples (means, AUC, F1, MeanIoU, R2, confusion counts); another one is
    refused. A third name it reads, weights: [B], is Keras' `sample_weight`.

    >>> auc = KerasMetric.Params(metric="AUC", reads=("x", "label"), writes=("x",))
    >>> auc.metric_name = "auc"
    """

    class Params(Layer.Params):
        reads = ("x", "label")
        metric: str = hyperparams.required("Class of Keras' metric, such as AUC.")
        config: dict[str, Any] = hyperparams.field({}, "Arguments of the class.")
        metric_name: str = hyperparams.field("", "Name of the result; empty: that of the metric.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x, label", "x, label, weights"))
            x = inputs[0]
            for spec in inputs:
                checks.any_shape(self, spec, "[...]", "Set its field reads to one tensor")
            metric = _metric(self)
            dtype = self.policy.variable if x.dtype.is_floating else x.dtype
            with tf.init_scope():
                is_sum = _is_sum(
                    metric, *(tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in inputs)
                )
            if not is_sum:
                raise errors.LayerError(
                    f"{base.describe(self)}: the variables of Keras' {self.metric} do not add up "
                    "over examples, so micro-batches cannot compute it. Use a metric that counts "
                    "or sums"
                )

            def finish(sums: dict[str, tf.Tensor]) -> tf.Tensor:
                return metric.stateless_result([sums[name] for name in sorted(sums)])

            metrics = (MetricSpec(_name(self), finish),)
            return Meta(tf.TensorSpec(x.shape, dtype), metrics=metrics)

        def compared(self) -> tuple[str, ...]:
            """Return label and weights."""
            return tuple(self.reads[1:])

        def _inference(self) -> Layer.Params | None:
            """Pass predictions on."""
            return reshaping.passing(self)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *compared = inputs
        x = precision.cast(x, self.policy.variable)
        sums = _sums(_metric(self.params), x, *compared)
        ctx.add_sum(_name(self.params), {f"{n:03d}": value for n, value in enumerate(sums)})
        return x


def _name(params: KerasMetric.Params) -> str:
    return str(params.metric_name or _metric(params).name)


def _metric(params: KerasMetric.Params) -> keras.Metric:
    """Return the Keras metric; its variables are never written.

    Raises:
        LayerError: Keras has no metric of that name, refuses its arguments, or these name what
            would run code.
    """
    subject = f"{base.describe(params)}: no Keras metric {params.metric}"
    keras_references.check([params.metric, params.config], subject)
    return _metric_object(params.metric, json.dumps(params.config, sort_keys=True, default=repr))


@functools.cache
def _metric_object(name: str, config: str) -> keras.Metric:
    try:
        with tf.init_scope():
            return keras.metrics.get({"class_name": name, "config": json.loads(config)})
    except (ValueError, TypeError) as error:
        names = [n for n in dir(keras.metrics) if n[0].isupper()]
        hint = "" if name in names else f"; {errors.suggestion(name, names)}"
        raise errors.LayerError(
            f"no Keras metric {name}({config}){hint}. Give the name of its class and its arguments"
        ) from error


def _sums(metric: keras.Metric, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Return the metric's variables after one update from zeros.

    Args:
        metric: the metric.
        *inputs: predictions, label, and weights, if there are any.
    """
    dtype = tf.as_dtype(metric.dtype)
    if not dtype.is_floating:  # some metrics count in integers
        dtype = tf.float32
    x, label, *weights = (precision.cast(value, dtype) for value in inputs)
    zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    # Keras would compute with the logits if it found them; see `Loss`.
    after = metric.stateless_update_state(zeros, label, tf.identity(x), *weights)
    return [tf.convert_to_tensor(value) for value in after]


@functools.cache
def _is_sum(metric: keras.Metric, *specs: tf.TensorSpec) -> bool:
    """Return whether what examples of these specs add is the sum of what each of them adds."""
    starts_at_zero = all(not np.any(v.numpy()) for v in metric.variables)
    return starts_at_zero and trials.on_examples(
        lambda values: trials.adds_up(
            lambda part: _sums(metric, *part.values()), values, absolute=1e-5
        ),
        {str(number): spec for number, spec in enumerate(specs)},
    )
