"""AmoebaNet (L, D): L normal cells, D filters in the first stack, as a flat list of layers.

Source: Real et al. 2019 (arXiv 1802.01548) in the wiring of its reference code
(tensorflow/tpu, `amoeba_net/`), with which parameters and multiply-adds agree exactly.

Each layer writes one name, its own, and reads those of the two layers before it. Wherever the list
is cut, the output before the last goes directly to the cell that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, Self

from lingvo_gpipe import errors, hyperparams, layers
from lingvo_gpipe.layers import base, checks, composite, windows
from lingvo_gpipe.nests import Nest, SpecNest
from lingvo_gpipe.tasks.image.model import genotypes, heads, operations

STEM_FILTERS = 32  # whatever D is


class AmoebaNet(hyperparams.Params):
    """Sizes and options of AmoebaNet (L, D)."""

    genotype: str = hyperparams.required('"A", "B" or "D"; see `genotypes`.')
    num_cells: int = hyperparams.required(
        "L: normal cells; a reduction cell comes before the second and the last third of them."
    )
    filters: int = hyperparams.required("D: channels of the first stack; the others have 2D, 4D.")
    classes: int | None = hyperparams.required(
        "Number of classes; None: as many as the dataset has, filled in before a run."
    )
    stem: Literal["imagenet", "small"] = hyperparams.field(
        "imagenet",
        "imagenet divides height and width by 8 (a convolution and two reduction cells); small "
        "keeps them, for images of a few dozen pixels.",
    )
    drop_path_keep: float = hyperparams.field(
        1.0, "Share of examples that each operation keeps in the end; 1: all."
    )
    drop_path_steps: int = hyperparams.field(
        0, "Updates over which that share falls from 1; 0: it is constant."
    )
    dropout: float = hyperparams.field(0.5, "Rate before the classifier.")
    auxiliary_weight: float = hyperparams.field(
        0.0,
        "Coefficient of the auxiliary head's loss; 0: no such head. It reads the last normal cell "
        "before the second reduction cell.",
    )
    label_smoothing: float = hyperparams.field(0.1, "Label smoothing of both losses.")
    momentum: float = hyperparams.field(0.9, "Momentum of the moving statistics of batch norms.")
    epsilon: float = hyperparams.field(1e-5, "Added to the variance in batch norms.")
    top_k: int = hyperparams.field(
        5,
        "Adds the metric top{k} beside accuracy, where there are more than k classes; 0: does not.",
    )


def amoeba_net(params: AmoebaNet) -> list[layers.Layer.Params]:
    """Return the layers of AmoebaNet: L + 6, or L + 4 with the small stem.

    image: [B, H, W, 3], label: [B] → logits [B, classes]. Losses: "loss" and, with an
    auxiliary head, "auxiliary".

    Raises:
        LayerError: there is no such genotype, or L or D do not fit it.

    >>> params = AmoebaNet(genotype="D", num_cells=3, filters=32, classes=10)
    >>> [layer.name for layer in amoeba_net(params)]  # doctest: +ELLIPSIS
    ['stem_conv', 'stem_cell_0', 'stem_cell_1', 'normal_0', 'reduction_0', 'normal_1', ...
    """
    genotypes.genotype(params.genotype)
    _check_size(params)
    norm = layers.BatchNorm.Params(momentum=params.momentum, epsilon=params.epsilon)
    drop_path = None
    if params.drop_path_keep != 1.0:
        drop_path = operations.DropPath.Params(
            keep=params.drop_path_keep, steps=params.drop_path_steps
        )
    stem = Stem.Params(name="stem_conv", reads=("image",), kind=params.stem, norm=norm)
    cells = [
        AmoebaCell.Params(
            name=name,
            genotype=params.genotype,
            reduction=is_reduction,
            filters=filters,
            norm=norm,
            drop_path=drop_path,
        )
        for name, is_reduction, filters in _cells(params)
    ]
    classifier = heads.Classifier.Params(
        name="classifier",
        classes=params.classes,
        dropout=params.dropout,
        label_smoothing=params.label_smoothing,
        top_k=params.top_k,
    )
    network: list[layers.Layer.Params] = [stem, *cells, classifier]
    for layer in network:
        layer.writes = (layer.name,)
    names = [layer.name for layer in network]
    for number, cell in enumerate(cells, 1):
        cell.set(reads=tuple(reversed(names[max(0, number - 2) : number])))
    classifier.reads = (names[-2], "label")
    if params.auxiliary_weight:
        last = f"normal_{params.num_cells * 2 // 3 - 1}"
        (cell,) = (cell for cell in cells if cell.name == last)
        cell.set(reads=(*cell.reads, "label"))
        cell.auxiliary = heads.AuxiliaryHead.Params(
            classes=params.classes,
            coefficient=params.auxiliary_weight,
            label_smoothing=params.label_smoothing,
            norm=norm,
        )
    return network


def _check_size(params: AmoebaNet) -> None:
    num_cells, filters = params.num_cells, params.filters
    if num_cells < 2:
        raise errors.LayerError(
            f"amoeba_net: num_cells={num_cells}, but a reduction cell comes before the second and "
            "the last third of them. Use 2 or more; the published networks have 6, 18, 36 or 72"
        )
    if params.stem == "imagenet" and (filters < 4 or filters % 4):
        near = max(4, filters // 4 * 4)
        raise errors.LayerError(
            f"amoeba_net: filters={filters} is not a multiple of 4, but the stem cells have a "
            f"quarter and a half of them. Use {near} or {near + 4}"
        )
    if filters < 1:
        raise errors.LayerError(f"amoeba_net: filters={filters}. Use 1 or more")


def _cells(params: AmoebaNet) -> Iterator[tuple[str, bool, int]]:
    """Yield name, whether it is a reduction cell, and filters of each cell."""
    filters = params.filters
    if params.stem == "imagenet":
        yield "stem_cell_0", True, filters // 4
        yield "stem_cell_1", True, filters // 2
    reductions = [params.num_cells // 3, params.num_cells * 2 // 3]
    for number in range(params.num_cells):
        if number in reductions:
            filters *= 2
            yield f"reduction_{reductions.index(number)}", True, filters
        yield f"normal_{number}", False, filters


class Stem(layers.Composite):
    """image: [B, H, W, C] floating → [B, H', W', filters]: a 3×3 convolution, batch norm."""

    class Params(layers.Composite.Params):
        kind: Literal["imagenet", "small"] = hyperparams.field(
            "imagenet", "imagenet: stride 2; small: stride 1."
        )
        filters: int = hyperparams.field(STEM_FILTERS, "Output channels.")
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norm."
        )

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            strides = 2 if self.kind == "imagenet" else 1
            conv = operations.conv(
                "conv", self.filters, kernel_size=3, strides=strides, padding="valid"
            )
            return operations.by_name([conv, operations.norm(self.norm)])

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            checks.arity(self, inputs, ("image",))
            _, height, width, _ = checks.shape(self, inputs[0], windows.LAYOUT, "It takes images")
            if min(height, width) < 3:
                raise errors.LayerError(
                    f"{base.describe(self)}: an image of {height}x{width} is too small for the "
                    "stem's 3x3 convolution. Use images of 3x3 at least: input.height, input.width"
                )
            return super()._meta(*inputs)

    params: Params


class AmoebaCell(layers.Composite):
    """A normal or reduction cell; see `genotypes`.

    x: [B, H, W, C], previous: [B, H or 2H, W or 2W, C'] → [B, H', W', outputs · filters]. A
    reduction cell halves height and width. State 0 is x after ReLU, 1×1 convolution and batch norm.
    State 1 is `previous` in the same shape (`operations.Fit`), or x itself if the cell reads x
    alone. A cell with an auxiliary head also reads the label.
    """

    class Params(layers.Composite.Params):
        genotype: str = hyperparams.required("Name of its genotype.")
        reduction: bool = hyperparams.field(False, "Halves height and width.")
        filters: int = hyperparams.required("Channels of each state.")
        norm: layers.BatchNorm.Params = hyperparams.field(
            operations.NORM, "Settings of its batch norms."
        )
        drop_path: operations.DropPath.Params | None = hyperparams.field(
            None, "Drop-path on each operation's output; None: none."
        )
        auxiliary: heads.AuxiliaryHead.Params | None = hyperparams.field(
            None, "A head on its output, in training only; None: none."
        )
        reads = ("x", "previous")

        def _inference(self) -> Self:
            """Leave out the auxiliary head and its label."""
            served = self.copy()
            served.auxiliary, served.reads = None, served.reads[:2]
            return served

        def _wiring(self) -> genotypes.Wiring:
            genotype = genotypes.genotype(self.genotype)
            return genotype.reduction if self.reduction else genotype.normal

        def parts(self) -> dict[str, layers.Layer.Params]:
            """See `Composite`."""
            filters, norm, wiring = self.filters, self.norm, self._wiring()
            fit = operations.Fit.Params(filters=filters, norm=norm)
            entrance = [operations.relu(), operations.conv("conv", filters), operations.norm(norm)]
            parts: dict[str, layers.Layer.Params] = {}
            parts["base"] = layers.Sequential.Params(layers=entrance)
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

        def flow(self, call: composite.Calls, *inputs: Nest) -> Nest:
            """See `Composite`."""
            x, *others = inputs
            wiring = self._wiring()
            states = [call("base", x), call("previous", others[0], x) if others else x]
            for number, (left, right) in enumerate(wiring.sums, genotypes.FIRST_SUM):
                states.append(
                    call.add(
                        call(f"state_{number}_left", states[left.state]),
                        call(f"state_{number}_right", states[right.state]),
                    )
                )
            output = call.concat(
                [
                    call(f"output_{state}", states[state], states[-1])
                    if state < genotypes.FIRST_SUM
                    else states[state]
                    for state in wiring.output
                ]
            )
            if self.auxiliary is not None and call.training:
                call("auxiliary", output, others[1])
            return output

        def _meta(self, *inputs: SpecNest) -> base.Meta:
            # Where the head was removed by an override, the label is still read.
            forms = ("x, previous, label",)
            checks.arity(self, inputs, forms if self.auxiliary else ("x", "x, previous", *forms))
            meta = super()._meta(*inputs)
            # `none` may do nothing, and has no line in descriptions.
            children = tuple(child for child in meta.children if child.children or child.variables)
            return dataclasses.replace(meta, children=children)

    params: Params
