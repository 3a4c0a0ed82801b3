"""What every rival measures alike: gradients against the reference's, memory, a matrix product.

Imported with TensorFlow's environment and with PyTorch's, so it needs neither.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import memory

MIB = memory.MIB
SIDE = 1024
MOST_ERROR = 1e-4
"""Of a gradient, as a share of its largest value: the rounding of float32 over a whole batch."""

_FIELD, _WEIGHT, _GRADIENT = "field:", "weight:", "gradient:"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A mini-batch, weights, and the loss and gradients of plain TensorFlow.

    Attributes:
        loss: of the mini-batch.
        flops: of a step that recomputes nothing.
        batch: name → field.
        weights: path → first value.
        gradients: path → gradient.
    """

    loss: float
    flops: float
    batch: dict[str, np.ndarray[Any, Any]]
    weights: dict[str, np.ndarray[Any, Any]]
    gradients: dict[str, np.ndarray[Any, Any]]

    def write(self, path: Path) -> None:
        """Write everything to an .npz file."""
        parts = ((_FIELD, self.batch), (_WEIGHT, self.weights), (_GRADIENT, self.gradients))
        arrays = {f"{kind}{name}": value for kind, part in parts for name, value in part.items()}
        arrays |= {"loss": np.asarray(self.loss), "flops": np.asarray(self.flops)}
        np.savez(path, allow_pickle=False, **arrays)

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Return what `write` has written."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}

        def part(kind: str) -> dict[str, np.ndarray[Any, Any]]:
            return {n.removeprefix(kind): v for n, v in arrays.items() if n.startswith(kind)}

        loss, flops = float(arrays["loss"]), float(arrays["flops"])
        return cls(loss, flops, part(_FIELD), part(_WEIGHT), part(_GRADIENT))

    @property
    def layers(self) -> list[str]:
        """Names of the layers with weights, in order."""
        return list(dict.fromkeys(path.split("/")[0] for path in self.weights))

    def weights_of(self, layer: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the weights of a layer by their path in it."""
        start = f"{layer}/"
        return {p.removeprefix(start): v for p, v in self.weights.items() if p.startswith(start)}

    def worst_error(self, gradients: Mapping[str, np.ndarray[Any, Any]]) -> float:
        """Return the largest difference of gradients as a share of the largest of that layer.

        The share is of a layer, since a gradient may be 0: that of a key's bias is. A difference
        that is not a number is infinite.
        """
        largest = {
            layer: max(float(np.abs(v).max()) for p, v in self.gradients.items() if _in(layer, p))
            for layer in self.layers
        }
        shares = (
            float(np.abs(value - self.gradients[path]).max()) / largest[path.split("/")[0]]
            for path, value in gradients.items()
        )
        return max(math.inf if math.isnan(share) else share for share in shares)

    def check(self, name: str, found: Mapping[str, Any]) -> None:
        """Refuse a loss or gradients that differ by more than float32 rounds, or are not all there.

        Raises:
            ValueError: they do, or are not.
        """
        if others := sorted(self.gradients.keys() ^ set(found["paths"])):
            raise ValueError(f"{name} has other gradients than the network: {', '.join(others)}")
        loss_error = abs(found["loss"] - self.loss) / abs(self.loss)
        if not (loss_error <= MOST_ERROR and found["error"] <= MOST_ERROR):  # NaN is refused
            raise ValueError(
                f"{name} computes something else: its loss differs by {loss_error:.1e}, its "
                f"gradients by {found['error']:.1e}; at most {MOST_ERROR:.0e}"
            )


def _in(layer: str, path: str) -> bool:
    return path.startswith(f"{layer}/")


class Resident:
    """How much more memory than now the process is going to have resident at its peak."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
        self._before = memory.status("VmRSS")

    def grown_mib(self) -> float:
        """Return the peak of resident memory less what there was at the start, in MiB."""
        return (memory.status("VmHWM") - self._before) / MIB


def product_s(product: Callable[[], Any], count: int = 15) -> float:
    """Return the median seconds of a product of two 1,024² matrices."""
    times = []
    for _ in range(count):
        begun_s = time.perf_counter()
        product()
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times[2:])


def joined(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the processes of one step found as one result."""
    return {
        "s": max(rank["seconds"] for rank in ranks),
        "error": max(rank["error"] for rank in ranks),
        "paths": [path for rank in ranks for path in rank["paths"]],
        "loss": next(rank["loss"] for rank in ranks if rank["loss"] is not None),
        "resident_mib": sum(rank["resident_mib"] for rank in ranks),
        "device_mib": max(rank["tensors_mib"] for rank in ranks),
        "product_s": statistics.fmean(rank["product_s"] for rank in ranks),
    }
