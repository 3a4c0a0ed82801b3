"""The layers that are compared, by name, with their shapes; needs neither library."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

RUNS = 10  # of forward and backward, of which the times of operations are added
SIDE = 1024
"""Rows and columns of the matrix product beside which everything is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A layer of one micro-batch, whose output has the shape of its input.

    Attributes:
        kind: which layer.
        shape: of x and of the output.
        size: heads of attention, or height and width of the kernel; 0: it has none.
        hidden: features in the middle of a feed-forward part.
        dropout: rate on branches, attention weights and hidden units.
    """

    kind: str
    shape: tuple[int, ...]
    size: int = 0
    hidden: int = 0
    dropout: float = 0.0


CASES = {
    "feed-forward gelu": Case("feed_forward", (512, 512), hidden=2048),
    "attention": Case("attention", (8, 64, 512), size=8),
    "Transformer layer": Case("transformer", (8, 64, 512), 8, 2048),
    "Transformer dropout": Case("transformer", (8, 64, 512), 8, 2048, dropout=0.1),
    "layer norm": Case("layer_norm", (8, 64, 512)),
    "batch norm": Case("batch_norm", (32, 16, 16, 48)),
    "separable 3x3": Case("separable", (32, 16, 16, 48), 3),
    "separable 7x7": Case("separable", (32, 16, 16, 48), 7),
    "convolution 3x3": Case("convolution", (32, 16, 16, 48), 3),
}
QUICK = ("Transformer layer", "layer norm", "batch norm", "separable 3x3")


def processor_ms(call: Callable[[], Any], least_s: float = 0.2) -> float:
    """Return the median milliseconds of processor time of a call, after two that do not count.

    Args:
        call: what is measured.
        least_s: seconds that all measured calls take together at least.
    """
    return statistics.median(_times(call, least_s)) * 1e3


def _times(call: Callable[[], Any], least_s: float) -> Iterator[float]:
    call()
    call()
    spent = count = 0.0
    while spent < least_s or count < 5:
        begun_s = time.process_time()
        call()
        taken_s = time.process_time() - begun_s
        spent, count = spent + taken_s, count + 1
        yield taken_s
