"""Training steps of GPT-2 in plain PyTorch: `python3 -m benchmarks.accelerator.torch_gpt2 [--cpu]`.

Prints a line of JSON for each size, as it is and by `torch.compile`: its name and its speed. A step
adds up the gradients of 8 micro-batches, as ours does, and updates by Adam.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.accelerator import gpt2
from benchmarks.accelerator.question import attempt, median_s


class Block(nn.Module):
    """Pre-norm causal self-attention and feed-forward part; x: [B, T, D] → [B, T, D]."""

    def __init__(self, size: gpt2.Gpt2) -> None:
        super().__init__()
        units = size.units
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(units) for _ in range(2))
        self.joined, self.outer = nn.Linear(units, 3 * units), nn.Linear(units, units)
        self.inner, self.last = nn.Linear(units, 4 * units), nn.Linear(4 * units, units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after both parts."""
        rows, length, units = x.shape
        joined = self.joined(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outer(mixed.transpose(1, 2).reshape(rows, length, units))
        return x + self.last(functional.gelu(self.inner(self.norms[1](x))))


class Network(nn.Module):
    """ids, labels: [B, T] → loss; the table is also the kernel of the logits."""

    def __init__(self, size: gpt2.Gpt2) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.units)
        nn.init.normal_(self.table.weight, std=0.02)
        self.positions = nn.Embedding(size.length, size.units)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.units)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = functional.linear(self.norm(self.blocks(x)), self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure(size: gpt2.Gpt2, device: str, compiles: bool) -> dict[str, Any]:
    """Return the speed of a step."""
    torch.manual_seed(0)
    network = Network(size).to(device)
    computed = torch.compile(network) if compiles else network
    optimizer = torch.optim.Adam(network.parameters(), 1e-4, fused=device == "cuda")
    shape = (gpt2.MICRO_BATCHES, size.rows, size.length)
    ids, labels = (torch.randint(size.vocabulary, shape, device=device) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros([], device=device)
        for micro_ids, micro_labels in zip(ids, labels, strict=True):
            with torch.autocast(device, torch.bfloat16):
                loss = computed(micro_ids, micro_labels) / gpt2.MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

    step_s = median_s(step, 2.0 if device == "cuda" else 0.0)
    return size.speed(step_s, size.rows * gpt2.MICRO_BATCHES, loss=step())


def main() -> None:
    """Measure every size."""
    on_cpu = "--cpu" in sys.argv
    print(json.dumps(["PyTorch", torch.__version__]), flush=True)
    for (name, size), compiles in itertools.product(gpt2.sizes(on_cpu).items(), (False, True)):
        found = attempt(measure, size, "cpu" if on_cpu else "cuda", compiles)
        print(json.dumps([f"{name}{', compiled' * compiles}", found]), flush=True)


if __name__ == "__main__":
    main()
