"""What every rival must compute: a mini-batch, first weights, and their loss and gradients.

Imported with TensorFlow's environment and with PyTorch's, so it needs neither.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
MOST_ERROR = 3e-4
"""Of a gradient, as a share of its largest value: the rounding of float32 over a whole batch."""

_FIELD, _WEIGHT, _GRADIENT = "field:", "weight:", "gradient:"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A mini-batch, weights, and their loss and gradients.

    Attributes:
        loss: of the mini-batch.
        batch: name → field.
        weights: path → first value.
        gradients: path → gradient.
    """

    loss: float
    batch: dict[str, np.ndarray[Any, Any]]
    weights: dict[str, np.ndarray[Any, Any]]
    gradients: dict[str, np.ndarray[Any, Any]]

    def write(self, path: Path) -> None:
        """Write everything to an .npz file."""
        parts = ((_FIELD, self.batch), (_WEIGHT, self.weights), (_GRADIENT, self.gradients))
        arrays = {f"{kind}{name}": value for kind, part in parts for name, value in part.items()}
        np.savez(path, allow_pickle=False, loss=np.asarray(self.loss), **arrays)

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Return what `write` has written."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}

        def part(kind: str) -> dict[str, np.ndarray[Any, Any]]:
            return {n.removeprefix(kind): v for n, v in arrays.items() if n.startswith(kind)}

        return cls(float(arrays["loss"]), part(_FIELD), part(_WEIGHT), part(_GRADIENT))

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
        largest: dict[str, float] = {}
        for path, value in self.gradients.items():
            layer = path.split("/")[0]
            largest[layer] = max(largest.get(layer, 0.0), float(np.abs(value).max()))
        shares = (
            float(np.abs(value - self.gradients[path]).max()) / largest[path.split("/")[0]]
            for path, value in gradients.items()
        )
        return max(math.inf if math.isnan(share) else share for share in shares)

    def check(self, name: str, result: Mapping[str, Any]) -> None:
        """Refuse a loss or gradients that differ by more than float32 rounds, or are not all there.

        Raises:
            ValueError: they do, or are not.
        """
        if others := sorted(self.gradients.keys() ^ set(result["paths"])):
            raise ValueError(f"{name} has other gradients than the network: {', '.join(others)}")
        loss_error = abs(result["loss"] - self.loss) / abs(self.loss)
        if not (loss_error <= MOST_ERROR and result["error"] <= MOST_ERROR):  # NaN is refused
            raise ValueError(
                f"{name} computes something else: its loss differs by {loss_error:.1e}, its "
                f"gradients by {result['error']:.1e}; at most {MOST_ERROR:.0e}"
            )
