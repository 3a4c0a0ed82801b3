"""Heads and losses: each gives sums over its micro-batch, and the weight they are divided by.

The weight is a function of the mini-batch's own fields, evaluated once over the whole update, so
that unequal micro-batches count right. So the names of labels, targets and weights must be fields
of the mini-batch. Losses and logits are float32, or float64 under that policy. A layer that does
not read its label (`reads=("x",)`) gives its outputs and no loss: a model for inference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense, embedding, joining
from lingvo_gpipe.layers.base import Layer, LossSpec, Meta, MetricSpec, Theta, VariableSpec
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

CONFUSION = "confusion"


class LossParams(Layer.Params):
    """Fields of every layer that gives a loss."""

    loss_name: str = hyperparams.field("loss", "Name of its loss, unique in the network.")
    coefficient: float = hyperparams.field(1.0, "Its share in the update's loss.")


class Head(Layer):
    """Base of layers that compare the first name they read with the others: label, weights."""

    class Params(LossParams):
        """Fields of every head."""

        def compared(self) -> tuple[str, ...]:
            """Name label and weights; see `Layer.compared`."""
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
    metric_prefix: str = hyperparams.field("", "Before the names of its metrics.")
    top_k: int = hyperparams.field(0, "Gives the metric top{k} too: label among the k best.")
    confusion: bool = hyperparams.field(
        False, "Gives the metric confusion in evaluation: [C, C], rows true, columns predicted."
    )


def weight_by(
    name: str, dtype: tf.DType, *, given: bool, examples: int | None = None
) -> Callable[[dict[str, Any]], tf.Tensor]:
    """Return the weight of a loss as a function of the mini-batch's fields.

    Args:
        name: of the field.
        dtype: of the weight.
        given: the field's elements are weights, to be added up; else they are counted.
        examples: count along this side alone.
    """

    def weight(fields: dict[str, Any]) -> tf.Tensor:
        if name not in fields:
            near = errors.nearest(name, fields) or sorted(fields)
            raise errors.LayerError(
                f"a loss is weighted by {name!r}, which is no field of the mini-batch; nearest "
                f"{', '.join(near)}. Read the field itself, under its own name"
            )
        value = fields[name]
        if given:
            return tf.reduce_sum(tf.cast(value, dtype))
        return tf.cast(tf.size(value) if examples is None else tf.shape(value)[examples], dtype)

    return weight


def mean(sums: Any) -> tf.Tensor:
    """Return the mean of added-up (total, weight); 0 where nothing weighs."""
    return tf.math.divide_no_nan(sums["total"], sums["weight"])


def _labelled(params: Any, inputs: tuple[Any, ...], rows: tuple[int, ...]) -> None:
    """Check label and weights of a softmax head whose logits are [*rows, classes]."""
    checks.share(params, "label_smoothing", params.label_smoothing)
    for kind, spec in zip(("label", "weights"), inputs[1:], strict=False):
        found = checks.any_shape(params, spec, "[...]", "Set its field reads")
        if found != rows:
            raise errors.LayerError(
                f"{base.describe(params)}: {kind} of shape {list(found)}, expected {list(rows)} "
                "for its x. Set its field reads, or reshape"
            )
        if kind == "label" and not spec.dtype.is_integer:
            raise errors.LayerError(
                f"{base.describe(params)}: label is {spec.dtype.name}, expected integer classes. "
                "Cast it in the input"
            )


def _told(
    params: Any,
    inputs: tuple[Any, ...],
    output: tf.TensorSpec,
    variables: tuple[VariableSpec, ...],
    flops: int,
    metrics: tuple[str, ...],
) -> Meta:
    """Return the Meta of a softmax head; it keeps logits and probabilities."""
    losses: tuple[LossSpec, ...] = ()
    specs: tuple[MetricSpec, ...] = ()
    if len(inputs) > 1:
        given = len(inputs) == 3
        weight = weight_by(params.reads[2 if given else 1], output.dtype, given=given)
        losses = (LossSpec(params.loss_name, params.coefficient, weight),)
        specs = tuple(MetricSpec(params.metric_prefix + name, mean) for name in metrics)
        if params.confusion:
            name = f"{params.metric_prefix}{CONFUSION}"
            specs += (MetricSpec(name, tf.identity, evaluation_only=True),)
    return Meta(
        output,
        variables,
        flops_forward=flops,
        flops_backward=dense.backward_flops(params, flops),
        activation_bytes=2 * base.spec_bytes(output),
        losses=losses,
        metrics=specs,
    )


def _metric_names(params: Any) -> tuple[str, ...]:
    return ("accuracy", f"top{params.top_k}") if params.top_k else ("accuracy",)


def cross_entropy(
    logits: tf.Tensor, label: tf.Tensor, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return per row the cross-entropy with the smoothed and with the plain label.

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
    # parts, each with a gradient; and scatter refuses a label outside, which one_hot overlooks.
    label = tf.cast(label, tf.int64)
    rows = tf.range(tf.size(label, tf.int64))
    spread = tf.constant(label_smoothing / logits.shape[-1], logits.dtype)
    own = tf.fill(tf.shape(label), tf.constant(1.0 - label_smoothing, logits.dtype))
    target = tf.fill(tf.shape(logits), spread)
    target = tf.tensor_scatter_nd_add(target, tf.stack([rows, label], -1), own)
    smoothed = tf.nn.softmax_cross_entropy_with_logits(target, logits)
    above_mean = tf.gather(logits, label, batch_dims=1) - tf.reduce_mean(logits, -1)
    return smoothed, smoothed - label_smoothing * above_mean


def _among_best(logits: tf.Tensor, label: tf.Tensor, k: int) -> tf.Tensor:
    """Return per row whether fewer than k classes score above the label; ties are hits."""
    own = tf.gather(logits, label, axis=-1, batch_dims=1)
    above = tf.reduce_sum(tf.cast(logits > own[:, tf.newaxis], tf.int32), -1)
    return (above < k) & tf.math.is_finite(own)


def _confusion(
    label: tf.Tensor, predicted: tf.Tensor, weights: tf.Tensor, classes: int
) -> tf.Tensor:
    """Return [C, C]: weights added up by true (row) and predicted class (column).

    Whole numbers are exact up to 2^24 in float32; an evaluation adds batches up in float64.
    """
    place = tf.cast(label, tf.int64) * classes + tf.cast(predicted, tf.int64)
    flat = tf.math.unsorted_segment_sum(weights, place, classes * classes)
    return tf.reshape(flat, [classes, classes])


class Rows(NamedTuple):
    """What a head found per label, flat, in the dtype of its logits.

    Attributes:
        log_perplexity: cross-entropy with the plain label.
        accuracy: 1 where the largest logit is the label's, else 0.
        weight: what each counts.
    """

    log_perplexity: tf.Tensor
    accuracy: tf.Tensor
    weight: tf.Tensor


def give(params: Any, ctx: Context, logits: tf.Tensor, labels: tuple[tf.Tensor, ...]) -> Rows:
    """Give loss and metrics of logits [..., C]; return what was found per label.

    Args:
        params: a `LabelledParams`.
        ctx: takes what is given.
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


def give_log_perplexity(params: Any, ctx: Context, rows: Rows) -> None:
    """Give the metric log_perplexity of what `give` returned."""
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

    params: Params


class Softmax(SoftmaxHead):
    """x: [..., D], label: [...] integer → logits [..., classes]; loss: cross-entropy.

    Each label counts 1, or what the third name it reads says. Metrics: accuracy, top{k}.
    Variables: kernel [D, classes], bias [classes]. FLOPs: as Dense.
    """

    class Params(SoftmaxHead.Params):
        classes: int = hyperparams.required("Number of classes.")
        use_bias: bool = hyperparams.field(True, "Adds a bias of shape [classes].")
        kernel_init: str = hyperparams.field("glorot_uniform", "Name of a Keras initializer.")
        kernel_init_args: dict[str, Any] = hyperparams.field({}, "Its arguments.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, label", "x, label, weights"))
            *rows, depth = checks.shape(self, inputs[0], "[B, ..., D]", "Put a Flatten before it")
            checks.positive(self, classes=self.classes)
            _labelled(self, inputs, tuple(rows))
            output = tf.TensorSpec((*rows, self.classes), self.policy.variable)
            variables = dense.weights(self, (depth, self.classes), self.classes)
            flops = 2 * math.prod(rows) * depth * self.classes
            return _told(self, inputs, output, variables, flops, _metric_names(self))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.compute)
        logits = precision.cast(dense.project(x, theta["kernel"]), self.policy.variable)
        if self.params.use_bias:
            logits += precision.cast(theta["bias"], logits.dtype)
        if labels:
            give(self.params, ctx, logits, tuple(labels))
        return logits


class SequenceSoftmax(SoftmaxHead):
    """x: [..., D], label: [...] ids → logits [..., vocabulary]; loss: cross-entropy per token.

    The kernel lies as an Embedding's table does, so that it can be tied to one:
    `tie={"kernel": "embedding/table"}`. Tokens count 1, or what the third name it reads says (0
    for padding). Metrics: accuracy, log_perplexity (of the plain label), top{k}.

    Variables: kernel [vocabulary, D], bias [vocabulary]. FLOPs: 2·tokens·D·vocabulary forward.
    """

    class Params(SoftmaxHead.Params):
        vocabulary: int = hyperparams.required("Number of ids.")
        use_bias: bool = hyperparams.field(True, "Adds a bias of shape [vocabulary].")
        kernel_init: str = hyperparams.field(embedding.TABLE_INIT, "Name of a Keras initializer.")
        kernel_init_args: dict[str, Any] = hyperparams.field(
            embedding.TABLE_INIT_ARGS, "Its arguments."
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, label", "x, label, weights"))
            *rows, depth = checks.shape(
                self, inputs[0], "[B, ..., D]", "It reads features per token"
            )
            checks.positive(self, vocabulary=self.vocabulary)
            _labelled(self, inputs, tuple(rows))
            output = tf.TensorSpec((*rows, self.vocabulary), self.policy.variable)
            variables = dense.weights(self, (self.vocabulary, depth), self.vocabulary)
            flops = 2 * math.prod(rows) * depth * self.vocabulary
            names = (*_metric_names(self), "log_perplexity")
            return _told(self, inputs, output, variables, flops, names)

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
            give_log_perplexity(self.params, ctx, give(self.params, ctx, logits, tuple(labels)))
        return logits


class MeanSquaredError(Head):
    """x: [B, ...], target: the same shape → x; loss: mean of (x − target)² over an example.

    Each example counts 1, or what the third name it reads, [B], says.
    """

    class Params(Head.Params):
        reads = ("x", "target")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, target", "x, target, weights"))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It compares one tensor")
            side = self.batch_dim or 0
            rows = shape[side : side + 1]
            for spec, expected in zip(inputs[1:], (shape, rows), strict=False):
                found = checks.any_shape(self, spec, "[B, ...]", "Set its field reads")
                if found != expected:
                    raise errors.LayerError(
                        f"{base.describe(self)}: target or weights of shape {list(found)}, "
                        f"expected {list(expected)} for x of shape {list(shape)}. Reshape one of "
                        "them"
                    )
            dtype = self.policy.variable
            losses: tuple[LossSpec, ...] = ()
            if len(inputs) > 1:
                given = len(inputs) == 3
                weight = weight_by(self.reads[-1], dtype, given=given, examples=side)
                losses = (LossSpec(self.loss_name, self.coefficient, weight),)
            output = tf.TensorSpec(shape, dtype)
            return Meta(output, activation_bytes=base.spec_bytes(output), losses=losses)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        x, *given = inputs if isinstance(inputs, tuple) else (inputs,)
        x = precision.cast(x, self.policy.variable)
        if given:
            error = tf.square(x - tf.cast(given[0], x.dtype))
            per_example = _per_example(error, self.params.batch_dim or 0)
            if len(given) == 2:
                per_example *= tf.cast(given[1], x.dtype)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(per_example))
        return x


def _per_example(values: tf.Tensor, batch_dim: int) -> tf.Tensor:
    """Return the mean over all sides but that of the batch: [B]."""
    return tf.reduce_mean(values, [side for side in range(values.shape.rank) if side != batch_dim])


class AuxiliaryLoss(Layer):
    """x: [B, ...] → x; loss: mean of x² (or |x|) over an example. Stands anywhere in a network."""

    class Params(LossParams):
        kind: Literal["l2", "l1"] = hyperparams.field("l2", "Mean of x², or of |x|.")
        examples: str = hyperparams.field(
            "label", "Field of the mini-batch whose batch side counts the examples."
        )
        loss_name = "auxiliary_loss"

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x",))
            shape = checks.shape(self, inputs[0], "[B, ...]", "It measures one tensor")
            policy = self.policy
            weight = weight_by(
                self.examples, policy.variable, given=False, examples=self.batch_dim or 0
            )
            return Meta(
                tf.TensorSpec(shape, policy.compute),
                activation_bytes=base.spec_bytes(tf.TensorSpec(shape, policy.variable)),
                losses=(LossSpec(self.loss_name, self.coefficient, weight),),
            )

        def _inference(self, available: Collection[str]) -> Layer.Params | None:
            """Hand x on; see `Layer.inference`."""
            del available
            return joining.passing(self)

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
