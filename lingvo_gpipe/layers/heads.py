"""Heads and losses: each adds sums over its micro-batch, and the weight they are divided by.

The weight is a function of the mini-batch's fields, computed once over the whole update, so that
unequal micro-batches count right. So the names of labels, targets and weights must be fields of
the mini-batch. Losses and logits are float32, or float64 under that policy. A head that does not
read its label (`reads=("x",)`) returns its outputs and adds no loss: a model for inference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, MetricSpec, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest


class LossParams(Layer.Params):
    """Fields of every layer that adds a loss."""

    loss_name: str = hyperparams.field("loss", "Name of its loss, unique in the network.")
    coefficient: float = hyperparams.field(1.0, "Its factor in the update's loss.")


@dataclasses.dataclass(frozen=True, slots=True)
class Classifier:
    """How a loss reads classes from predictions and labels.

    Attributes:
        from_logits: predictions are logits, else probabilities.
        is_binary: they are those of class 1 of two, [N] or [N, 1]; else of all classes, [N, C].
        is_one_hot: labels are [B, C], with 1 at the class; else numbers of classes, [B] or [B, 1].
        ignored: label that is left out; None: none is.
    """

    from_logits: bool
    is_binary: bool = False
    is_one_hot: bool = False
    ignored: int | None = None

    def probabilities(self, x: tf.Tensor) -> tf.Tensor:
        """Return the probability of each class, [N, C], for predictions."""
        if not self.is_binary:
            return tf.nn.softmax(x) if self.from_logits else x
        first = tf.reshape(tf.sigmoid(x) if self.from_logits else x, (-1,))
        return tf.stack([1 - first, first], -1)

    def classes(self, label: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the classes, [B] int64; -1 where the label is left out."""
        if self.is_one_hot:
            return tf.argmax(label, -1)
        numbers = tf.cast(tf.reshape(label, (-1,)), tf.int64)
        return numbers if self.ignored is None else tf.where(numbers == self.ignored, -1, numbers)


class Head(Layer):
    """Base of layers that compare the first name they read with the others: label, weights."""

    class Params(LossParams):
        """Fields of every head."""

        def compared(self) -> tuple[str, ...]:
            """Return label and weights."""
            return tuple(self.reads[1:])

        def classifier(self, x: tf.TensorSpec, label: tf.TensorSpec) -> Classifier | None:
            """Return how to read classes of examples; None: it does not compare them.

            Args:
                x: spec of the predictions, which it writes.
                label: spec of the labels.
            """
            del x, label
            return None

        def _inference(self) -> Layer.Params:
            """Leave out label and weights."""
            return self.copy().set(reads=self.reads[:1])

    params: Params


class LabelledParams(Head.Params):
    """Fields of softmax heads."""

    reads = ("x", "label")
    label_smoothing: float = hyperparams.field(
        0.0, "Share of the target that is spread evenly over all classes, in [0, 1)."
    )
    metric_prefix: str = hyperparams.field("", "Prefix of the names of its metrics.")
    top_k: int = hyperparams.field(
        0, "Adds the metric top{k}: label among the k best classes; 0: not."
    )

    def label_range(self, size: int | None, setting: str) -> dict[str, base.ValueRange]:
        """Return the range of the label, if it reads one and the number of classes is known."""
        label = self.reads[1:2]
        weights = self.reads[2] if len(self.reads) > 2 else None
        return {name: base.ValueRange(size, setting, weights) for name in label if size is not None}

    def classifier(self, x: tf.TensorSpec, label: tf.TensorSpec) -> Classifier | None:
        """See `Head.Params.classifier`."""
        is_of_examples = x.shape.rank == 2 and label.shape.rank == 1
        return Classifier(from_logits=True) if is_of_examples else None

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of metrics that are means, without the prefix."""
        return ("accuracy", f"top{self.top_k}") if self.top_k else ("accuracy",)

    def with_losses(self, meta: Meta, num_labels: int, dtype: tf.DType) -> Meta:
        """Return a Meta with the loss and the metrics of the labels.

        Args:
            meta: without them.
            num_labels: 0, 1 (label) or 2 (label and weights).
            dtype: of the loss.
        """
        if not num_labels:
            return meta
        weight = weight_by(self.reads[num_labels], dtype, are_weights=num_labels == 2)
        metrics = tuple(MetricSpec(self.metric_prefix + name, mean) for name in self.metric_names())
        loss = LossSpec(self.loss_name, self.coefficient, weight)
        return dataclasses.replace(meta, losses=(loss,), metrics=metrics)


def check_labels(params: Layer.Params, rows: tuple[int, ...], labels: Sequence[SpecNest]) -> None:
    """Check the label and the weights that a head reads.

    Args:
        params: params of the head.
        rows: leading dimensions of its x.
        labels: specs of label and weights, as far as it reads them.

    Raises:
        LayerError: a shape or a dtype does not fit.
    """
    for kind, spec in zip(("label", "weights"), labels, strict=False):
        shape = checks.any_shape(params, spec, "[...]", "Set its field reads")
        if shape != rows:
            raise errors.LayerError(
                f"{base.describe(params)}: {kind} of shape {list(shape)}, expected {list(rows)} "
                "for its x. Set its field reads, or reshape"
            )
        if kind == "label" and not spec.dtype.is_integer:
            raise errors.LayerError(
                f"{base.describe(params)}: label is {spec.dtype.name}, expected integer classes. "
                "Cast it in the input"
            )


def weight_by(
    name: str, dtype: tf.DType, *, are_weights: bool = False, examples: bool = False
) -> Callable[[dict[str, Nest]], tf.Tensor]:
    """Return the weight of a loss as a function of the mini-batch's fields.

    Args:
        name: name of the field; empty: the first field.
        dtype: dtype of the weight.
        are_weights: the field's elements are weights, which are summed; else they are counted.
        examples: count along axis 0 alone.
    """

    def weight(fields: dict[str, Nest]) -> tf.Tensor:
        value = field_of(fields, name or next(iter(fields)))
        if are_weights:
            return tf.reduce_sum(tf.cast(value, dtype))
        return tf.cast(tf.shape(value)[0] if examples else tf.size(value), dtype)

    return weight


def field_of(fields: dict[str, Nest], name: str) -> tf.Tensor:
    """Return the first tensor of a field of the mini-batch, by which a loss is weighted.

    Raises:
        LayerError: there is no such field.
    """
    if name not in fields:
        raise errors.LayerError(
            f"a loss is weighted by {name!r}, which is not a field of the mini-batch; "
            f"{errors.suggestion(name, fields)}. Read the field itself, under its own name"
        )
    return tf.nest.flatten(fields[name])[0]


def mean(sums: dict[str, tf.Tensor]) -> tf.Tensor:
    """Return total / weight; 0 where the weight is 0."""
    return tf.math.divide_no_nan(sums["total"], sums["weight"])


def cross_entropy(
    logits: tf.Tensor, label: tf.Tensor, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the cross-entropy of each row with the smoothed and with the plain label, both [N].

    Args:
        logits: [N, C].
        label: [N] integer.
        label_smoothing: ε; the target is 1 − ε on the label and ε / C everywhere. (Lingvo spreads
            over the other classes alone: its ε is this one · (C − 1) / C.)
    """
    label = checks.as_ids(label)
    if label_smoothing == 0.0:
        plain = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        return plain, plain
    # A dense target for TensorFlow's fused operation takes fewer passes over [N, C] than any sum of
    # parts, each with a gradient; and scatter refuses a label out of range, which one_hot ignores.
    label = tf.cast(label, tf.int64)
    rows = tf.range(tf.size(label, tf.int64))
    spread = tf.constant(label_smoothing / logits.shape[-1], logits.dtype)
    rest = tf.fill(tf.shape(label), tf.constant(1.0 - label_smoothing, logits.dtype))
    target = tf.fill(tf.shape(logits), spread)
    target = tf.tensor_scatter_nd_add(target, tf.stack([rows, label], -1), rest)
    smoothed = tf.nn.softmax_cross_entropy_with_logits(target, logits)
    above_mean = tf.gather(logits, label, batch_dims=1) - tf.reduce_mean(logits, -1)
    return smoothed, smoothed - label_smoothing * above_mean


def place_of_largest(logits: tf.Tensor) -> tf.Tensor:
    """Return the place of the largest of each row [N, C], the first of equal ones: [N] int32.

    On GPUs tf.argmax reads a row by one thread: 26 ms for 8,192 rows of 50,304 on an H200, where
    forward and backward of a GPT-2 of 12 layers take 141 ms with it.
    """
    return tf.math.top_k(logits, sorted=False).indices[:, 0]


def _among_best(logits: tf.Tensor, label: tf.Tensor, k: int) -> tf.Tensor:
    """Return for each row whether fewer than k classes score above the label; ties are hits."""
    score = tf.gather(logits, label, axis=-1, batch_dims=1)
    above = tf.reduce_sum(tf.cast(logits > score[:, tf.newaxis], tf.int32), -1)
    return (above < k) & tf.math.is_finite(score)


class Scores(NamedTuple):
    """What loss and metrics need of the logits of each label, flat.

    Attributes:
        smoothed: [N] cross-entropy with the smoothed label.
        plain: [N] cross-entropy with the plain label.
        best: [N] id of the largest logit, in the dtype of the labels.
        among_best: [N] whether the label is among the k best; None: not counted.
    """

    smoothed: tf.Tensor
    plain: tf.Tensor
    best: tf.Tensor
    among_best: tf.Tensor | None


class Rows(NamedTuple):
    """Loss and hit of each label, flat, in the dtype of the logits.

    Attributes:
        log_perplexity: [N] cross-entropy with the plain label.
        accuracy: [N] 1 where the largest logit is the label's, else 0.
        weight: [N] weight of the label.
    """

    log_perplexity: tf.Tensor
    accuracy: tf.Tensor
    weight: tf.Tensor


def flat_labels(labels: tuple[tf.Tensor, ...], dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Return label (int32 or int64) and weights, [N] each; 1 where no weights are given.

    Args:
        labels: (label,) or (label, weights), each [...].
        dtype: of the weights.
    """
    # Flat, since TensorFlow adds an assertion, a stateful operation, to unknown higher ranks.
    label = checks.as_ids(tf.reshape(labels[0], (-1,)))
    weights = tf.ones_like(label, dtype)
    if len(labels) == 2:
        if not labels[1].shape.is_compatible_with(labels[0].shape):
            raise errors.LayerError(
                f"label weights of shape {labels[1].shape}, expected {labels[0].shape}, one for "
                "each label. Reshape them"
            )
        weights = tf.reshape(tf.cast(labels[1], dtype), (-1,))
    # A label of weight 0 may hold anything, the id of padding as well.
    return tf.where(weights == 0, tf.zeros_like(label), label), weights


def add_scores(
    params: LabelledParams,
    ctx: Context,
    scores: Scores,
    labels: tuple[tf.Tensor, tf.Tensor],
) -> Rows:
    """Add loss and metrics to the context; return those of each label.

    Args:
        params: params of the head.
        ctx: to which they are added.
        scores: of all labels.
        labels: label and weights; see `flat_labels`.
    """
    label, weights = labels
    total = tf.reduce_sum(weights)

    def weighted(value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(value, weights.dtype) * weights)

    ctx.add_loss(params.loss_name, weighted(scores.smoothed))
    accuracy = tf.cast(tf.equal(scores.best, label), weights.dtype)
    values = {
        "accuracy": accuracy,
        f"top{params.top_k}": scores.among_best,
        "log_perplexity": scores.plain,
    }
    for name in params.metric_names():
        sums = {"total": weighted(values[name]), "weight": total}
        ctx.add_sum(params.metric_prefix + name, sums)
    return Rows(scores.plain, accuracy, weights)


def probabilities(logits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return what a served classifier returns: probabilities, in the dtype of its logits."""
    return {"probabilities": tf.nn.softmax(logits)}


def project(
    params: dense.KernelParams, theta: Theta, x: tf.Tensor, *, transposed: bool = False
) -> tf.Tensor:
    """Return x · kernel + bias in the master dtype: [..., C].

    Args:
        params: params of the layer.
        theta: kernel, bias.
        x: [..., D].
        transposed: whether the kernel is [C, D], not [D, C].
    """
    policy = params.policy
    x = precision.cast(x, policy.compute)
    logits = dense.project(x, theta["kernel"], transposed=transposed)
    logits = precision.cast(logits, policy.variable)
    return logits + precision.cast(theta["bias"], logits.dtype) if params.use_bias else logits


class SoftmaxHead(Head):
    """Base of layers that return logits; served, they return probabilities and need no label."""

    class Params(LabelledParams, dense.KernelParams):
        """Fields of every softmax head."""

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return probabilities."""
            return probabilities(outputs)

        def head_meta(
            self, inputs: tuple[SpecNest, ...], setting: str, *, transposed: bool = False
        ) -> Meta:
            """Return the Meta of a head.

            Args:
                inputs: x, label and weights, or only the first of these.
                setting: name of the field that holds the number of classes.
                transposed: whether the kernel is [classes, D].

            Raises:
                LayerError: an input or a field does not fit.
            """
            classes: int = self.get(setting)
            checks.arity(self, inputs, ("x", "x, label", "x, label, weights"))
            *rows, depth = checks.shape(self, inputs[0], "[B, ..., D]", "Put a Flatten before it")
            checks.share(self, "label_smoothing", self.label_smoothing)
            checks.positive(self, **{setting: classes})
            check_labels(self, tuple(rows), inputs[1:])
            logits = tf.TensorSpec((*rows, classes), self.policy.variable)
            kernel = (classes, depth) if transposed else (depth, classes)
            flops = 2 * math.prod(rows) * depth * classes
            meta = Meta(
                logits,
                dense.weights(self, kernel, classes),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=2 * base.spec_bytes(logits),  # and probabilities
            )
            return self.with_losses(meta, len(inputs) - 1, logits.dtype)

    params: Params

    def logits(self, theta: Theta, x: tf.Tensor, ctx: Context) -> tf.Tensor:
        """Return the logits of x."""
        del ctx
        return project(self.params, theta, x)

    def add_loss(self, logits: tf.Tensor, labels: tuple[tf.Tensor, ...], ctx: Context) -> Rows:
        """Add loss and metrics to the context; return those of each label.

        Args:
            logits: [..., C].
            labels: (label,) or (label, weights), each [...].
            ctx: to which they are added.
        """
        p = self.params
        logits = tf.reshape(logits, (-1, logits.shape[-1]))
        label, weights = flat_labels(labels, logits.dtype)
        scores = Scores(
            *cross_entropy(logits, label, p.label_smoothing),
            tf.cast(place_of_largest(logits), label.dtype),
            _among_best(logits, label, p.top_k) if p.top_k else None,
        )
        return add_scores(p, ctx, scores, (label, weights))

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        logits = self.logits(theta, x, ctx)
        if labels:
            self.add_loss(logits, tuple(labels), ctx)
        return logits


class Softmax(SoftmaxHead):
    """x: [..., D] floating, label: [...] integer → logits [..., classes]; loss: cross-entropy.

    The logits have the master dtype. Each label has weight 1, or that of the third name it reads,
    weights: [...]. Metrics: accuracy, top{k}. Variables: kernel [D, classes], bias [classes].
    FLOPs: as Dense.
    """

    class Params(SoftmaxHead.Params):
        classes: int = hyperparams.required("Number of classes.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            return self.head_meta(inputs, "classes")

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.classes, "classes")

    params: Params
