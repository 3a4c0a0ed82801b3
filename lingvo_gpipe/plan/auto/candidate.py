"""A way to run a network, among others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.task import Task

_EQUAL_SHARE = 0.005  # steps that differ by less are equally short
_EQUALLY_MEASURED_SHARE = 0.03  # the same of measured steps of different kinds


class Kind(NamedTuple):
    """What candidates share whose devices run as many programs; the simplest is the smallest.

    Attributes:
        cells_per_device: V.
        splits: whether backwards are split into I and W.
        is_apart: whether no cell runs forward and backward as one program.
    """

    cells_per_device: int
    splits: bool
    is_apart: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the network, and its plan.

    Attributes:
        schedule: name of the schedule.
        cells_per_device: V.
        recompute: recompute policy of every cell, or one for each.
        num_micro_batches: M; None: that of the task.
        plan: its plan; None: it cannot be planned.
        refusal: why not.
        refused_by_memory: whether it is that no cut fits a device.
        correction: time of a step by measured programs of cells over that by layers, of the
            fastest candidate of its kind; 1: not measured.
        even: the plan with the cut that the params make, where another one is taken; else None.
    """

    schedule: str
    cells_per_device: int
    recompute: str
    num_micro_batches: int | None = None
    plan: step_plan.Plan | None = None
    refusal: str = ""
    refused_by_memory: bool = False
    correction: float = 1.0
    even: step_plan.Plan | None = None

    @property
    def name(self) -> str:
        """Return what was chosen: `zb_h1 V=2 M=16 never`."""
        count = "" if self.num_micro_batches is None else f" M={self.num_micro_batches}"
        return f"{self._cells}{count} {self.recompute}"

    @property
    def name_at_equal_count(self) -> str:
        """The same without M."""
        return f"{self._cells} {self.recompute}"

    @property
    def _cells(self) -> str:
        V = self.cells_per_device
        return f"{self.schedule} V={V}" if V > 1 else self.schedule

    @property
    def reason(self) -> str:
        """Return why it cannot be planned; one reason for all that a cap on memory refuses."""
        if self.refused_by_memory:
            return "no cut fits"
        return self.refusal.partition(". ")[0]

    def set_in(self, params: Task.Params) -> None:
        """Set its fields in the params of a task."""
        params.model.set(
            schedule=self.schedule,
            cells_per_device=self.cells_per_device,
            recompute=self.recompute,
        )
        if self.num_micro_batches is not None:
            params.model.num_micro_batches = self.num_micro_batches
        if self.even is not None:
            params.model.cuts = self.cuts

    @property
    def cuts(self) -> tuple[int, ...]:
        """Number of layers in each cell; it has a plan."""
        return tuple(len(cell.layers) for cell in self.planned.analysis.cells)

    @property
    def planned(self) -> step_plan.Plan:
        """Its plan.

        Raises:
            ValueError: it has none.
        """
        if self.plan is None:
            raise ValueError(f"{self.name} has no plan")
        return self.plan

    @property
    def kind(self) -> Kind:
        """What it shares with others; it has a plan."""
        analysis = self.planned.analysis
        is_fused = any(cell.fused for cell in analysis.cells)
        return Kind(self.cells_per_device, any(analysis.table.split()), not is_fused)

    @property
    def step_s(self) -> float:
        """Time of a mini-batch, corrected; see `step_plan.Plan`."""
        return self.correction * self.planned.mini_batch_s

    @property
    def count(self) -> int:
        """M, as far as it was chosen."""
        return self.num_micro_batches or 1


def ordered(by_time: Sequence[Candidate], *, is_measured: bool = False) -> list[Candidate]:
    """Return candidates by time.

    Of those that are equally short, the one that needs least memory is first. Measured times of
    different kinds differ by more from one measurement to the next: of those, the simplest kind.

    Args:
        by_time: candidates, the fastest first.
        is_measured: whether by measured times.
    """
    left, found = list(by_time), []
    while left:
        first = left
        if is_measured:
            close = near(left, _EQUALLY_MEASURED_SHARE)
            simplest = min(one.kind for one in close)
            first = [one for one in close if one.kind == simplest]
        equal = near(first, _EQUAL_SHARE)
        found += sorted(equal, key=lambda one: one.planned.heaviest_bytes)
        taken = set(map(id, equal))
        left = [one for one in left if id(one) not in taken]
    return found


def equality(*, is_measured: bool) -> str:
    """Return a line on what `ordered` takes of steps that are equally short."""
    if is_measured:
        return (
            f"measured steps that differ by at most {_EQUALLY_MEASURED_SHARE:.0%} count as equal: "
            "the fewest cells are taken, then the fewest programs"
        )
    return f"steps that differ by at most {_EQUAL_SHARE:.1%} count as equal: least memory"


def near(by_time: Sequence[Candidate], share: float) -> list[Candidate]:
    """Return those whose steps are at most a share longer than that of the first."""
    return [one for one in by_time if one.step_s <= (1 + share) * by_time[0].step_s]
