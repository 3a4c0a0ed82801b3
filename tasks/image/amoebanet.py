"""AmoebaNet (L, D): L normal cells, D filters in the first stack, as a flat list of layers.

Source: Real et al. 2019 (arXiv 1802.01548) in the wiring of its reference code
(tensorflow/tpu, `amoeba_net/`), with which parameters and multiply-adds agree exactly.

Each layer writes a name of its own and reads those of the two layers before it, so that wherever
the list is cut, the state before last goes straight to the cell that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal, Self

import tensorflow as tf

from lingvo_gpipe import errors, hyperparams, layers
from lingvo_gpipe.layers import base, checks, composition, heads, joining
from lingvo_gpipe.layers.base import Theta
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.image import genotypes, operations

STEM_FILTERS = 32  # whatever D is
AUXILIARY_FILTERS = (51, 307)  # ⌊128 · 0.4⌋ and ⌊768 · 0.4⌋
AUXILIARY_POOL = 5


def amoeba_net(
    genotype: str,
    num_cells: int,
    filters: int,
    classes: int | None,
    *,
    stem: Literal["imagenet", "small"] = "imagenet",
    drop_path_keep: float = 1.0,
    drop_path_steps: int = 0,
    dropout: float = 0.5,
    auxiliary_weight: float = 0.0,
    label_smoothing: float = 0.1,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    top_k: int = 5,
    confusion: bool = False,
) -> list[Any]:
    """Return the layers of AmoebaNet: L + 6 of them, or L + 4 with the small stem.

    image: [B, H, W, 3] (or several crops of each, [B, crops, H, W, 3], in evaluation), label: [B]
    → logits [B, classes]. Losses: "loss" and, with an auxiliary head, "auxiliary".

    Args:
        genotype: "A", "B" or "D"; see `genotypes`.
        num_cells: L, normal cells; before each further third of them stands a reduction cell.
        filters: D; the stacks have D, 2D and 4D.
        classes: number of classes; None: as many as the dataset has, filled in before a run.
        stem: "imagenet" divides height and width by 8 (a convolution and two reduction cells);
            "small" keeps them, for images of a few dozen pixels.
        drop_path_keep: share of examples that each operation keeps in the end; 1: all.
        drop_path_steps: updates over which the share falls from 1 to that; 0: it never was more.
        dropout: share of the features dropped before the classifier.
        auxiliary_weight: coefficient of the auxiliary head's loss; 0: no such head. It stands
            behind the last normal cell before the second reduction cell.
        label_smoothing: of both losses.
        momentum: share of the old moving statistics in every batch norm.
        epsilon: added to the variance in every batch norm.
        top_k: gives the metric top{k} beside accuracy; 0: not.
        confusion: gives the confusion matrix in evaluation.

    Raises:
        LayerError: there is no such genotype, or L or D do not fit it.

    >>> [params.name for params in amoeba_net("D", 3, 32, classes=10)]  # doctest: +ELLIPSIS
    ['stem_conv', 'stem_cell_0', 'stem_cell_1', 'normal_0', 'reduction_0', 'normal_1', ...
    """
    genotypes.genotype(genotype)
    _check_size(num_cells, filters, stem)
    norm = layers.BatchNorm.Params(momentum=momentum, epsilon=epsilon)
    drop_path = None
    if drop_path_keep != 1.0:
        drop_path = operations.DropPath.Params(keep=drop_path_keep, steps=drop_path_steps)
    flat: list[Any] = [Stem.Params(name="stem_conv", reads=("image",), kind=stem, norm=norm)]
    flat += [
        AmoebaCell.Params(
            name=name,
            genotype=genotype,
            reduction=reduction,
            filters=width,
            norm=norm,
            drop_path=drop_path,
        )
        for name, reduction, width in _cells(num_cells, filters, stem)
    ]
    flat.append(
        Classifier.Params(
            name="classifier",
            classes=classes,
            dropout=dropout,
            label_smoothing=label_smoothing,
            top_k=top_k,
            confusion=confusion,
        )
    )
    for number, params in enumerate(flat):
        params.writes = (params.name,)
        if isinstance(params, AmoebaCell.Params):
            params.reads = tuple(p.name for p in reversed(flat[max(0, number - 2) : number]))
    flat[-1].reads = (flat[-2].name, "label")
    if auxiliary_weight:
        behind = f"normal_{num_cells * 2 // 3 - 1}"
        (cell,) = (params for params in flat if params.name == behind)
        cell.reads = (*cell.reads, "label")
        cell.auxiliary = AuxiliaryHead.Params(
            classes=classes,
            coefficient=auxiliary_weight,
            label_smoothing=label_smoothing,
            norm=norm,
        )
    return flat


def _check_size(num_cells: int, filters: int, stem: str) -> None:
    if num_cells < 2:
        raise errors.LayerError(
            f"amoeba_net: num_cells={num_cells}, but a reduction cell stands before the second and "
            "the last third of them. Use 2 or more; the published networks have 6, 18, 36 or 72"
        )
    if stem == "imagenet" and (filters < 4 or filters % 4):
        near = max(4, filters // 4 * 4)
        raise errors.LayerError(
            f"amoeba_net: filters={filters} does not divide by 4, but the stem cells have a "
            f"quarter and a half of them. Use {near} or {near + 4}"
        )
    if filters < 1:
        raise errors.LayerError(f"amoeba_net: filters={filters}. Use 1 or more")


def _cells(num_cells: int, filters: int, stem: str) -> list[tuple[str, bool, int]]:
    """Return name, whether it is a reduction cell, and filters of each cell."""
    found = []
    if stem == "imagenet":
        found += [("stem_cell_0", True, filters // 4), ("stem_cell_1", True, filters // 2)]
    reductions = [num_cells // 3, num_cells * 2 // 3]
    for number in range(num_cells):
        if number in reductions:
            filters *= 2
            found.append((f"reduction_{reductions.index(number)}", True, filters))
        found.append((f"normal_{number}", False, filters))
    return found


class Stem(layers.Layer):
    """image: [B, H, W, C] → [B, H', W', filters]: a 3×3 convolution without padding, batch norm.

    Several crops of each image, [B, crops, H, W, C], become examples of their own, an image's in a
    row: [B·crops, H', W', filters].
    """

    class Params(layers.Layer.Params):
        kind: Literal["imagenet", "small"] = hyperparams.field(
            "imagenet", "imagenet: with a stride of 2; small: of 1."
        )
        filters: int = hyperparams.field(STEM_FILTERS, "Output channels.")
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norm."
        )

        def _parts(self) -> list[Any]:
            strides = 2 if self.kind == "imagenet" else 1
            conv = operations.conv(
                "conv", self.filters, kernel_size=3, strides=strides, padding="valid"
            )
            return [conv, operations.norm(self.norm)]

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("image",))
            layout = "[B, ..., H, W, C]"
            *batch, height, width, channels = checks.shape(
                self, inputs[0], layout, "It takes images, or several crops of each"
            )
            if len(batch) > 2:
                raise errors.LayerError(
                    f"{base.describe(self)}: expected images [B, H, W, C], or crops of each "
                    f"[B, crops, H, W, C], got shape {inputs[0].shape}"
                )
            if min(height, width) < 3:
                raise errors.LayerError(
                    f"{base.describe(self)}: an image of {height}x{width} is too small for the "
                    "stem's 3x3 convolution. Use images of 3x3 at least: input.height, input.width"
                )
            count = batch[0] * batch[-1] if len(batch) == 2 else batch[0]
            image = tf.TensorSpec((count, height, width, channels), inputs[0].dtype)
            return composition.chain_meta(self, self._parts(), (image,))

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in params._parts():
            self.add_child(child.name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        x = inputs
        if x.shape.rank == 5:
            x = tf.reshape(x, (-1, *x.shape[2:]))
        for name in self.children:
            x = self.child(name, theta, x, ctx)
        return x


class AmoebaCell(layers.Layer):
    """A normal or reduction cell; see `genotypes`.

    x: [B, H, W, C], previous: [B, H or 2H, W or 2W, C'] → [B, H', W', outputs · filters], half as
    high and wide after a reduction cell. State 0 is x after ReLU, 1×1 convolution and batch norm;
    state 1 is `previous`, made to fit (`operations.Fit`), or x itself where it reads x alone. The
    third name that a cell with an auxiliary head reads is the label.
    """

    class Params(layers.Layer.Params):
        genotype: str = hyperparams.required("Name of its genotype.")
        reduction: bool = hyperparams.field(False, "Halves height and width.")
        filters: int = hyperparams.required("Channels of each state.")
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norms."
        )
        drop_path: operations.DropPath.Params | None = hyperparams.field(
            None, "Drops examples of each operation's output; None: none."
        )
        auxiliary: AuxiliaryHead.Params | None = hyperparams.field(
            None, "A head on its output, for training alone; None: none."
        )
        reads = ("x", "previous")

        def _inference(self, available: Collection[str]) -> Self:
            """Leave out the auxiliary head and its label."""
            del available
            served = self.copy()
            served.auxiliary, served.reads = None, served.reads[:2]
            return served

        def _wiring(self) -> genotypes.Wiring:
            genotype = genotypes.genotype(self.genotype)
            return genotype.reduction if self.reduction else genotype.normal

        def _parts(self) -> dict[str, Any]:
            """Return the params of all children by name."""
            filters, norm, wiring = self.filters, self.norm, self._wiring()
            fit = operations.Fit.Params(filters=filters, norm=norm)
            entrance = [operations.relu(), operations.conv("conv", filters), operations.norm(norm)]
            parts: dict[str, Any] = {"base": layers.Sequential.Params(layers=entrance)}
            if len(self.reads) > 1:
                parts["previous"] = fit
            for number, edges in enumerate(wiring.sums, genotypes.FIRST_SUM):
                for side, edge in zip(("left", "right"), edges, strict=True):
                    parts[f"state_{number}_{side}"] = operations.Operation.Params(
                        operation=edge.operation,
                        filters=filters,
                        stride=2 if self.reduction and edge.state < genotypes.FIRST_SUM else 1,
                        norm=norm,
                        drop_path=self.drop_path,
                    )
            for state in wiring.output:
                if state < genotypes.FIRST_SUM:
                    parts[f"output_{state}"] = fit.copy().set(relu=False)
            if self.auxiliary is not None:
                parts["auxiliary"] = self.auxiliary.copy().set(reads=("x", self.reads[-1]))
            return parts

        def _walk(
            self,
            inputs: tuple[SpecNest, ...],
            run: Callable[..., Any],
            add: Callable[[Any, Any], Any],
            concat: Callable[[list[Any]], Any],
        ) -> Any:
            """Go through the cell; return what it gives.

            Args:
                inputs: x and, if there is one, previous.
                run: name of a child, its inputs → its output.
                add: two outputs → their sum.
                concat: states → them side by side.
            """
            x, wiring = inputs[0], self._wiring()
            states = [run("base", x), run("previous", inputs[1], x) if len(inputs) > 1 else x]
            for number, (left, right) in enumerate(wiring.sums, genotypes.FIRST_SUM):
                states.append(
                    add(
                        run(f"state_{number}_left", states[left.state]),
                        run(f"state_{number}_right", states[right.state]),
                    )
                )
            return concat(
                [
                    run(f"output_{state}", states[state], states[-1])
                    if state < genotypes.FIRST_SUM
                    else states[state]
                    for state in wiring.output
                ]
            )

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            # A label without a head that would read it is left over where the head was taken away.
            forms = ("x, previous, label",)
            checks.arity(self, inputs, forms if self.auxiliary else ("x", "x, previous", *forms))
            parts = self._parts()
            metas: list[base.Meta] = []
            joined: list[base.Meta] = []

            def run(name: str, *specs: Any) -> Any:
                told = base.child_meta(self, name, parts[name], *specs)
                if isinstance(parts[name], operations.Operation.Params):
                    told = dataclasses.replace(told, kind=parts[name].operation)
                if told.children or told.variables:  # an operation that does nothing has no line
                    metas.append(told)
                return told.outputs

            def concat(states: list[Any]) -> Any:
                joined.append(joining.concat_meta(self, tuple(states), -1))
                return joined[0].outputs

            output = self._walk(
                inputs[:2], run, lambda a, b: joining.sum_meta(self, (a, b)), concat
            )
            if self.auxiliary is not None:
                run("auxiliary", output, inputs[2])
            told = base.sum_metas(output, metas)
            kept = told.activation_bytes + joined[0].activation_bytes
            return dataclasses.replace(told, activation_bytes=kept)

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for name, child in params._parts().items():
            self.add_child(name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        read = inputs if isinstance(inputs, tuple) else (inputs,)

        def run(name: str, *values: Any) -> Any:
            return self.child(name, theta, values[0] if len(values) == 1 else values, ctx)

        output = self.params._walk(read[:2], run, tf.add, lambda states: tf.concat(states, -1))
        if self.params.auxiliary is not None and ctx.training:
            run("auxiliary", output, read[2])
        return output


class AuxiliaryHead(layers.Layer):
    """x: [B, H, W, C], label: [B] → logits [B, classes], and their loss, in training alone.

    ReLU, an average pool of 5×5 with a stride of 3, a 1×1 convolution, one as large as what is
    left, and softmax: so its weights depend on the size of the images. Loss: "auxiliary".
    """

    class Params(layers.Layer.Params):
        classes: int | None = hyperparams.required("Number of classes; None: the dataset's.")
        coefficient: float = hyperparams.field(0.4, "Share of its loss in the update's.")
        loss_name: str = hyperparams.field("auxiliary", "Name of its loss.")
        label_smoothing: float = hyperparams.field(
            0.1, "Share of the target that is spread evenly over all classes, in [0, 1)."
        )
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norms."
        )
        reads = ("x", "label")
        training_only = True

        def _parts(self) -> list[Any]:
            narrow, whole = AUXILIARY_FILTERS
            return [
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
                softmax(layers.Softmax, self, reads=("x",)),
            ]

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x, label",))
            _, *sides, _ = checks.shape(self, inputs[0], "[B, H, W, C]", "It reads a cell's output")
            checks.share(self, "label_smoothing", self.label_smoothing)
            if min(sides) < AUXILIARY_POOL:
                raise errors.LayerError(
                    f"the auxiliary head pools windows of {AUXILIARY_POOL}x{AUXILIARY_POOL}, but "
                    f"the cell before it gives {sides[0]}x{sides[1]}: the images are too small for "
                    "it. Use 67x67 at least (11x11 with the small stem): input.height, "
                    "input.width; or take the head away by auxiliary=None of its cell"
                )
            told = composition.chain_meta(self, self._parts(), inputs[:1])
            weight = heads.weight_by(self.reads[1], told.outputs.dtype, given=False)
            loss = base.LossSpec(self.loss_name, self.coefficient, weight, training_only=True)
            return dataclasses.replace(told, losses=(loss,))

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in params._parts():
            self.add_child(child.name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        x, label = inputs
        for name in self.children:
            x = self.child(name, theta, x, ctx)
        if ctx.training:
            each, _ = heads.cross_entropy(x, label, self.params.label_smoothing)
            ctx.add_loss(self.params.loss_name, tf.reduce_sum(each))
        return x


def softmax(kind: Any, params: Any, **fields: Any) -> Any:
    """Return the params of a softmax head over the classes of `params`.

    Raises:
        LayerError: their number is not known yet.
    """
    if params.classes is None:
        raise errors.LayerError(
            f"{base.describe(params)}: its number of classes is the dataset's, which is filled in "
            "before a run (task.complete). Without a dataset set its field classes"
        )
    return kind.Params(
        name="softmax",
        classes=params.classes,
        kernel_init=operations.KERNEL_INIT,
        kernel_init_args=operations.KERNEL_INIT_ARGS,
        **fields,
    )


class CropSoftmax(layers.Softmax):
    """x: [crops·B, D], label: [B] → logits [B, classes]; else as Softmax.

    An image's crops, which follow each other, are one example: what counts in evaluation is the
    mean of their probabilities, and the logits are its logarithms.
    """

    class Params(layers.Softmax.Params):
        """Those of Softmax."""

    params: Params

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        x, *labels = inputs if isinstance(inputs, tuple) else (inputs,)
        logits = super().fprop(theta, x, ctx)
        if labels:
            if not ctx.training and not _known_equal(logits, labels[0]):
                logits = _averaged(logits, tf.shape(labels[0])[0])
            heads.give(self.params, ctx, logits, tuple(labels))
        return logits


def _known_equal(logits: tf.Tensor, label: tf.Tensor) -> bool:
    """Whether both are known, while tracing, to have as many rows."""
    return logits.shape[0] is not None and logits.shape[0] == label.shape[0]


def _averaged(logits: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
    """Return the logarithm of the mean probabilities of each example's rows."""
    by_crop = tf.reshape(tf.nn.log_softmax(logits), [examples, -1, logits.shape[-1]])
    crops = tf.cast(tf.shape(by_crop)[1], logits.dtype)
    return tf.reduce_logsumexp(by_crop, 1) - tf.math.log(crops)


class Classifier(heads.Head):
    """x: [B, H, W, C], label: [B] → logits [B, classes]: ReLU, mean over [H, W], dropout, softmax.

    Loss, metrics and several crops of an image: see `CropSoftmax`.
    """

    class Params(heads.LabelledParams):
        classes: int | None = hyperparams.required("Number of classes; None: the dataset's.")
        dropout: float = hyperparams.field(0.5, "Share of the features dropped, in [0, 1).")

        def _parts(self) -> list[Any]:
            kept = ("loss_name", "coefficient", "label_smoothing", "metric_prefix", "top_k")
            labelled = {name: self.get(name) for name in (*kept, "confusion")}
            return [
                operations.relu(),
                layers.GlobalPool2D.Params(name="pool"),
                layers.Dropout.Params(name="dropout", rate=self.dropout),
                softmax(CropSoftmax, self, reads=("x", *self.reads[1:]), **labelled),
            ]

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("x", "x, label"))
            *body, head = self._parts()
            told = composition.chain_meta(self, body, inputs[:1])
            last = base.child_meta(self, head.name, head, told.outputs, *inputs[1:])
            return base.sum_metas(last.outputs, [*told.children, last])

        def served(self, outputs: Nest) -> dict[str, Nest]:
            """Return probabilities."""
            return heads.probabilities(outputs)

    params: Params

    def __init__(self, params: Params) -> None:
        """See `Layer`."""
        super().__init__(params)
        for child in params._parts():
            self.add_child(child.name, child)

    def fprop(self, theta: Theta, inputs: Nest, ctx: layers.Context) -> Nest:
        """See `Layer.fprop`."""
        x, *label = inputs if isinstance(inputs, tuple) else (inputs,)
        for name in ("relu", "pool", "dropout"):
            x = self.child(name, theta, x, ctx)
        return self.child("softmax", theta, (x, *label) if label else x, ctx)
