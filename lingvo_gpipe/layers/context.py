"""Context: what a layer reads besides its inputs, and what it adds besides its outputs.

Programs write nothing. What a layer adds (losses, sums, moments) is collected here and leaves every
traced function as an output. A loss collected inside a recomputed function and not returned from it
would lose its gradient silently, so `Layer.run` returns them too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors, seeds
from lingvo_gpipe.nests import Nest


@dataclasses.dataclass(slots=True)
class Collected:
    """What layers added besides their outputs.

    Attributes:
        losses: loss name → its sum over the micro-batch's examples, a floating scalar.
        sums: metric name → any nest of tensors that are summed over examples.
        moments: path of a layer → its additive statistics of the micro-batch.
    """

    losses: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    sums: dict[str, Nest] = dataclasses.field(default_factory=dict)
    moments: dict[str, dict[str, tf.Tensor]] = dataclasses.field(default_factory=dict)

    def as_nest(self) -> dict[str, dict[str, Nest]]:
        """Return the three dictionaries as one nest, so that `tf.nest` can pack it."""
        return {"losses": self.losses, "sums": self.sums, "moments": self.moments}

    def update(self, nest: dict[str, dict[str, Nest]]) -> None:
        """Add what another one collected, as its `as_nest` returns it."""
        self.losses.update(nest["losses"])
        self.sums.update(nest["sums"])
        self.moments.update(nest["moments"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What every `fprop` receives: seed, state, step, and where it adds losses and statistics.

    Attributes:
        training: whether dropout drops and batch norm uses its micro-batch.
        step: int64 scalar tensor, the update's number.
        root_seed: int32 [2], the micro-batch's seed (`seeds.micro_batch_seed`).
        state: the layer's state variables as tensors, nested by child like `theta`.
        path: the layer's path, `block/conv`; losses and variables are named by it.
        frozen: paths of layers that are frozen: all of their weights, or `trainable=False`.
        collected: what this layer and its children have added so far.
    """

    training: bool
    step: tf.Tensor
    root_seed: tf.Tensor
    state: dict[str, Nest]
    path: str
    frozen: frozenset[str] = frozenset()
    collected: Collected = dataclasses.field(default_factory=Collected)

    @property
    def seed(self) -> tf.Tensor:
        """Int32 [2]: this layer's seed in this micro-batch of this step."""
        return seeds.fold(self.root_seed, seeds.path_hash(self.path))

    def fold(self, draw: int) -> tf.Tensor:
        """Return int32 [2]: the seed of draw number `draw`, for layers that draw more than once."""
        return seeds.fold(self.seed, draw)

    @property
    def is_frozen(self) -> bool:
        """Whether this layer or one around it is frozen: all its weights, or `trainable=False`."""
        parts = self.path.split("/")
        return any("/".join(parts[: n + 1]) in self.frozen for n in range(len(parts)))

    def child(self, name: str) -> Context:
        """Return the context of the child layer `name`, with its seed, state and path."""
        return self.replace(path=f"{self.path}/{name}", state=self.state.get(name, {}))

    def replace(self, **changes: Any) -> Context:
        """Return a copy with some arguments changed; it collects into the same place."""
        return dataclasses.replace(self, **changes)

    def add_loss(self, name: str, total: tf.Tensor) -> None:
        """Add the loss `name`: its *sum* over the micro-batch (its weight is declared in Meta).

        Args:
            name: as declared in `Meta.losses` by this layer.
            total: floating scalar.

        Raises:
            LayerError: the name was added before in this micro-batch.
        """
        self._add(self.collected.losses, name, total, "loss")

    def add_sum(self, name: str, value: Nest) -> None:
        """Add the metric `name`: any nest of tensors that are summed over examples."""
        self._add(self.collected.sums, name, value, "metric")

    def add_moments(self, moments: dict[str, tf.Tensor]) -> None:
        """Add sums over the micro-batch, for `Layer.merge_moments`; ignored in a frozen layer."""
        if not self.is_frozen:
            self._add(self.collected.moments, self.path, moments, "moments of")

    def _add(self, where: dict[str, Nest], name: str, value: Nest, kind: str) -> None:
        if name in where:
            raise errors.LayerError(
                f"{self.path}: {kind} {name!r} is added twice in one micro-batch; names of losses "
                "and metrics are unique in the network. Rename one of the two"
            )
        where[name] = value
