"""The heads of AmoebaNet: a classifier and an auxiliary head."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers
from lingvo_gpipe.layers import base, checks, composite
from lingvo_gpipe.layers import heads as core_heads
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.image.model import operations

AUXILIARY_FILTERS = (51, 307)  # ⌊128 · 0.4⌋ and ⌊768 · 0.4⌋
AUXILIARY_POOL = 5


class AuxiliaryHead(layers.Composite):
    """x: [B, H, W, C], label: [B] → logits [B, classes], and their loss, in training only.

    ReLU, 5×5 average pool of stride 3, 1×1 convolution, a convolution as large as its input, and
    softmax: so its weights depend on the size of the images. Loss: "auxiliary".
    """

    class Params(layers.Composite.Params):
        classes: int | None = hyperparams.required("Number of classes; None: the dataset's.")
        coefficient: float = hyperparams.field(0.4, "Factor of its loss.")
        loss_name: str = hyperparams.field("auxiliary", "Name of its loss.")
        label_smoothing: float = hyperparams.field(
            0.1, "Share of the target spread evenly over all classes, in [0, 1)."
        )
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norms."
        )
        reads = ("x", "label")
        training_only = True

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            narrow, whole = AUXILIARY_FILTERS
            parts: list[layers.Layer.Params] = [
                operations.relu(),
                layers.AvgPool2D.Params(
                    name="pool", pool_size=AUXILIARY_POOL, strides=3, padding="valid"
                ),
                operations.conv("narrow_conv", narrow),
                operations.norm(self.norm, "narrow_norm"),
                operations.relu("narrow_relu"),
                operations.WholeConv2D.Params(name="whole_conv", filters=whole),
                operations.norm(self.norm, "whole_norm"),
                operations.relu("whole_relu"),
                softmax(self, reads=("x",)),
            ]
            return operations.by_name(parts)

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x, label",))
            _, height, width, _ = checks.shape(
                self, inputs[0], "[B, H, W, C]", "It reads a cell's output"
            )
            checks.share(self, "label_smoothing", self.label_smoothing)
            if min(height, width) < AUXILIARY_POOL:
                raise errors.LayerError(
                    f"the auxiliary head pools windows of {AUXILIARY_POOL}x{AUXILIARY_POOL}, but "
                    f"the cell before it returns {height}x{width}: the images are too small for "
                    "it. Use at least 67x67 (11x11 with the small stem): input.height, "
                    "input.width; or remove the head by auxiliary=None of its cell"
                )
            meta = super()._meta(inputs[0])
            weight = core_heads.weight_by(self.reads[1], meta.outputs.dtype)
            loss = base.LossSpec(self.loss_name, self.coefficient, weight, training_only=True)
            return dataclasses.replace(meta, losses=(loss,))

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        x, label = inputs
        logits = self.run_parts(theta, ctx, x)
        if ctx.training:
            each, _ = core_heads.cross_entropy(logits, label, self.params.label_smoothing)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(each))
        return logits


def softmax(
    params: AuxiliaryHead.Params | Classifier.Params, **fields: Any
) -> layers.Softmax.Params:
    """Return the Params of a softmax over the classes of `params`.

    Raises:
        LayerError: the number of classes is not known yet.
    """
    if params.classes is None:
        raise errors.LayerError(
            f"{base.describe(params)}: its number of classes is taken from the dataset before a "
            "run (task.complete). Without a dataset, set its field classes"
        )
    return layers.Softmax.Params(
        name="softmax",
        classes=params.classes,
        kernel_init=operations.KERNEL_INIT,
        kernel_init_args=operations.KERNEL_INIT_ARGS,
        **fields,
    )


class Classifier(layers.Composite, core_heads.Head):
    """x: [B, H, W, C], label: [B] → logits [B, classes]: ReLU, mean over [H, W], dropout, softmax.

    Loss and metrics are those of `Softmax`; top{k} is left out where there are no more than k
    classes.
    """

    class Params(core_heads.LabelledParams, layers.Composite.Params):
        classes: int | None = hyperparams.required("Number of classes; None: the dataset's.")
        dropout: float = hyperparams.field(0.5, "Share of the features dropped, in [0, 1).")

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            names = ("loss_name", "coefficient", "label_smoothing", "metric_prefix")
            shared = {name: self.get(name) for name in names}
            # Among k classes every label is one of the k best.
            shared["top_k"] = self.top_k if (self.classes or 0) > self.top_k else 0
            parts: list[layers.Layer.Params] = [
                operations.relu(),
                layers.GlobalPool2D.Params(name="pool"),
                layers.Dropout.Params(name="dropout", rate=self.dropout),
                softmax(self, reads=("x", *self.reads[1:]), **shared),
            ]
            return operations.by_name(parts)

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, *label = inputs
            return call("softmax", call.chain(("relu", "pool", "dropout"), x), *label)

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x", "x, label"))
            return super()._meta(*inputs)

        def value_ranges(self) -> dict[str, base.ValueRange]:
            """Return the range of the label."""
            return self.label_range(self.classes, "classes")

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return probabilities."""
            return core_heads.probabilities(outputs)

    params: Params
