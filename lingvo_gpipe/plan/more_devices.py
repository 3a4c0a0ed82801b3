"""What twice the devices are better used for: replicas, or partitions."""

from __future__ import annotations

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import largest, step_plan
from lingvo_gpipe.task import Task


def lines(task: Task.Params) -> list[str]:
    """Return a table that compares twice the replicas with twice the partitions, by formula.

    Links are taken as free, those between replicas too.
    """
    now = step_plan.make_for(task)
    replicas, partitions = task.model.num_replicas, task.model.num_partitions
    rows = [["twice the devices", "step", "heaviest device"]]
    rows.append(_row(now, task, 2 * replicas, partitions))
    rows.append(_row(now, task, replicas, 2 * partitions))
    return units.table(rows, "lrr")


def _row(now: step_plan.Plan, task: Task.Params, replicas: int, partitions: int) -> list[str]:
    """Return the share of the present step's time, and the bytes of the heaviest device."""
    name = f"R={replicas}, K={partitions}"
    try:
        changed = largest.with_partitions(task, partitions).copy()
        changed.model.set(num_replicas=replicas, devices=None)
        plan = step_plan.make_for(changed)
    except errors.UserError:
        return [name, "-", "too few micro-batches or layers"]
    share = plan.timeline.makespan_s / now.timeline.makespan_s
    return [name, units.percent(share), units.size(plan.heaviest_bytes)]
