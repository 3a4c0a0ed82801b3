"""The same layers of PyTorch, on one thread.

`.venv-bench/bin/python -m benchmarks.kernels.pytorch CASE` prints one JSON object: milliseconds of
processor time, and the time of each type of operation. The environment has no TensorFlow.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, profiler
from torch.nn import functional

from benchmarks.kernels.cases import CASES, RUNS, SIDE, Case, processor_ms


class Attention(nn.Module):
    """Self-attention with a mask; queries, keys and values by one product, as in PyTorch's own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.shape[-1]
        self.heads, self.dropout = case.size, case.dropout
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask = torch.ones(case.shape[0], 1, 1, case.shape[1], dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention of x to itself."""
        rows, length, width = x.shape
        joined = self.inner(x).view(rows, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, dropout_p=self.dropout
        )
        return self.outer(mixed.transpose(1, 2).reshape(rows, length, width))


class Transformer(nn.Module):
    """Pre-norm self-attention and feed-forward part with relu."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.shape[-1]
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(case), _dropout(case))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, case.hidden),
            nn.ReLU(),
            _dropout(case),
            nn.Linear(case.hidden, width),
            _dropout(case),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after both parts."""
        x = x + self.attention(x)
        return x + self.feed_forward(x)


def _dropout(case: Case) -> nn.Module:
    return nn.Dropout(case.dropout) if case.dropout else nn.Identity()


def _separable(case: Case) -> nn.Module:
    """Return what AmoebaNet calls a separable convolution: twice relu, both parts, batch norm."""
    channels = case.shape[-1]
    parts: list[nn.Module] = []
    for _ in range(2):
        parts += [
            nn.ReLU(),
            nn.Conv2d(channels, channels, case.size, padding="same", groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        ]
    return nn.Sequential(*parts)


def layer_of(case: Case) -> nn.Module:
    """Return the case's layer; images are [B, C, H, W], channels last in memory."""
    width = case.shape[-1]
    if case.kind == "feed_forward":
        return nn.Sequential(
            nn.Linear(width, case.hidden), nn.GELU(), nn.Linear(case.hidden, width)
        )
    if case.kind == "attention":
        return Attention(case)
    if case.kind == "transformer":
        return Transformer(case)
    if case.kind == "layer_norm":
        return nn.LayerNorm(width)
    made: nn.Module
    if case.kind == "batch_norm":
        made = nn.BatchNorm2d(width)
    elif case.kind == "separable":
        made = _separable(case)
    else:
        made = nn.Conv2d(width, width, case.size, padding="same", bias=False)
    return made.to(memory_format=torch.channels_last)


def measure(case: Case) -> dict[str, Any]:
    """Return milliseconds of forward, forward and backward, and a product; and operations."""
    torch.set_num_threads(1)
    layer = layer_of(case)
    x, upstream = torch.randn(case.shape), torch.randn(case.shape)
    if len(case.shape) == 4:
        x, upstream = x.permute(0, 3, 1, 2), upstream.permute(0, 3, 1, 2)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        given = x.detach().requires_grad_()
        layer(given).backward(upstream)  # gradients of weights are added to the last ones

    matrix = torch.randn(SIDE, SIDE)
    return {
        "forward_ms": processor_ms(forward),
        "both_ms": processor_ms(both),
        "product_ms": processor_ms(lambda: matrix @ matrix),
        "operations": operations(both),
    }


def operations(both: Callable[[], None]) -> dict[str, float]:
    """Return type of operation → its time by PyTorch's own trace, without those it calls."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as trace:
        for _ in range(RUNS):
            both()
    found: Counter[str] = Counter()
    for event in trace.key_averages():
        found[event.key.removeprefix("aten::")] += event.self_cpu_time_total
    return dict(found)


def main() -> None:
    """Measure one case and print it."""
    print(json.dumps(measure(CASES[sys.argv[1]])))


if __name__ == "__main__":
    main()
