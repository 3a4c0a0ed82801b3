"""What twice the devices are better used for: replicas, or partitions."""

from __future__ import annotations

import textwrap

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import largest, step_plan
from lingvo_gpipe.task import Task

_WIDTH = 100


def lines(task: Task.Params) -> list[str]:
    """Return a table that compares twice the replicas with twice the partitions, by formula.

    Links are taken as free, those between replicas too.
    """
    now = step_plan.make_for(task)
    replicas, partitions = task.model.num_replicas, task.model.num_partitions
    rows, refusals = [["twice the devices", "step", "heaviest device"]], []
    for r, k in ((2 * replicas, partitions), (replicas, 2 * partitions)):
        try:
            plan = _plan(task, r, k)
        except errors.UserError as error:
            rows.append([f"R={r}, K={k}", "-", "-"])
            why = f"R={r}, K={k}: {str(error).splitlines()[0]}"
            refusals += textwrap.wrap(why, _WIDTH, subsequent_indent="    ")
            continue
        share = plan.timeline.makespan_s / now.timeline.makespan_s
        rows.append([f"R={r}, K={k}", units.percent(share), units.size(plan.heaviest_bytes)])
    return [*units.table(rows, "lrr"), *refusals]


def _plan(task: Task.Params, replicas: int, partitions: int) -> step_plan.Plan:
    changed = largest.with_partitions(task, partitions).copy()
    changed.model.set(num_replicas=replicas, devices=None)
    return step_plan.make_for(changed)
