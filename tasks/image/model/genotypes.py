"""The cells of AmoebaNet-A, B and D, as data.

Source: Real et al. 2019, "Regularized Evolution for Image Classifier Architecture Search"
(arXiv 1802.01548), in the wiring of its reference code (tensorflow/tpu, `amoeba_net/`), whose
names of operations are kept. Where the paper's figure and the code differ (the normal cell of D
outputs states 0, 3, 4 and 6), this follows the code: only then the published counts agree.

A cell has two inputs: state 0 is the output of the layer before it (after a 1×1 convolution),
state 1 that of the layer before that one. Five sums of two operations make states 2 to 6, each
operation named with the state it reads. The cell outputs the listed states, concatenated.
"""

from __future__ import annotations

import dataclasses
import re

from lingvo_gpipe import errors

FIRST_SUM = 2  # states 0 and 1 are the cell's inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """An operation and the state that it reads."""

    operation: str
    state: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """The wiring of a cell.

    Attributes:
        sums: state 2 and on: each is the sum of a left and a right operation.
        output: states that are concatenated, in this order.
    """

    sums: tuple[tuple[Edge, Edge], ...]
    output: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Genotype:
    """A normal cell, which keeps height and width, and a reduction cell, which halves them."""

    normal: Wiring
    reduction: Wiring


def wiring(*sums: str, output: tuple[int, ...]) -> Wiring:
    """Read a wiring, one sum per line.

    >>> wiring("avg_pool_3x3(0) + none(1)", output=(2,)).sums[0][1]
    Edge(operation='none', state=1)
    """
    read = []
    for number, text in enumerate(sums, FIRST_SUM):
        edges = [Edge(name, int(state)) for name, state in re.findall(r"(\w+)\((\d+)\)", text)]
        if len(edges) != 2 or any(edge.state >= number for edge in edges):
            raise errors.LayerError(
                f"state {number} of a cell is {text!r}. Write a sum of two operations on states "
                f"below {number}: none(0) + max_pool_3x3(1)"
            )
        read.append((edges[0], edges[1]))
    return Wiring(tuple(read), output)


GENOTYPES = {
    "A": Genotype(
        normal=wiring(
            "avg_pool_3x3(0) + max_pool_3x3(0)",
            "separable_3x3_2(1) + none(1)",
            "none(0) + avg_pool_3x3(1)",
            "separable_3x3_2(0) + separable_5x5_2(2)",
            "avg_pool_3x3(5) + separable_3x3_2(0)",
            output=(1, 3, 4, 6),
        ),
        reduction=wiring(
            "separable_3x3_2(1) + avg_pool_3x3(0)",
            "max_pool_3x3(0) + separable_7x7_2(2)",
            "max_pool_3x3(1) + max_pool_3x3(0)",
            "separable_3x3_2(4) + 1x7_7x1(0)",
            "avg_pool_3x3(1) + separable_7x7_2(0)",
            output=(2, 3, 4, 5, 6),
        ),
    ),
    "B": Genotype(
        normal=wiring(
            "1x1(1) + max_pool_3x3(1)",
            "none(1) + separable_3x3_2(0)",
            "1x1(1) + separable_3x3_2(0)",
            "1x1(2) + none(2)",
            "avg_pool_3x3(1) + 1x1(5)",
            output=(0, 3, 4, 6),
        ),
        reduction=wiring(
            "max_pool_2x2(0) + max_pool_3x3(0)",
            "none(2) + 3x3(1)",
            # The reference builds an ordinary separable pair: its parser drops the dilation.
            "dil_2_separable_5x5_2(2) + max_pool_3x3(2)",
            "none(3) + separable_3x3_2(1)",
            "avg_pool_3x3(4) + 1x1(3)",
            output=(5, 6),
        ),
    ),
    "D": Genotype(
        normal=wiring(
            "1x1(1) + max_pool_3x3(1)",
            "none(1) + 1x7_7x1(0)",
            "1x1(0) + 1x7_7x1(0)",
            "max_pool_3x3(2) + none(2)",
            "avg_pool_3x3(1) + 1x1(5)",
            output=(0, 3, 4, 6),
        ),
        reduction=wiring(
            "max_pool_2x2(0) + max_pool_3x3(0)",
            "none(2) + 3x3(1)",
            "1x7_7x1(2) + max_pool_3x3(2)",
            "none(3) + max_pool_2x2(1)",
            "avg_pool_3x3(2) + 1x1(3)",
            output=(4, 5, 6),
        ),
    ),
}


def genotype(name: str) -> Genotype:
    """Return the genotype called `name`.

    Raises:
        LayerError: there is none; names those there are.
    """
    if name not in GENOTYPES:
        raise errors.LayerError(f"no genotype {name!r}. Use one of {', '.join(GENOTYPES)}")
    return GENOTYPES[name]
