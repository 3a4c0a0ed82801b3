"""Sizes of GPT-2, and what of a card's rate a step reaches, without TensorFlow or PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.accelerator.question import attempt, card

MICRO_BATCHES = 8
# Of dense products in bfloat16, by the maker's data sheets.
PEAK_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclasses.dataclass(frozen=True, slots=True)
class Gpt2:
    """Sizes of a model and of a micro-batch."""

    layers: int
    units: int
    heads: int
    vocabulary: int = 50_304  # 50,257, padded to a multiple of 64
    length: int = 1024
    rows: int = 8

    @property
    def parameters(self) -> int:
        """Number of weights; the table is also the kernel of the logits."""
        block = 12 * self.units**2 + 13 * self.units
        return self.layers * block + (self.vocabulary + self.length + 2) * self.units

    def speed(self, step_s: float, rows: int, **more: Any) -> dict[str, Any]:
        """Return the tokens a second of a step of so many rows, and the share of the card's peak.

        FLOPs are those of forward and backward without recomputation: 6 for each weight and token,
        and those of attention.
        """
        tokens_per_s = rows * self.length / step_s
        flops = 6 * self.parameters + 12 * self.layers * self.units * self.length
        name = str(attempt(card, "name"))
        peak = next((rate for model, rate in PEAK_FLOPS_PER_S.items() if model in name), None)
        share = peak and tokens_per_s * flops / peak
        return {"step ms": 1e3 * step_s, "tokens/s": tokens_per_s, "share of peak": share, **more}


def sizes(on_cpu: bool) -> dict[str, Gpt2]:
    """Return the sizes that are measured; on CPUs a toy."""
    if on_cpu:
        return {"toy": Gpt2(2, 16, 2, vocabulary=50, length=8, rows=2)}
    return {"124M": Gpt2(12, 768, 12), "355M": Gpt2(24, 1024, 16)}
