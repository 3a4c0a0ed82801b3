"""A step of `torch.distributed.pipelining`: K processes of one thread each, gloo over loopback.

`.venv-bench/bin/python -m benchmarks.rivals.pytorch KIND,POLICY FILE` prints one JSON object. FILE
is the reference that `benchmarks.rivals.ours` has written; POLICY is kept or checkpointed. The
schedule is 1F1B.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed import pipelining
from torch.nn import functional
from torch.utils import checkpoint

from benchmarks.rivals.reference import MIB, Reference
from benchmarks.support.networks import K, M, step_s


class Mlp(nn.Module):
    """Dense, gelu; x: [B, D] → [B, U]."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.kernel = _linear(weights["kernel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(x·kernel)."""
        return functional.gelu(self.kernel(x))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each weight in the reference's layout."""
        return {"kernel": _grad(self.kernel.weight).T}


class Transformer(nn.Module):
    """Pre-norm self-attention and feed-forward part, relu; x: [B, T, D] → [B, T, D].

    The projections of queries, keys and values are one product, as in PyTorch's own layer.
    """

    NAMES = ("query", "key", "value")

    def __init__(self, weights: dict[str, torch.Tensor], heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        inner = [weights[f"attention/{name}/kernel"] for name in self.NAMES]
        biases = [weights[f"attention/{name}/bias"] for name in self.NAMES]
        self.inner = _linear(torch.cat(inner, 1), torch.cat(biases))
        self.outer = _linear(weights["attention/output/kernel"], weights["attention/output/bias"])
        self.attention_norm = _norm(weights, "attention_norm")
        self.feed_forward_norm = _norm(weights, "feed_forward_norm")
        self.feed_forward = {
            path.removesuffix("/bias"): _linear(weights[path.replace("bias", "kernel")], bias)
            for path, bias in weights.items()
            if path.startswith("feed_forward/") and path.endswith("/bias")
        }
        self.first, self.second = self.feed_forward.values()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after both parts."""
        rows, length, depth = x.shape
        joined = self.inner(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.outer(mixed.transpose(1, 2).reshape(rows, length, depth))
        return x + self.second(functional.relu(self.first(self.feed_forward_norm(x))))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each weight in the reference's layout."""
        linears = {"attention/output": self.outer, **self.feed_forward}
        norms = {"attention_norm": self.attention_norm, "feed_forward_norm": self.feed_forward_norm}
        gradients = {f"{path}/kernel": _grad(each.weight).T for path, each in linears.items()}
        gradients |= {f"{path}/bias": _grad(each.bias) for path, each in linears.items()}
        gradients |= {f"{path}/gamma": _grad(each.weight) for path, each in norms.items()}
        gradients |= {f"{path}/beta": _grad(each.bias) for path, each in norms.items()}
        kernels = _grad(self.inner.weight).T.chunk(3, 1)
        biases = _grad(self.inner.bias).chunk(3)
        for name, kernel, bias in zip(self.NAMES, kernels, biases, strict=True):
            gradients |= {f"attention/{name}/kernel": kernel, f"attention/{name}/bias": bias}
        return gradients


class Convolution(nn.Module):
    """3×3, relu; x: [B, H, W, C] → [B, H, W, C].

    PyTorch has axes [B, C, H, W]; in memory channels stay last, which its kernels like best.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        kernel = weights["kernel"].permute(3, 2, 0, 1)
        self.kernel = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2], padding=1)
        self.kernel.weight.data = kernel.contiguous(memory_format=torch.channels_last)
        self.kernel.bias.data = weights["bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(x * kernel)."""
        return functional.relu(self.kernel(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each weight in the reference's layout."""
        return {
            "kernel": _grad(self.kernel.weight).permute(2, 3, 1, 0),
            "bias": _grad(self.kernel.bias),
        }


BLOCKS = {"mlp": Mlp, "transformer": Transformer, "convolution": Convolution}


class Stage(nn.Module):
    """The blocks of a process, recomputed as a whole if `is_checkpointed`."""

    def __init__(self, layers: list[Any], *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block."""
        if not self.is_checkpointed:
            return self.layers(x)
        return checkpoint.checkpoint(self.layers, x, use_reentrant=False)


def measure(configuration: str, reference: Path) -> dict[str, Any]:
    """Return the seconds of a step, its peak of tensors, and how far its gradients are off."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = multiprocessing.spawn(
            _rank, (configuration, reference, folder, results), nprocs=K, join=False
        )
        ranks: list[dict[str, Any]] = []
        while len(ranks) < K:
            try:
                ranks.append(results.get(timeout=1.0))
            except queue.Empty:
                started.join(timeout=0.1)  # raises what a process raised
        while not started.join():
            pass
    return {
        "s": max(rank["s"] for rank in ranks),
        "error": max(rank["error"] for rank in ranks),
        "paths": [path for rank in ranks for path in rank["paths"]],
        "loss": next(rank["loss"] for rank in ranks if rank["loss"] is not None),
        "device_mib": max(rank["device_mib"] for rank in ranks),
    }


def _rank(rank: int, configuration: str, path: Path, folder: str, results: Any) -> None:
    """Measure the step as process `rank` of the K."""
    kind, policy = configuration.split(",")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=K
    )
    reference = Reference.read(path)
    per_rank = len(reference.layers) // K
    names = reference.layers[rank * per_rank : (rank + 1) * per_rank]
    x = torch.from_numpy(reference.batch["x"])
    target = torch.zeros_like(x)
    layers: list[Any] = [BLOCKS[kind](_tensors(reference.weights_of(name))) for name in names]
    # The backward of the last follows its forward at once: there is nothing to save, as in ours.
    stage = Stage(layers, is_checkpointed=policy == "checkpointed" and rank < K - 1)
    losses: list[torch.Tensor] = []

    def new_step() -> Callable[[], None]:
        pipeline = pipelining.PipelineStage(stage, rank, K, torch.device("cpu"))
        schedule = pipelining.Schedule1F1B(pipeline, M, loss_fn=functional.mse_loss)

        def step() -> None:
            stage.zero_grad(set_to_none=True)
            losses.clear()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=losses, return_outputs=False)
            distributed.barrier()

        return step

    step = new_step()
    step()
    gradients = {
        f"{name}/{path}": value.numpy()
        for name, layer in zip(names, layers, strict=True)
        for path, value in layer.gradients().items()
    }
    result = {
        "error": reference.worst_error(gradients),
        "paths": list(gradients),
        "loss": float(torch.stack(losses).mean()) if losses else None,
        "s": step_s(step),
    }
    stage.zero_grad(set_to_none=True)
    result["device_mib"] = _peak_mib(new_step())  # the first step makes the receiving buffers
    results.put(result)
    distributed.barrier()
    distributed.destroy_process_group()


def _peak_mib(step: Callable[[], None]) -> float:
    """Return the most that tensors of a step hold at once beyond those before it, in MiB."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = most = 0
    memory = [event for event in profile.profiler.kineto_results.events() if event.nbytes()]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / MIB


def _linear(kernel: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Return a linear layer of a kernel [D, U] and a bias [U]."""
    linear = nn.Linear(*kernel.shape, bias=bias is not None)
    linear.weight.data = kernel.T.contiguous()
    if bias is not None:
        linear.bias.data = bias
    return linear


def _norm(weights: dict[str, torch.Tensor], path: str) -> nn.LayerNorm:
    """Return a layer norm with gamma and beta of a path."""
    gamma = weights[f"{path}/gamma"]
    norm = nn.LayerNorm(len(gamma), eps=1e-6)
    norm.weight.data, norm.bias.data = gamma, weights[f"{path}/beta"]
    return norm


def _tensors(weights: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    return {path: torch.from_numpy(value) for path, value in weights.items()}


def _grad(weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight, which has one."""
    if weight.grad is None:
        raise LookupError("a weight has no gradient")
    return weight.grad


def main() -> None:
    """Measure one configuration and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", help="KIND,POLICY")
    parser.add_argument("reference", type=Path, help="file of benchmarks.rivals.ours")
    options = parser.parse_args()
    print(json.dumps(measure(options.configuration, options.reference)))


if __name__ == "__main__":
    main()
