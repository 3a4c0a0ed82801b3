"""A softmax over a vocabulary, whole or in slices without all logits in one place.

Each slice adds to a few numbers of each label, the sums: a nest

    log_sum_exp   logarithm of the sum of exp(logit) over the slices so far
    label_logit   the label's own logit; 0 until its slice
    largest       the largest logit, and largest_id, its id (int32); the lowest of equal ones
    logit_sum     sum of the logits, where labels are smoothed
    top           the k largest logits, where top_k is counted

of shapes [...] and [..., k]. They are all that the next slice and the loss need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, precision
from lingvo_gpipe.layers import base, checks, dense, heads, sequence, slices
from lingvo_gpipe.layers.base import Layer, Meta, Theta
from lingvo_gpipe.layers.context import Context
from lingvo_gpipe.nests import Nest, SpecNest

Sums: TypeAlias = "dict[str, tf.Tensor]"
_ONE_NUMBER = ("log_sum_exp", "label_logit", "largest")


class SequenceSoftmax(heads.SoftmaxHead):
    """x: [..., D] floating, label: [...] ids → logits [..., vocabulary]; loss: cross-entropy.

    The logits have the master dtype. The kernel has the layout of an Embedding's table, so that it
    can be tied to one: `tie={"kernel": "embedding/table"}`. Tokens have weight 1, or that of the
    third name it reads, weights: [...] (0 for padding). Metrics: accuracy, log_perplexity (of the
    plain label), top{k}.

    Variables: kernel [vocabulary, D], bias [vocabulary]. FLOPs: 2·tokens·D·vocabulary forward.

    In N slices it is N + 1 layers: {name}_0, {name}_1, … (SoftmaxSlice), each with the rows of
    consecutive ids, and {name} (SlicedLoss, or JoinedLogits without a label), without weights.
    Loss, gradients and metrics are the same, but no layer has all logits: with a label the output
    is its log p, [...]. A tied kernel needs an Embedding in the same slices. Initial values are
    distributed as those of one kernel.
    """

    class Params(slices.SlicedParams, heads.SoftmaxHead.Params):
        vocabulary: int = hyperparams.required("Number of ids.")
        logit_clip: float | None = hyperparams.field(
            None,
            "Training clips logits to ± this value; beyond it they have no gradient. None: no "
            "clipping.",
        )
        kernel_init = sequence.TABLE_INIT
        kernel_init_args = sequence.TABLE_INIT_ARGS

        def _meta(self, *inputs: SpecNest) -> Meta:
            self._check_clip()
            return self.head_meta(inputs, "vocabulary", transposed=True)

        def _check_clip(self) -> None:
            if self.logit_clip is not None and self.logit_clip <= 0.0:
                raise errors.LayerError(
                    f"{base.describe(self)}: logit_clip={self.logit_clip}. Use more than 0, such "
                    "as 50, or None"
                )

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.vocabulary, "vocabulary")

        def metric_names(self) -> tuple[str, ...]:
            """See `LabelledParams`."""
            return (*super().metric_names(), "log_perplexity")

        def loss_of_slices(self) -> SlicedLoss.Params:
            """Return params of the class of the loss after the slices."""
            return SlicedLoss.Params()

        def in_slices(self, layers: Sequence[Layer.Params]) -> tuple[Layer.Params, ...]:
            """See `SlicedParams`."""
            self._check_clip()
            sizes, sums = self.slice_sizes(), f"{self.name}_sums"
            x, *labels = self.reads
            fields = slices.fields_of_slices(self, layers, (x, *labels[:1]), sums, (sums,))
            parts = [
                SoftmaxSlice.Params(
                    vocabulary=self.vocabulary,
                    first=first,
                    rows=size,
                    logit_clip=self.logit_clip,
                    sums_logits=self.label_smoothing > 0,
                    top_k=self.top_k,
                    use_bias=self.use_bias,
                    kernel_init=self.kernel_init,
                    kernel_init_args=self.kernel_init_args,
                    **each,
                )
                for first, size, each in zip(slices.firsts(sizes), sizes, fields, strict=True)
            ]
            logits = tuple(part.logits_name() for part in parts)
            common = {"name": self.name, "writes": self.writes, **slices.shared_fields(self, 0.0)}
            if not labels:
                for part in parts:
                    part.set(reads=(x,), writes=(part.logits_name(),))
                return (*parts, JoinedLogits.Params(reads=logits, **common))
            for name in ("label_smoothing", "metric_prefix", "top_k", "loss_name"):
                common[name] = self.get(name)
            loss = self.loss_of_slices().set(
                reads=(sums, *labels),
                vocabulary=self.vocabulary,
                logits=logits,
                coefficient=self.coefficient,
                **common,
            )
            return (*parts, loss)

    params: Params

    def logits(self, theta: Theta, x: tf.Tensor, ctx: Context) -> tf.Tensor:
        """See `SoftmaxHead`."""
        return _clipped(self.params, heads.project(self.params, theta, x, transposed=True), ctx)


class SoftmaxSlice(Layer):
    """x: [..., D] floating, label: [...] ids → the sums of this and earlier slices.

    A third name that it reads holds the sums of earlier slices. Without a label it returns its
    logits, [..., rows] in the master dtype.

    Variables: kernel [rows, D], bias [rows]. FLOPs: 2·tokens·D·rows forward.
    """

    class Params(dense.KernelParams):
        reads = ("x", "label")
        vocabulary: int = hyperparams.required("Number of ids of all slices.")
        first: int = hyperparams.required("The first id that it holds.")
        rows: int = hyperparams.required("Number of ids that it holds.")
        logit_clip: float | None = hyperparams.field(
            None,
            "Training clips logits to ± this value; beyond it they have no gradient. None: no "
            "clipping.",
        )
        sums_logits: bool = hyperparams.field(
            False, "Adds up the logits, for a loss with smoothed labels."
        )
        top_k: int = hyperparams.field(0, "Keeps the k largest logits; 0: none.")

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("x", "x, label", "x, label, sums"))
            checks.positive(self, rows=self.rows)
            *leading, depth = checks.shape(
                self, inputs[0], "[B, ..., D]", "It reads features per token"
            )
            heads.check_labels(self, tuple(leading), inputs[1:2])
            variable = self.policy.variable
            logits = tf.TensorSpec((*leading, self.rows), variable)
            outputs = _sum_specs(self, tuple(leading)) if len(inputs) > 1 else logits
            flops = 2 * math.prod(leading) * depth * self.rows
            return Meta(
                outputs,
                self._weights(depth),
                flops_forward=flops,
                flops_backward=dense.backward_flops(self, flops),
                activation_bytes=2 * base.spec_bytes(logits),
            )

        def _weights(self, depth: int) -> tuple[base.VariableSpec, ...]:
            shape = (self.rows, depth)
            name, arguments = slices.initializer(
                self, self.kernel_init, self.kernel_init_args, ((self.vocabulary, depth), shape)
            )
            scaled = self.copy().set(kernel_init=name, kernel_init_args=arguments)
            return dense.weights(scaled, shape, self.rows)

        def compared(self) -> tuple[str, ...]:
            """Return the label."""
            return self.reads[1:2]

        def logits_name(self) -> str:
            """Return the name of its logits where it reads no label."""
            return f"{self.name}_logits"

        def _inference(self) -> SoftmaxSlice.Params:
            """Leave out the label, and return logits."""
            return self.copy().set(reads=self.reads[:1], writes=(self.logits_name(),))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        p = self.params
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        logits = _clipped(p, heads.project(p, theta, x, transposed=True), ctx)
        if not labels:
            return logits
        label, *before = labels
        sums = self._sums(tf.reshape(logits, (-1, p.rows)), tf.reshape(label, (-1,)))
        sums = {
            name: tf.reshape(value, [*base.sizes(label), *value.shape[1:]])
            for name, value in sums.items()
        }
        return added(before[0], sums) if before else sums

    def _sums(self, logits: tf.Tensor, label: tf.Tensor) -> Sums:
        """Return the sums of this slice alone, from logits [N, rows] and labels [N]."""
        p = self.params
        found, places = slices.inside(label, p.first, p.rows)
        own = tf.gather(logits, places, batch_dims=1)
        fixed = tf.stop_gradient(logits)
        sums = {
            "log_sum_exp": tf.reduce_logsumexp(logits, -1),
            "label_logit": tf.where(found, own, tf.zeros_like(own)),
            "largest": tf.reduce_max(fixed, -1),
            "largest_id": heads.place_of_largest(fixed) + p.first,
        }
        if p.sums_logits:
            sums["logit_sum"] = tf.reduce_sum(logits, -1)
        if p.top_k:
            missing = max(0, p.top_k - p.rows)
            best = tf.math.top_k(fixed, min(p.top_k, p.rows)).values
            sums["top"] = tf.pad(best, [[0, 0], [0, missing]], constant_values=best.dtype.min)
        return sums


def _clipped(
    params: SequenceSoftmax.Params | SoftmaxSlice.Params, logits: tf.Tensor, ctx: Context
) -> tf.Tensor:
    clip = params.logit_clip
    return logits if clip is None or not ctx.training else tf.clip_by_value(logits, -clip, clip)


def _sum_specs(params: SoftmaxSlice.Params, shape: tuple[int, ...]) -> dict[str, tf.TensorSpec]:
    """Return the specs of the sums of labels of this shape."""
    dtype = params.policy.variable
    names = (*_ONE_NUMBER, "logit_sum") if params.sums_logits else _ONE_NUMBER
    specs = {name: tf.TensorSpec(shape, dtype) for name in names}
    specs["largest_id"] = tf.TensorSpec(shape, tf.int32)
    if params.top_k:
        specs["top"] = tf.TensorSpec((*shape, params.top_k), dtype)
    return specs


def added(before: Sums, here: Sums) -> Sums:
    """Return the sums of earlier slices and of the next one."""
    before = {name: precision.cast(before[name], here[name].dtype) for name in here}
    is_larger = here["largest"] > before["largest"]
    sums = {
        "log_sum_exp": added_log_sums(before["log_sum_exp"], here["log_sum_exp"]),
        "label_logit": before["label_logit"] + here["label_logit"],
        # Of equal logits the lower id counts, as in one argmax over all of them.
        "largest": tf.where(is_larger, here["largest"], before["largest"]),
        "largest_id": tf.where(is_larger, here["largest_id"], before["largest_id"]),
    }
    if "logit_sum" in here:
        sums["logit_sum"] = before["logit_sum"] + here["logit_sum"]
    if "top" in here:
        both = tf.stop_gradient(tf.concat([before["top"], here["top"]], -1))
        sums["top"] = tf.math.top_k(both, here["top"].shape[-1]).values
    return sums


def added_log_sums(before: tf.Tensor, here: tf.Tensor) -> tf.Tensor:
    """Return log(exp(before) + exp(here)), without overflow."""
    return tf.reduce_logsumexp(tf.stack([before, here]), 0)


class SlicedLoss(heads.Head):
    """sums of all slices, label: [...] ids → log p of the label, [...] in the master dtype.

    Loss, weights and metrics are those of `SequenceSoftmax`. It has no weights. FLOPs: 0. In
    inference it is a JoinedLogits.
    """

    class Params(heads.LabelledParams):
        reads = ("sums", "label")
        vocabulary: int = hyperparams.required("Number of ids of all slices.")
        logits: tuple[str, ...] = hyperparams.required(
            "Names of the slices' logits, which they write in inference."
        )

        def _meta(self, *inputs: SpecNest) -> Meta:
            checks.arity(self, inputs, ("sums, label", "sums, label, weights"))
            sums, *labels = inputs
            if not isinstance(sums, dict) or "log_sum_exp" not in sums:
                raise errors.LayerError(
                    f"{base.describe(self)}: {self.reads[0]!r} holds no sums. Read what the last "
                    "SoftmaxSlice writes"
                )
            shape = tuple(sums["log_sum_exp"].shape.as_list())
            checks.share(self, "label_smoothing", self.label_smoothing)
            heads.check_labels(self, shape, labels)
            output = tf.TensorSpec(shape, self.policy.variable)
            meta = Meta(output, activation_bytes=base.spec_bytes(sums))
            return self.with_losses(meta, len(labels), output.dtype)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.vocabulary, "vocabulary")

        def metric_names(self) -> tuple[str, ...]:
            """See `SequenceSoftmax`."""
            return (*super().metric_names(), "log_perplexity")

        def _inference(self) -> JoinedLogits.Params:
            """Return logits, without a label."""
            return JoinedLogits.Params(
                name=self.name,
                reads=self.logits,
                writes=self.writes,
                dtype=self.dtype,
            )

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta
        sums, *labels = inputs
        rows = self.add_loss(sums, tuple(labels), ctx)
        return tf.reshape(-rows.log_perplexity, tf.shape(labels[0]))

    def add_loss(self, sums: Sums, labels: tuple[tf.Tensor, ...], ctx: Context) -> heads.Rows:
        """Add loss and metrics to the context; return those of each label."""
        p, dtype = self.params, self.policy.variable
        flat = {
            name: precision.cast(
                tf.reshape(value, (-1, *value.shape[labels[0].shape.rank :])), dtype
            )
            for name, value in sums.items()
        }
        label, weights = heads.flat_labels(labels, dtype)
        log_sum, own = flat["log_sum_exp"], flat["label_logit"]
        plain = smoothed = log_sum - own
        if p.label_smoothing:
            above_mean = own - flat["logit_sum"] / tf.constant(p.vocabulary, dtype)
            smoothed = plain + p.label_smoothing * above_mean
        among_best = None
        if p.top_k:
            above = tf.reduce_sum(tf.cast(flat["top"] > own[:, tf.newaxis], tf.int32), -1)
            among_best = (above < p.top_k) & tf.math.is_finite(own)
        best = tf.cast(flat["largest_id"], label.dtype)
        scores = heads.Scores(smoothed, plain, best, among_best)
        return heads.add_scores(p, ctx, scores, (label, weights))


class JoinedLogits(Layer):
    """Logits of slices: [..., rows] floating → [..., vocabulary] in the master dtype, in order.

    Served, it returns probabilities.
    """

    class Params(Layer.Params):
        """Fields of every layer."""

        def _meta(self, *inputs: SpecNest) -> Meta:
            shapes = [checks.shape(self, x, "[B, ...]", "It reads logits") for x in inputs]
            leading = {shape[:-1] for shape in shapes}
            if len(leading) > 1:
                raise errors.LayerError(
                    f"{base.describe(self)}: logits of shapes {[list(s) for s in shapes]} cannot "
                    "be joined. Read those of one softmax's slices"
                )
            total = sum(shape[-1] for shape in shapes)
            output = tf.TensorSpec((*leading.pop(), total), self.policy.variable)
            return Meta(output, activation_bytes=base.spec_bytes(output))

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return probabilities."""
            return heads.probabilities(outputs)

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: Context) -> Nest:
        """See `Layer.fprop`."""
        del theta, ctx
        logits = inputs if isinstance(inputs, tuple) else (inputs,)
        return tf.concat([precision.cast(each, self.policy.variable) for each in logits], -1)
