"""Heads and losses: each adds sums over its micro-batch, and the weight they are divided by.

The weight is a function of the mini-batch's fields, computed once over the whole update, so that
unequal micro-batches count right. So the names of labels, targets and weights must be fields of
the mini-batch. Losses and logits are float32, or float64 under that policy. A head that does not
read its label (`reads=("x",)`) returns its outputs and adds no loss: a model for inference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense, reshaping, sequence
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, MetricSpec, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

CONFUSION = "confusion"


class LossParams(Layer.Params):
    """Fields of every layer that adds a loss."""

    loss_name: str = hyperparams.field("loss", "Name of its loss, unique in the network.")
    coefficient: float = hyperparams.field(1.0, "Its factor in the update's loss.")


class Head(Layer):
    """Base of layers that compare the first name they read with the others: label, weights."""

    class Params(LossParams):
        """Fields of every head."""

        def compared(self) -> tuple[str, ...]:
            """Return label and weights."""
            first, *others = self.reads
            return tuple(name for name in others if name != first)

        def _inference(self, available: Collection[str]) -> Self:
            """Leave out label and weights."""
            del available
            served = self.copy()
            served.reads = served.reads[:1]
            return served

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
    confusion: bool = hyperparams.field(
        False, "Adds the metric confusion in evaluation: [C, C], rows true, columns predicted."
    )

    def label_range(self, size: int | None, setting: str) -> dict[str, base.ValueRange]:
        """Return the range of the label, if it reads one and the number of classes is known."""
        label = self.reads[1:2]
        weights = self.reads[2] if len(self.reads) > 2 else None
        return {name: base.ValueRange(size, setting, weights) for name in label if size is not None}


def weight_by(
    name: str, dtype: tf.DType, *, are_weights: bool = False, examples: int | None = None
) -> Callable[[dict[str, Nest]], tf.Tensor]:
    """Return the weight of a loss as a function of the mini-batch's fields.

    Args:
        name: name of the field.
        dtype: dtype of the weight.
        are_weights: the field's elements are weights, which are summed; else they are counted.
        examples: count along this axis alone.
    """

    def weight(fields: dict[str, Nest]) -> tf.Tensor:
        if name not in fields:
            near = errors.nearest(name, fields) or sorted(fields)
            raise errors.LayerError(
                f"a loss is weighted by {name!r}, which is not a field of the mini-batch; nearest "
                f"{', '.join(near)}. Read the field itself, under its own name"
            )
        value = fields[name]
        if are_weights:
            return tf.reduce_sum(tf.cast(value, dtype))
        return tf.cast(tf.size(value) if examples is None else tf.shape(value)[examples], dtype)

    return weight


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


def _among_best(logits: tf.Tensor, label: tf.Tensor, k: int) -> tf.Tensor:
    """Return for each row whether fewer than k classes score above the label; ties are hits."""
    score = tf.gather(logits, label, axis=-1, batch_dims=1)
    above = tf.reduce_sum(tf.cast(logits > score[:, tf.newaxis], tf.int32), -1)
    return (above < k) & tf.math.is_finite(score)


def _confusion(
    label: tf.Tensor, predicted: tf.Tensor, weights: tf.Tensor, classes: int
) -> tf.Tensor:
    """Return [C, C]: weights summed by true (row) and predicted class (column).

    Whole numbers are exact up to 2^24 in float32; an evaluation sums batches in float64.
    """
    place = tf.cast(label, tf.int64) * classes + tf.cast(predicted, tf.int64)
    flat = tf.math.unsorted_segment_sum(weights, place, classes * classes)
    return tf.reshape(flat, [classes, classes])


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


def add_loss_and_metrics(
    params: LabelledParams, ctx: Context, logits: tf.Tensor, labels: tuple[tf.Tensor, ...]
) -> Rows:
    """Add loss and metrics of logits to the context; return those of each label.

    Args:
        params: params of the head.
        ctx: to which they are added.
        logits: [..., C].
        labels: (label,) or (label, weights), each [...].
    """
    logits = tf.reshape(logits, (-1, logits.shape[-1]))
    # Flat, since TensorFlow adds an assertion, a stateful operation, to unknown higher ranks.
    label = tf.reshape(labels[0], (-1,))
    weights = tf.ones_like(label, logits.dtype)
    if len(labels) == 2:
        weights = tf.reshape(tf.cast(labels[1], logits.dtype), (-1,))
    # A label of weight 0 may hold anything, the id of padding as well.
    label = tf.where(weights == 0, tf.zeros_like(label), label)
    total = tf.reduce_sum(weights)

    def weighted(value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(value, logits.dtype) * weights)

    smoothed, plain = cross_entropy(logits, label, params.label_smoothing)
    ctx.add_loss(params.loss_name, weighted(smoothed))
    best = tf.argmax(logits, -1, label.dtype)
    hits = {"accuracy": tf.cast(tf.equal(best, label), logits.dtype)}
    if params.top_k:
        hits[f"top{params.top_k}"] = _among_best(logits, label, params.top_k)
    for name, hit in hits.items():
        ctx.add_sum(params.metric_prefix + name, {"total": weighted(hit), "weight": total})
    if params.confusion and not ctx.training:
        counts = _confusion(label, best, weights, logits.shape[-1])
        ctx.add_sum(params.metric_prefix + CONFUSION, counts)
    return Rows(plain, hits["accuracy"], weights)


def add_log_perplexity(params: LabelledParams, ctx: Context, rows: Rows) -> None:
    """Add the metric log_perplexity from the result of `add_loss_and_metrics`."""
    total = tf.reduce_sum(rows.log_perplexity * rows.weight)
    sums = {"total": total, "weight": tf.reduce_sum(rows.weight)}
    ctx.add_sum(f"{params.metric_prefix}log_perplexity", sums)


def probabilities(logits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return what a served classifier returns: probabilities, in the dtype of its logits."""
    return {"probabilities": tf.nn.softmax(logits)}


class SoftmaxHead(Head):
    """Base of layers that return logits; served, they return probabilities and need no label."""

    class Params(LabelledParams):
        """Fields of every softmax head."""

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return probabilities."""
            return probabilities(outputs)

        def checked(
            self, inputs: tuple[SpecNest, ...], way_out: str
        ) -> tuple[tuple[int, ...], int]:
            """Return the leading dimensions of x, and its last one.

            Args:
                inputs: x, label, weights.
                way_out: for x; see `checks.shape`.

            Raises:
                LayerError: an input or the label smoothing does not fit.
            """
            checks.arity(self, inputs, ("x", "x, label", "x, label, weights"))
            *rows, depth = checks.shape(self, inputs[0], "[B, ..., D]", way_out)
            checks.share(self, "label_smoothing", self.label_smoothing)
            for kind, spec in zip(("label", "weights"), inputs[1:], strict=False):
                shape = checks.any_shape(self, spec, "[...]", "Set its field reads")
                if list(shape) != rows:
                    raise errors.LayerError(
                        f"{base.describe(self)}: {kind} of shape {list(shape)}, expected {rows} "
                        "for its x. Set its field reads, or reshape"
                    )
                if kind == "label" and not spec.dtype.is_integer:
                    raise errors.LayerError(
                        f"{base.describe(self)}: label is {spec.dtype.name}, expected integer "
                        "classes. Cast it in the input"
                    )
            return tuple(rows), depth

        def head_meta(
            self,
            num_labels: int,
            logits: tf.TensorSpec,
            variables: tuple[VariableSpec, ...],
            flops: int,
        ) -> Meta:
            """Return the Meta of a head with these logits; it keeps logits and probabilities.

            Args:
                num_labels: 0, 1 (label) or 2 (label and weights).
                logits: spec of its output.
                variables: its weights.
                flops: FLOPs of the forward product.
            """
            losses: tuple[LossSpec, ...] = ()
            metrics: tuple[MetricSpec, ...] = ()
            if num_labels:
                weighted = num_labels == 2
                weight = weight_by(self.reads[num_labels], logits.dtype, are_weights=weighted)
                losses = (LossSpec(self.loss_name, self.coefficient, weight),)
                metrics = tuple(
                    MetricSpec(self.metric_prefix + name, mean) for name in self.metric_names()
                )
                if self.confusion:
                    name = f"{self.metric_prefix}{CONFUSION}"
                    metrics += (MetricSpec(name, tf.identity, evaluation_only=True),)
            return Meta(
                logits,
                variables,
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=2 * base.spec_bytes(logits),
                losses=losses,
                metrics=metrics,
            )

        def metric_names(self) -> tuple[str, ...]:
            """Return the names of metrics that are means, without the prefix."""
            return ("accuracy", f"top{self.top_k}") if self.top_k else ("accuracy",)

    params: Params


class Softmax(SoftmaxHead):
    """x: [..., D] floating, label: [...] integer → logits [..., classes]; loss: cross-entropy.

    The logits have the master dtype. Each label has weight 1, or that of the third name it reads,
    weights: [...]. Metrics: accuracy, top{k}. Variables: kernel [D, classes], bias [classes].
    FLOPs: as Dense.
    """

    class Params(SoftmaxHead.Params, dense.KernelParams):
        classes: int = hyperparams.required("Number of classes.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            rows, depth = self.checked(inputs, "Put a Flatten before it")
            checks.positive(self, classes=self.classes)
            logits = tf.TensorSpec((*rows, self.classes), self.policy.variable)
            variables = dense.weights(self, (depth, self.classes), self.classes)
            flops = 2 * math.prod(rows) * depth * self.classes
            return self.head_meta(len(inputs) - 1, logits, variables, flops)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.classes, "classes")

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.compute)
        logits = precision.cast(dense.project(x, theta["kernel"]), self.policy.variable)
        if self.params.use_bias:
            logits += precision.cast(theta["bias"], logits.dtype)
        if labels:
            add_loss_and_metrics(self.params, ctx, logits, tuple(labels))
        return logits


class SequenceSoftmax(SoftmaxHead):
    """x: [..., D] floating, label: [...] ids → logits [..., vocabulary]; loss: cross-entropy.

    The logits have the master dtype. The kernel has the layout of an Embedding's table, so that it
    can be tied to one: `tie={"kernel": "embedding/table"}`. Tokens have weight 1, or that of the
    third name it reads, weights: [...] (0 for padding). Metrics: accuracy, log_perplexity (of the
    plain label), top{k}.

    Variables: kernel [vocabulary, D], bias [vocabulary]. FLOPs: 2·tokens·D·vocabulary forward.
    """

    class Params(SoftmaxHead.Params, dense.KernelParams):
        vocabulary: int = hyperparams.required("Number of ids.")
        kernel_init = sequence.TABLE_INIT
        kernel_init_args = sequence.TABLE_INIT_ARGS

        def _meta(self, *inputs: SpecNest) -> Meta:
            rows, depth = self.checked(inputs, "It reads features per token")
            checks.positive(self, vocabulary=self.vocabulary)
            logits = tf.TensorSpec((*rows, self.vocabulary), self.policy.variable)
            variables = dense.weights(self, (self.vocabulary, depth), self.vocabulary)
            flops = 2 * math.prod(rows) * depth * self.vocabulary
            return self.head_meta(len(inputs) - 1, logits, variables, flops)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.vocabulary, "vocabulary")

        def metric_names(self) -> tuple[str, ...]:
            """See `SoftmaxHead`."""
            return (*super().metric_names(), "log_perplexity")

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.compute)
        logits = dense.project(x, theta["kernel"], transposed=True)
        logits = precision.cast(logits, self.policy.variable)
        if self.params.use_bias:
            logits += precision.cast(theta["bias"], logits.dtype)
        if labels:
            rows = add_loss_and_metrics(self.params, ctx, logits, tuple(labels))
            add_log_perplexity(self.params, ctx, rows)
        return logits


class MeanSquaredError(Head):
    """x: [B, ...] floating, target: [B, ...] → x in the master dtype; loss: squared error.

    It is the mean of (x − target)² over an example. Each example has weight 1, or that of the third
    name it reads, weights: [B].
    """

    class Params(Head.Params):
        reads = ("x", "target")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, target", "x, target, weights"))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It compares one tensor")
            axis = self.batch_dim or 0
            rows = shape[axis : axis + 1]
            for spec, expected in zip(inputs[1:], (shape, rows), strict=False):
                target = checks.any_shape(self, spec, "[B, ...]", "Set its field reads")
                if target != expected:
                    raise errors.LayerError(
                        f"{base.describe(self)}: target or weights of shape {list(target)}, "
                        f"expected {list(expected)} for x of shape {list(shape)}. Reshape one of "
                        "them"
                    )
            dtype = self.policy.variable
            losses: tuple[LossSpec, ...] = ()
            if len(inputs) > 1:
                weighted = len(inputs) == 3
                weight = weight_by(self.reads[-1], dtype, are_weights=weighted, examples=axis)
                losses = (LossSpec(self.loss_name, self.coefficient, weight),)
            output = tf.TensorSpec(shape, dtype)
            return Meta(output, activation_bytes=base.spec_bytes(output), losses=losses)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        if others:
            error = tf.square(x - tf.cast(others[0], x.dtype))
            per_example = _per_example(error, self.params.batch_dim or 0)
            if len(others) == 2:
                per_example *= tf.cast(others[1], x.dtype)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return x


def _per_example(values: tf.Tensor, batch_dim: int) -> tf.Tensor:
    """Return the mean over all axes but that of the batch: [B]."""
    return tf.reduce_mean(values, [axis for axis in range(values.shape.rank) if axis != batch_dim])


class AuxiliaryLoss(Layer):
    """x: [B, ...] floating → x in the compute dtype; loss: mean of x² (or |x|) over an example.

    It may be anywhere in a network.
    """

    class Params(LossParams):
        kind: Literal["l2", "l1"] = hyperparams.field("l2", "Mean of x², or of |x|.")
        examples: str = hyperparams.field(
            "label", "Field of the mini-batch whose batch dimension counts the examples."
        )
        loss_name = "auxiliary_loss"

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It measures one tensor")
            policy = self.policy
            weight = weight_by(self.examples, policy.variable, examples=self.batch_dim or 0)
            return Meta(
                tf.TensorSpec(shape, policy.compute),
                activation_bytes=base.spec_bytes(tf.TensorSpec(shape, policy.variable)),
                losses=(LossSpec(self.loss_name, self.coefficient, weight),),
            )

        def _inference(self, available: Collection[str]) -> Layer.Params | None:
            """Pass x on."""
            del available
            return reshaping.passing(self)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x = precision.cast(inputs, self.policy.variable)
        values = tf.square(x) if self.params.kind == "l2" else tf.abs(x)
        ctx.add_loss(
            self.params.loss_name, tf.reduce_sum(_per_example(values, self.params.batch_dim or 0))
        )
        return precision.cast(inputs, self.policy.compute)
