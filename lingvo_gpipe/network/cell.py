"""A cell in one pass over the network, and the pass.

The analysis makes a `Cell` for each pass. The executor, the cell programs, the plan and the
measurements read from it what a cell sends and differentiates, and which program a slot runs.
"""

from __future__ import annotations

import dataclasses

from lingvo_gpipe.layers import base
from lingvo_gpipe.schedule import recompute
from lingvo_gpipe.schedule.slot import Phase
from lingvo_gpipe.schedule.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """The purpose of a pass over the network; programs are traced for it.

    Attributes:
        training: dropout drops, batch norm uses its micro-batch, and gradients flow back.
        differentiable: versions of the stream that gradients flow into.
        leaving: versions that the pass returns.
        is_differentiated: whether gradients flow back, by slots or under a caller's tape.
    """

    training: bool
    differentiable: frozenset[int]
    leaving: frozenset[int]
    is_differentiated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Consecutive layers that live on one device, in one pass over the network.

    Attributes:
        index: number k of the cell.
        layers: indices of its layers.
        device_number: number of its device, which is the row of the table.
        device_speed: relative speed of the device.
        recompute_policy: one of `schedule.recompute.POLICIES`.
        compiled: whether XLA compiles its programs.
        costs: cost of each layer of the network if it is in this cell: seconds or FLOPs of
            forward, recomputation and backward of one micro-batch.
        weights: network paths of its trained weights, tied ones of other cells included.
        untrained: network paths of its frozen weights and statistics.
        imports: versions of the stream that it receives, fields included, ascending.
        exports: versions that other cells read or the pass returns, ascending.
        losses: losses that it returns; that of an auxiliary head only in training.
        mode: mode of the pass.
        reuse: how its backward gets the forward, if it has a backward.
    """

    index: int
    layers: range
    device_number: int
    device_speed: float
    recompute_policy: str
    compiled: bool
    costs: tuple[float, ...]
    weights: tuple[str, ...]
    untrained: tuple[str, ...]
    imports: tuple[int, ...]
    exports: tuple[int, ...]
    losses: tuple[base.LossSpec, ...]
    mode: Mode
    reuse: recompute.CellReuse

    @property
    def imports_with_gradient(self) -> tuple[int, ...]:
        """The imports whose gradient its backward returns."""
        return tuple(v for v in self.imports if v in self.mode.differentiable)

    @property
    def exports_with_gradient(self) -> tuple[int, ...]:
        """The exports whose gradient its backward receives."""
        return tuple(v for v in self.exports if v in self.mode.differentiable)

    @property
    def has_backward(self) -> bool:
        """Whether a gradient flows back through it; if not, its backward slots are empty."""
        sources = self.weights or self.imports_with_gradient
        targets = self.losses or self.exports_with_gradient
        return self.mode.is_differentiated and bool(sources) and bool(targets)

    @property
    def returned_gradients(self) -> tuple[int, ...]:
        """The imports whose gradient its backward slots return; none if the slots are empty."""
        return self.imports_with_gradient if self.has_backward else ()

    @property
    def kept(self) -> frozenset[int]:
        """The micro-batches of `reuse.kept`: none without a backward."""
        return self.reuse.kept if self.has_backward else frozenset()

    @property
    def fused(self) -> frozenset[int]:
        """The micro-batches of `reuse.fused`: none without a backward."""
        return self.reuse.fused if self.has_backward else frozenset()

    @property
    def early(self) -> frozenset[int]:
        """The micro-batches of `reuse.early`: none without a backward."""
        return self.reuse.early if self.has_backward else frozenset()

    @property
    def cost(self) -> float:
        """Its cost for one micro-batch, as used by the partition."""
        return sum(self.costs[n] for n in self.layers)

    def computes(self, phase: Phase) -> bool:
        """Whether a slot of the cell has anything to compute."""
        if phase == "F" or not self.has_backward:
            return phase == "F"
        if phase in "RB":
            return True
        return bool(self.imports_with_gradient if phase == "I" else self.weights)

    def program(self, phase: Phase, micro_batch: int) -> str | None:
        """Return the name of the program that computes a slot; None: there is nothing to compute.

        F, B, I, W and R are named by their phases. FB is forward and backward as one program: its
        name is that of both slots, and the F slot calls it for both. K is a forward that also
        returns what its backward reads. BK and IK continue from what K or R returned; B and I
        compute the forward again.
        """
        if not self.computes(phase):
            return None
        if phase == "R":
            return "R" if micro_batch in self.early else None
        if micro_batch in self.fused:
            return "FB"
        if phase == "F":
            return "K" if micro_batch in self.kept else "F"
        if phase in "IW" and not (self.computes("I") and self.computes("W")):
            phase = "B"  # the other half computes nothing
        if phase in "BI" and (micro_batch in self.kept or micro_batch in self.early):
            return f"{phase}K"
        return phase

    def in_pass(self, mode: Mode, exports: tuple[int, ...], reuse: recompute.CellReuse) -> Cell:
        """Return the same cell in a pass other than training.

        Args:
            mode: mode of the pass.
            exports: versions that other cells read or the pass returns.
            reuse: how its backward gets the forward in that pass.
        """
        losses = tuple(loss for loss in self.losses if mode.training or not loss.training_only)
        return dataclasses.replace(self, mode=mode, exports=exports, losses=losses, reuse=reuse)


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the network, for one number of micro-batches.

    Attributes:
        table: when and on which device each slot runs.
        cells: in order.
    """

    table: Table
    cells: tuple[Cell, ...]

    @property
    def mode(self) -> Mode:
        """What the pass is for."""
        return self.cells[0].mode

    @property
    def num_micro_batches(self) -> int:
        """M of its table."""
        return self.table.num_micro_batches
