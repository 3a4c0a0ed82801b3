"""A step of `torch.distributed.pipelining`: K processes of one thread each, gloo over loopback.

`.venv-bench/bin/python -m benchmarks.rivals.pytorch KIND,SCHEDULE,POLICY REFERENCE` prints one JSON
object. The environment has no TensorFlow, and the library's has no PyTorch; REFERENCE is the .npz
file of `benchmarks.rivals.plain`. SCHEDULE is gpipe or 1f1b; POLICY kept or checkpointed.
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

from benchmarks.rivals import measures
from benchmarks.support import blocks

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


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
        self.first, self.second = (
            _linear(weights[f"feed_forward/{name}/kernel"], weights[f"feed_forward/{name}/bias"])
            for name in _dense_names(weights)
        )
        self.dense_names = _dense_names(weights)

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
        found = {}
        kernels = _grad(self.inner.weight).T.chunk(3, 1)
        biases = _grad(self.inner.bias).chunk(3)
        for name, kernel, bias in zip(self.NAMES, kernels, biases, strict=True):
            found[f"attention/{name}/kernel"], found[f"attention/{name}/bias"] = kernel, bias
        outer = (("attention/output", self.outer),)
        dense = zip(self.dense_names, (self.first, self.second), strict=True)
        for path, part in (*outer, *((f"feed_forward/{name}", part) for name, part in dense)):
            found[f"{path}/kernel"], found[f"{path}/bias"] = _grad(part.weight).T, _grad(part.bias)
        for path in ("attention_norm", "feed_forward_norm"):
            norm = getattr(self, path)
            found[f"{path}/gamma"], found[f"{path}/beta"] = _grad(norm.weight), _grad(norm.bias)
        return found


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

    def __init__(self, parts: list[Any], *, is_checkpointed: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block."""
        if not self.is_checkpointed:
            return self.parts(x)
        return checkpoint.checkpoint(self.parts, x, use_reentrant=False)


def measure(configuration: str, reference: Path) -> dict[str, Any]:
    """Return the seconds of a step, its peak memory and how far its gradients are from ours."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = multiprocessing.spawn(
            _rank, (configuration, reference, folder, results), nprocs=blocks.K, join=False
        )
        ranks: list[dict[str, Any]] = []
        while len(ranks) < blocks.K:
            try:
                ranks.append(results.get(timeout=1.0))
            except queue.Empty:
                started.join(timeout=0.1)  # raises what a process raised
        while not started.join():
            pass
    return measures.joined(ranks)


def _rank(rank: int, configuration: str, reference: Path, folder: str, results: Any) -> None:
    """Measure the step as process `rank` of the K."""
    kind, schedule, policy = configuration.split(",")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=blocks.K
    )
    known = measures.Reference.read(reference)
    mine = _shares(known.layers)[rank]
    x = torch.from_numpy(known.batch["x"])
    target = torch.zeros_like(x)
    resident = measures.Resident()
    parts: list[Any] = [BLOCKS[kind](_tensors(known.weights_of(name))) for name in mine]
    stage = Stage(parts, is_checkpointed=policy == "checkpointed")
    losses: list[torch.Tensor] = []

    def new_step() -> Callable[[], None]:
        pipeline = pipelining.PipelineStage(stage, rank, blocks.K, torch.device("cpu"))
        steps = SCHEDULES[schedule](pipeline, blocks.M, loss_fn=functional.mse_loss)

        def step() -> None:
            stage.zero_grad(set_to_none=True)
            losses.clear()
            if rank == 0:
                steps.step(x)
            else:
                steps.step(target=target, losses=losses, return_outputs=False)
            distributed.barrier()

        return step

    step = new_step()
    step()
    gradients = {
        f"{name}/{path}": value.numpy()
        for name, part in zip(mine, parts, strict=True)
        for path, value in part.gradients().items()
    }
    found = {
        "error": known.worst_error(gradients),
        "paths": list(gradients),
        "loss": float(torch.stack(losses).mean()) if losses else None,
        "seconds": blocks.seconds(step),
        "resident_mib": resident.grown_mib(),
        "product_s": measures.product_s(_product()),
    }
    stage.zero_grad(set_to_none=True)
    found["tensors_mib"] = _tensors_mib(new_step())  # the first one makes the receiving buffers
    results.put(found)
    distributed.barrier()
    distributed.destroy_process_group()


def _shares(layers: list[str]) -> list[list[str]]:
    """Return the layers of each process, equally many."""
    size = len(layers) // blocks.K
    return [layers[rank * size : (rank + 1) * size] for rank in range(blocks.K)]


def _tensors_mib(step: Callable[[], None]) -> float:
    """Return the most that tensors of a step hold at once beyond those before it, in MiB."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = most = 0
    memory = [event for event in profile.profiler.kineto_results.events() if event.nbytes()]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / measures.MIB


def _product() -> Callable[[], Any]:
    """Return a product of two 1,024² matrices."""
    one = torch.ones(measures.SIDE, measures.SIDE)
    return lambda: one @ one


def _linear(kernel: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Return a linear layer of a kernel [D, U] and a bias [U]."""
    made = nn.Linear(*kernel.shape, bias=bias is not None)
    made.weight.data = kernel.T.contiguous()
    if bias is not None:
        made.bias.data = bias
    return made


def _norm(weights: dict[str, torch.Tensor], path: str) -> nn.LayerNorm:
    """Return a layer norm with gamma and beta of a path."""
    gamma = weights[f"{path}/gamma"]
    made = nn.LayerNorm(len(gamma), eps=1e-6)
    made.weight.data, made.bias.data = gamma, weights[f"{path}/beta"]
    return made


def _dense_names(weights: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the feed-forward part's dense layers, in order."""
    paths = [path.split("/") for path in weights if path.startswith("feed_forward/")]
    return list(dict.fromkeys(path[1] for path in paths))


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
    parser.add_argument("configuration", help="KIND,SCHEDULE,POLICY")
    parser.add_argument("reference", type=Path, help="file of benchmarks.rivals.plain")
    options = parser.parse_args()
    print(json.dumps(measure(options.configuration, options.reference)))


if __name__ == "__main__":
    main()
