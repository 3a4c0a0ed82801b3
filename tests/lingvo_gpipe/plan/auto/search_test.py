"""A cut that the hosts' memory or links require is found, where the even one does not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import layers
from lingvo_gpipe.console import units
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.plan import auto, hosts, step_plan
from lingvo_gpipe.run import checkpoints, loop
from lingvo_gpipe.run.profiles.steps import Profiles
from tests.tiny_task import tiny_task


def task_of(*widths: int, **model: Any) -> Any:
    """Return a task of dense layers of these widths, whose schedule is open."""
    task = tiny_task(max_steps=1)
    hidden = [
        layers.Dense.Params(units=width, reads=("point",) if not n else ("x",), activation="relu")
        for n, width in enumerate(widths)
    ]
    task.model.set(
        layers=[*hidden, layers.Softmax.Params(name="head", classes=3)],
        **{"num_partitions": 2, "num_micro_batches": 4, "schedule": "auto", **model},
    )
    task.input.batch_size = 16
    return task


def by_cuts(task: Any, cluster: hosts.Hosts) -> dict[tuple[int, ...], step_plan.Plan]:
    """Return the plan of the task's schedule with every cut."""
    found = {}
    count = len(task.model.layers)
    for first in range(1, count):
        tried = task.copy()
        tried.model.cuts = (first, count - first)
        found[tried.model.cuts] = step_plan.make_for(tried, cluster=cluster)
    return found


# Between wide layers much is sent; the even cut is there, a narrow layer is beside it.
BOTTLENECK = (256, 256, 16, 256, 256, 256, 256)


def test_a_cut_that_sends_less_is_taken_where_links_are_slow() -> None:
    task = task_of(*BOTTLENECK, cells_per_device=1, recompute="never")
    even = auto.choose(task, cluster=hosts.parse("2x1,flops=1G")).best
    assert even.even is None
    slow = hosts.parse("2x1,between=1MB,flops=1G")
    choice = auto.choose(task, cluster=slow)
    assert choice.best.even is not None
    assert choice.best.cuts == (3, 5)
    assert choice.best.cuts != even.cuts
    # No cut of the same schedule is faster.
    choice.best.set_in(task)
    plans = by_cuts(task, slow)
    assert plans[choice.best.cuts].mini_batch_s == choice.best.planned.mini_batch_s
    assert choice.best.step_s == min(plan.mini_batch_s for plan in plans.values())
    longer = choice.best.even.mini_batch_s / choice.best.step_s - 1
    assert longer > 0.1
    line = f"cells of 3, 5 layers: the even cut takes {longer:.1%} longer over these links"
    assert line in choice.lines()


def test_a_cut_that_fits_the_hosts_is_taken_where_the_even_one_does_not() -> None:
    # The table has weights, but no work.
    task = task_of(*[256] * 8, cells_per_device=1, recompute="full")
    table = layers.Embedding.Params(vocabulary=10_000, units=256, reads=("label",))
    first, *others = task.model.layers
    task.model.layers = [table, first.set(reads=("x",)), *others]
    free = auto.choose(task, cluster=hosts.Hosts(2))
    least = min(
        plan.heaviest_bytes
        for one in free.fitting
        for plan in by_cuts(scheduled(task, one), hosts.Hosts(2)).values()
    )
    assert least < min(one.planned.heaviest_bytes for one in free.fitting)
    cluster = hosts.Hosts(2, memory=least + 4096)
    choice = auto.choose(task, cluster=cluster)
    assert choice.best.even is not None
    assert choice.best.planned.heaviest_bytes <= least + 4096
    cuts = ", ".join(map(str, choice.best.cuts))
    needed = units.size(choice.best.even.heaviest_bytes)
    assert f"cells of {cuts} layers: the even cut needs {needed} on a device" in choice.lines()


def scheduled(task: Any, candidate: Any) -> Any:
    """Return a copy of a task with the schedule of a candidate."""
    copy = task.copy()
    candidate.set_in(copy)
    return copy


@pytest.mark.parametrize(
    "model", [{"cuts": (4, 4)}, {"link_cost_per_byte": 1e-9}, {"cells": [range(4), range(4, 8)]}]
)
def test_a_cut_that_is_stated_stays(model: dict[str, Any]) -> None:
    task = task_of(*BOTTLENECK, recompute="never", cells_per_device=1)
    own = task.model.layers
    if "cells" in model:
        task.model.set(cells=[[own[n] for n in cell] for cell in model["cells"]], layers=[])
    else:
        task.model.set(**model)
    choice = auto.choose(task, cluster=hosts.parse("2x1,between=1MB,flops=1G"))
    assert {one.even for one in choice.fitting} == {None}


def test_a_run_keeps_the_cut(tmp_path: Path) -> None:
    task, lines = task_of(*BOTTLENECK, cells_per_device=1, recompute="never"), list[str]()
    slow = hosts.parse("2x1,between=1MB,flops=1G")
    loop.run(task, tmp_path, report=lines.append, profiles=Profiles(hosts=slow))
    for cluster in (None, slow):
        kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
        assert kept is not None
        assert text.written_values(kept[1])["model.cuts"] == "(3, 5)"
        task.train.max_steps += 1
        lines.clear()
        loop.run(task, tmp_path, report=lines.append, profiles=Profiles(hosts=cluster))
        assert not [line for line in lines if line.startswith("auto ")]


def test_the_slowest_link_is_between_hosts() -> None:
    found = []
    for shape in ("2x2,within=4MB,between=1MB", "2x4,within=4MB,between=1MB", "2x2,within=4MB"):
        cluster = hosts.parse(shape)
        task = task_of(*BOTTLENECK, num_partitions=4, schedule="1f1b")
        plan = step_plan.make_for(task, cluster=cluster)
        assert plan.order is not None
        found.append(hosts.slowest_link(cluster, plan.order, plan.analysis))
    # Four devices of hosts of four are shared out, too.
    assert found == [1_000_000, 4_000_000, 4_000_000]
