"""Which cells XLA compiles, by measured times (`model.jit_compile=auto`).

XLA makes some cells faster and others slower, and no formula says which. So the programs of every
cell are measured both ways. Cuts, schedule and policies stay those that were chosen without XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from lingvo_gpipe import errors, network, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.network import memory_formulas, replicas
from lingvo_gpipe.network.traffic import links
from lingvo_gpipe.plan import describe, slot_times
from lingvo_gpipe.plan.measured import cell_runner, cell_times
from lingvo_gpipe.plan.measured.cell_times import CellTimes
from lingvo_gpipe.schedule import simulate
from lingvo_gpipe.task import Task, groups_of

_LEAST_GAIN = 0.03  # of a cell's time, and of the step: less is within what measurements vary by


@dataclasses.dataclass(frozen=True, slots=True)
class Compilation:
    """Which cells are compiled, and why.

    Attributes:
        cells: whether each is compiled.
        shares: time of each cell's slots in a step if it is compiled, divided by that if not; None:
            XLA cannot compile it. Empty: nothing was measured.
        step_share: time of the step with these cells compiled, divided by that with none.
    """

    cells: tuple[bool, ...]
    shares: tuple[float | None, ...] = ()
    step_share: float = 1.0

    def line(self) -> str:
        """Return what was chosen, and by which times."""
        if not self.shares:
            return (
                "XLA compiles no cell: their programs could not be measured (a network without a "
                "loss, or cells that may need more than half of the host's memory)"
            )
        chosen = [str(k) for k, compiled in enumerate(self.cells) if compiled]
        cells = "cell" if len(chosen) == 1 else "cells"
        names = f"{cells} {', '.join(chosen)}" if chosen else "no cell"
        times = ", ".join(
            "cannot" if share is None else units.percent(share) for share in self.shares
        )
        step = f"; the step takes {units.percent(self.step_share)}" if chosen else ""
        return f"XLA compiles {names}: compiled, the cells take {times} of their time{step}"

    def set_in(self, params: Task.Params) -> None:
        """Set the field in the params of a task."""
        params.model.jit_compile = self.cells if any(self.cells) else False


def is_open(model: network.PipelineParams) -> bool:
    """Return whether it is to be chosen which cells are compiled."""
    return model.jit_compile == schedule.AUTO


def check(model: network.PipelineParams, *, profile: bool) -> None:
    """Refuse a choice without measured times.

    Raises:
        ParamsError: which cells are compiled is to be chosen, but nothing is measured.
    """
    if is_open(model) and not profile:
        raise errors.ParamsError(
            "model.jit_compile=auto needs times that are measured. Add --profile, or set True, "
            "False, or one of them for each cell"
        )


def choose(task: Task.Params) -> Compilation:
    """Measure the cells of a task both ways.

    A cell is compiled where that takes at most 97 % of its time; if the simulated step is then not
    shorter by 3 %, none is. Where some would be, everything is measured once more, and the shorter
    times count: other programs may have used the cores while one of the two ran.

    Args:
        task: params of a task with a named schedule. Without stated cuts, cells are cut by FLOPs.
    """
    groups = groups_of(task, describe.fields_of(task))
    model, fields = replicas.first_share(groups.params, groups.fields)
    plain, compiled = (
        network.analyze(model.copy().set(jit_compile=jit), fields) for jit in (False, True)
    )
    needs = [memory_formulas.cell_bytes(plain, cell) for cell in plain.cells]
    devices = cell_runner.devices_at_once(task.model)
    found = cell_times.measure(groups.params, plain, needs)
    if found is None:
        return Compilation((False,) * len(plain.cells))
    other = cell_times.of_compiled(compiled, devices)
    choice = _chosen(plain, found, other, task)
    if not any(choice.cells):
        return choice
    again = cell_times.on_devices(plain, devices), cell_times.of_compiled(compiled, devices)
    found = found.with_cells(
        [a.shorter(b) for a, b in zip(found.cells, again[0].cells, strict=True)]
    )
    other = [a and b and a.shorter(b) for a, b in zip(other, again[1], strict=True)]
    return _chosen(plain, found, other, task)


def _chosen(
    analysis: network.Analysis,
    found: cell_times.StepTimes,
    compiled: Sequence[CellTimes | None],
    task: Task.Params,
) -> Compilation:
    """Return which cells are compiled by these times; see `choose`."""
    simulated = functools.partial(slot_times.timeline, analysis, links.Stream(analysis))

    def timeline(cells: Sequence[CellTimes | None]) -> simulate.Timeline:
        return found.with_cells(cells).timeline(simulated, task.model.num_replicas)

    before, after = timeline(found.cells), timeline(compiled)
    shares = [
        None if times is None else after_s / before_s
        for times, after_s, before_s in zip(compiled, _cell_s(after), _cell_s(before), strict=True)
    ]
    cells = [share is not None and share <= 1.0 - _LEAST_GAIN for share in shares]
    taken = [times if jit else None for jit, times in zip(cells, compiled, strict=True)]
    step_share = timeline(taken).makespan_s / before.makespan_s
    if step_share > 1.0 - _LEAST_GAIN:
        cells, step_share = [False] * len(cells), 1.0
    return Compilation(tuple(cells), tuple(shares), step_share)


def _cell_s(timeline: simulate.Timeline) -> Sequence[float]:
    """Return the seconds of each cell's slots in a step."""
    total_s = [0.0] * timeline.table.num_cells
    for span in timeline.spans:
        total_s[span.slot.cell] += span.end_s - span.start_s
    return total_s
