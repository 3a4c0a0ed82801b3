"""What twice the devices are better used for: replicas, or partitions."""

from __future__ import annotations

import dataclasses
import textwrap

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import hosts, largest, step_plan
from lingvo_gpipe.task import Task

_WIDTH = 100
_ALIKE = 0.005  # of a step: within what the table rounds to


def lines(
    task: Task.Params, cluster: hosts.Hosts | None = None, limit_bytes: int | None = None
) -> list[str]:
    """Return a table that compares twice the replicas with twice the partitions, by formula.

    Links take time, those between replicas too, if hosts state how fast they and devices are.

    Args:
        task: what is planned.
        cluster: its hosts; as many more of them are taken as twice the devices need.
        limit_bytes: memory of a device; None: not known.
    """
    now = step_plan.make_for(task, cluster=cluster)
    replicas, partitions = task.model.num_replicas, task.model.num_partitions
    rows, refusals = [["twice the devices", "step", "heaviest device"]], []
    shares = {}
    for r, k in ((2 * replicas, partitions), (replicas, 2 * partitions)):
        name = f"R={r}, K={k}"
        try:
            plan = _plan(task, r, k, cluster)
        except errors.UserError as error:
            rows.append([name, "-", "-"])
            why = f"{name}: {str(error).splitlines()[0]}"
            refusals += textwrap.wrap(why, _WIDTH, subsequent_indent="    ")
            continue
        share, most = plan.mini_batch_s / now.mini_batch_s, plan.heaviest_bytes
        if limit_bytes is None or most <= limit_bytes:
            shares[name] = share
        else:
            refusals.append(f"{name}: {units.size(most - limit_bytes)} more than a device has")
        rows.append([name, units.percent(share), units.size(most)])
    return [*units.table(rows, "lrr"), *refusals, *_better(shares, now)]


def links_text(plan: step_plan.Plan) -> str:
    """Return whether links take time in a plan, as text."""
    return "links taken at the speeds of --hosts" if plan.counts_links else "links taken as free"


def _better(shares: dict[str, float], now: step_plan.Plan) -> list[str]:
    """Return the line that says which of two uses is better."""
    if len(shares) < 2:
        return []
    (better, least), (_, most) = sorted(shares.items(), key=lambda item: item[1])
    if most - least < _ALIKE * most:
        return [f"neither makes a step shorter than the other does ({links_text(now)})"]
    saved = units.percent(1.0 - least / most)
    return [f"{better} is the better use: its step is {saved} shorter ({links_text(now)})"]


def _plan(
    task: Task.Params, replicas: int, partitions: int, cluster: hosts.Hosts | None
) -> step_plan.Plan:
    changed = largest.with_partitions(task, partitions).copy()
    changed.model.set(num_replicas=replicas, devices=None)
    if cluster is not None and cluster.devices is not None:
        needed = -(-replicas * partitions // cluster.devices)
        cluster = dataclasses.replace(cluster, count=max(cluster.count, needed))
    return step_plan.make_for(changed, cluster=cluster)
