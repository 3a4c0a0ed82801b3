"""The schedule that `auto` takes is the simplest of the shortest that fit, and a run keeps it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors, layers, modes, schedule
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import auto, describe, hosts, profiling, report, slot_times, step_plan
from lingvo_gpipe.run import checkpoints, loop
from lingvo_gpipe.schedule.recompute import Work
from tests.support import jobs
from tests.tiny_task import tiny_task


def deep(**model: Any) -> Any:
    """Return a task whose network has eight layers."""

    task = tiny_task(max_steps=2)
    hidden = [
        layers.Dense.Params(units=16, reads=("point",) if not n else ("x",), activation="relu")
        for n in range(7)
    ]
    task.model.set(
        layers=[*hidden, layers.Softmax.Params(name="head", classes=3)],
        **{"num_partitions": 2, "num_micro_batches": 4, "schedule": "auto", **model},
    )
    task.input.batch_size = 16
    return task


def open_task(*inside: Any, **model: Any) -> Any:
    """Return `deep` with layers before its last one and without a number of micro-batches."""
    task = deep(**{"num_micro_batches": 1, **model})
    task.model.layers = [*task.model.layers[:-1], *inside, task.model.layers[-1]]
    return task


def brute_force(task: Any) -> dict[tuple[str, int, str], step_plan.Plan]:
    """Return the plans of all schedules that can be made."""
    found = {}
    names = [name for name in schedule.SCHEDULES if name != "optimal"]
    for name, cells, recompute in itertools.product(names, (1, 2, 3), auto.POLICIES):
        tried = task.copy()
        tried.model.set(schedule=name, cells_per_device=cells, recompute=recompute)
        try:
            found[name, cells, recompute] = step_plan.make_for(tried)
        except errors.UserError:
            continue
    return found


@pytest.mark.parametrize("share", [None, 0.3, 0.6])
def test_the_simplest_of_the_shortest_that_fit_is_taken(share: float | None) -> None:
    task = deep()
    plans = brute_force(task)
    limit: float = float("inf")
    if share is not None:
        needs = sorted(plan.heaviest_bytes for plan in plans.values())
        limit = int(needs[0] + share * (needs[-1] - needs[0]))
        task = deep(device_memory=f"{limit}B")
        plans = brute_force(task)
    fitting = {key: plan for key, plan in plans.items() if plan.heaviest_bytes <= limit}
    shortest_s = min(plan.step_s for plan in fitting.values())
    equal = {key: plan for key, plan in fitting.items() if plan.step_s <= 1.03 * shortest_s}
    choice = auto.choose(task)
    best = choice.best
    key = best.model.schedule, best.model.cells_per_device, best.model.recompute
    assert key in equal
    assert best.model.cells_per_device == min(cells for _, cells, _ in equal)
    assert all(one.plan.heaviest_bytes <= limit for one in choice.fitting)
    assert (choice.num_refused > 0) == (share is not None)
    assert f"auto: {best.name}; devices wait " in choice.lines()[0]


def test_of_equally_short_and_simple_ones_the_one_that_needs_least_is_taken() -> None:
    task = deep(cells_per_device=1, num_micro_batches=64, recompute="never", fuse=False)
    task.input.batch_size = 64
    best = auto.choose(task).best
    assert best.model.schedule == "1f1b"
    task.model.schedule = "gpipe"
    other = step_plan.make_for(task)
    assert best.plan.step_s == pytest.approx(other.step_s, rel=0.03)
    assert best.plan.heaviest_bytes < other.heaviest_bytes


def test_what_is_set_is_kept() -> None:
    choice = auto.choose(deep(cells_per_device=2, recompute="early"))
    assert {one.model.cells_per_device for one in choice.fitting} == {2}
    assert {one.model.recompute for one in choice.fitting} == {"early"}
    assert len({one.model.schedule for one in choice.fitting}) > 3
    with pytest.raises(errors.ScheduleError, match="cells_per_device=7, but --schedule=auto tries"):
        auto.choose(deep(cells_per_device=7))


def test_the_last_forward_is_kept_where_not_all_fit() -> None:
    task = deep(num_partitions=4, cells_per_device=2, device_memory="542KiB")
    task.input.batch_size = 2048
    assert auto.choose(task).best.model.recompute == "except_last"


def test_memory_that_nothing_fits_is_reported() -> None:
    with pytest.raises(errors.PartitionError, match=r"^no schedule (fits|can be planned)"):
        auto.choose(deep(device_memory="3KiB"))
    with pytest.raises(errors.PartitionError, match=r"layer dense_1 alone needs 8\.44 KiB\."):
        report.plan(open_task(device_memory="3KiB"))


def test_a_run_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By measured times, in which the first layer takes as long as five others."""
    lines: list[str] = []
    calls: list[object] = []
    times = (Work(5.0, 10.0, 5.0, 15.0), *[Work(1.0, 2.0, 1.0, 3.0)] * 7)

    def measured(*given: object) -> tuple[Work, ...]:
        calls.append(given)
        return times

    monkeypatch.setattr(profiling, "layer_times", measured)
    monkeypatch.setattr(profiling, "cell_times", lambda *_: None)
    task = open_task()
    task.input.batch_size = 4
    loop.run(task, tmp_path, report=lines.append, profile_layers=True)
    best = auto.choose(task, profile=True).best
    assert best.plan.analysis.cuts[0] < 4  # by FLOPs they are even
    (chosen,) = [line for line in lines if line.startswith("auto: ")]
    assert chosen.startswith(f"auto: {best.name};")
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    values = text.written_values(kept[1])
    assert values["model.schedule"] == repr(best.model.schedule)
    assert values["model.recompute"] == repr(best.model.recompute)
    assert values["model.cuts"] == repr(best.plan.analysis.cuts)
    assert values["model.num_micro_batches"] == repr(best.model.num_micro_batches) != "1"
    # It goes on with its choice, although another one would be made now.
    monkeypatch.setattr(auto, "POLICIES", ("full",))
    assert auto.choose(task, profile=True).best.name != best.name
    task.train.max_steps = 3
    lines.clear()
    calls.clear()
    loop.run(task, tmp_path, report=lines.append, profile_layers=True)
    assert not calls
    assert not [line for line in lines if line.startswith("auto: ")]
    assert not [line for line in lines if line.strip().startswith("model.")]
    resolved = modes.with_kept_choice(task, str(tmp_path))
    assert resolved.model.schedule == best.model.schedule
    assert resolved.model.num_micro_batches == best.model.num_micro_batches
    assert f"in {best.model.num_micro_batches} micro-batches" in describe.describe(resolved)
    set_here = task.copy()
    set_here.model.set(num_micro_batches=5, cuts=(4, 4))
    resolved = modes.with_kept_choice(set_here, str(tmp_path))
    assert (resolved.model.num_micro_batches, resolved.model.cuts) == (5, (4, 4))
    # For another number of devices it is made again.
    task.model.set(num_partitions=3)
    again = auto.resolved(task, lines.append, kept={**values, "model.recompute": "'full,never'"})
    assert lines[-1].startswith("auto: ")
    assert again.model.recompute == "full"
    assert again.model.num_micro_batches == best.model.num_micro_batches
    began_with_one = {**values, "model.num_micro_batches": "1"}
    again = auto.resolved(task, lines.append, kept=began_with_one)
    assert again.model.num_micro_batches == 1
    assert lines[-1].endswith("\nM stays 1: the run began so. --num_micro_batches sets it")


def test_what_is_set_otherwise_than_in_the_run_is_chosen_again() -> None:
    lines: list[str] = []
    kept = {
        "model.schedule": "'1f1b'",
        "model.recompute": "'early'",
        "model.cells_per_device": "1",
        "model.num_partitions": "2",
        "model.device_memory": "None",
        "model.cuts": "(4, 4)",
    }

    def resolved(*, trains: bool = True, **model: Any) -> Any:
        lines.clear()
        return auto.resolved(deep(**model), lines.append, kept=kept, trains=trains).model

    for same in ({}, {"recompute": "early"}, {"cells_per_device": 1}):
        assert resolved(**same).recompute == "early"
        assert lines == ["the run keeps its schedule, 1f1b: --schedule=NAME changes it"]
    assert resolved(recompute="never").recompute == "never"
    assert lines[0].startswith("auto: ")
    assert resolved(cells_per_device=2, cuts=None).cells_per_device == 2
    assert lines[0].startswith("auto: ")
    with pytest.raises(errors.PartitionError, match="device_memory=64B, but layer"):
        resolved(device_memory="64B")
    kept_anyway = resolved(recompute="never", device_memory="64B", trains=False)
    assert (kept_anyway.schedule, kept_anyway.recompute) == ("1f1b", "early")
    # Cuts of a run go with its devices.
    for cuts in ((4, 4), None):
        assert len(resolved(num_partitions=4, cells_per_device=1, cuts=cuts).cuts) == 4


def test_other_modes_need_a_run_that_has_chosen(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path)):
        with pytest.raises(errors.ParamsError, match="auto is chosen by --mode=train"):
            modes.with_kept_choice(deep(), folder)
    with pytest.raises(errors.ScheduleError, match="'auto' is not chosen yet"):
        schedule.make("auto", 2, 2)
    named = tiny_task()
    assert auto.resolved(named, lambda _: None) is named


def test_the_smallest_m_is_taken_whose_step_is_nearly_the_shortest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "POLICIES", ("never",))
    task = open_task()
    choice = auto.choose(task)
    steps_s = {}
    for count in micro_batches.counts(16, 2):
        tried = task.copy()
        tried.model.num_micro_batches = count
        steps_s[count] = min(plan.step_s for plan in brute_force(tried).values())
    assert list(steps_s) == [2, 4, 8, 16]
    near = [m for m, step_s in steps_s.items() if step_s <= 1.03 * min(steps_s.values())]
    assert choice.best.model.num_micro_batches == near[0] not in (2, 16)
    assert f" M={near[0]} " in choice.best.name
    chosen = task.copy()
    choice.set_in(chosen.model)
    assert f"model.num_micro_batches: {near[0]}\n" in chosen.to_text()
    assert f", {near[0]} micro-batches of" in report.plan(task)


def test_memory_requires_more_micro_batches() -> None:
    task = open_task()
    task.input.batch_size = 64
    choice = auto.choose(task)
    free = choice.best.model.num_micro_batches
    assert free != 16
    tried = task.copy()
    choice.set_in(tried.model)
    tried.model.cuts = None
    limit = min(plan.heaviest_bytes for plan in brute_force(tried).values()) - 1
    task.model.device_memory = f"{limit}B"
    best = auto.choose(task).best
    assert best.model.num_micro_batches > free
    assert best.plan.heaviest_bytes <= limit


@pytest.mark.parametrize(
    ("inside", "model", "count", "note"),
    [
        ((), {"num_micro_batches": 4}, 4, ""),
        ((), {"num_partitions": 1, "cells_per_device": 1}, 1, ""),
        (
            (layers.Dropout.Params(name="free", rate=0.0, cost=1.0),),
            {},
            1,
            "M stays 1: costs are stated for micro-batches of one size",
        ),
        (
            (layers.Dropout.Params(name="drop", rate=0.2),),
            {},
            1,
            "M stays 1: drop draws random numbers for each micro-batch",
        ),
    ],
)
def test_m_stays_where_it_is_set_or_results_depend_on_it(
    inside: tuple[Any, ...], model: dict[str, Any], count: int, note: str
) -> None:
    choice = auto.choose(open_task(*inside, recompute="full", **model))
    assert {len(one.plan.analysis.sizes) for one in choice.fitting} == {count}
    assert choice.lines()[-1].startswith(note)
    assert bool(choice.note) == bool(note)


def test_replicas_and_few_examples() -> None:
    task = open_task(num_replicas=2, cells_per_device=1)
    assert auto.choose(task).best.model.num_micro_batches % 2 == 0
    task.input.batch_size = 3
    assert auto.choose(task).best.model.num_micro_batches == 3


@pytest.mark.parametrize(("call_s", "count"), [(6.0, 2), (0.1, 4)])
def test_measured_times_count_what_a_call_costs(
    monkeypatch: pytest.MonkeyPatch, call_s: float, count: int
) -> None:
    measured = []

    def layer_times(params: Any, fields: Any) -> tuple[Work, ...]:
        size = max(micro_batches.sizes_of(params, fields))
        measured.append(size)
        forward_s = call_s + size
        return (Work(forward_s, 2 * forward_s, forward_s, 3 * forward_s),) * 8

    monkeypatch.setattr(profiling, "layer_times", layer_times)
    monkeypatch.setattr(profiling, "cell_times", lambda *_: None)
    choice = auto.choose(open_task(cells_per_device=1), profile=True)
    assert sorted(measured) == [1, 2, 4, 8]
    assert choice.best.model.num_micro_batches == count


@pytest.mark.parametrize(("factor", "cells"), [(1.5, 1), (0.5, 2), (None, 2)])
def test_measured_programs_decide_how_many_cells_a_device_has(
    monkeypatch: pytest.MonkeyPatch, factor: float | None, cells: int
) -> None:
    """Cells of their own programs take longer, or less time, than their layers; None: unknown."""
    measured = []

    def measure(_: Any, analysis: Any, *__: Any) -> list[slot_times.SlotTimes] | None:
        if factor is None:
            return None
        V = analysis.table.num_cells // analysis.table.num_devices
        measured.append(V)
        longer = 1.0 if V == 1 else factor

        def of_cell(cell: Any) -> slot_times.SlotTimes:
            times = slot_times.program_times(analysis, cell, TIMES)
            return slot_times.of_cell(analysis, cell, lambda name: longer * times[name])

        return list(map(of_cell, analysis.cells))

    monkeypatch.setattr(profiling, "layer_times", lambda *_: TIMES)
    monkeypatch.setattr(profiling, "cell_times", measure)
    task = deep(num_partitions=4)
    task.input.batch_size = 16
    assert auto.choose(task).best.model.cells_per_device in (2, 3)
    choice = auto.choose(task, profile=True)
    assert (choice.best.model.cells_per_device == 1) == (cells == 1)
    assert len(measured) <= 6  # of some fifty


TIMES = (Work(1.0, 2.0, 1.0, 3.0),) * 8


def test_plan_and_training_choose_by_the_same_hosts(tmp_path: Path) -> None:
    task = deep(num_partitions=3)
    task.train.max_steps = 0
    task.input.batch_size = 32

    def lines_of(mode: str, shape: str) -> list[str]:
        lines: list[str] = []
        logdir = tmp_path / f"{mode}-{shape[:3]}"
        job = jobs.job(task.copy(), logdir, lines, f"--hosts={shape}", rebuild=lambda *_: task)
        modes.MODES[mode](job)
        (chosen,) = [line for line in lines if line.startswith("auto: ")]
        return chosen.splitlines()[:3]

    free = auto.choose(task, cluster=hosts.Hosts(3))
    slow = "3x1,between=10kB,flops=1M"
    planned = lines_of("plan", slow)
    assert lines_of("train", slow) == planned
    assert not planned[0].startswith(f"auto: {free.best.name};")
    assert planned[2] == "links take time at the speeds of --hosts"
    # Their memory limits training, too, and the cut is within it.
    limit = free.best.plan.heaviest_bytes - 1
    capped = f"3x1,memory={limit}B,between=10kB"
    planned = lines_of("plan", capped)
    assert lines_of("train_eval", capped) == planned
    assert not planned[0].startswith(f"auto: {free.best.name};")
    assert planned[2].startswith("links take no time: ")
    with pytest.raises(errors.PartitionError, match=r"3 devices are needed, but --hosts has 2 x 1"):
        lines_of("train", "2x1")


def test_a_cut_that_fits_the_hosts_is_taken_and_kept() -> None:
    # The table has weights, but no work.
    task = deep(cells_per_device=1)
    table = layers.Embedding.Params(vocabulary=10_000, units=16, reads=("label",))
    first, *others = task.model.layers
    task.model.layers = [table, first.set(reads=("x",)), *others]
    even = auto.choose(task).best.plan
    limit = even.heaviest_bytes - 1000
    choice = auto.choose(task, cluster=hosts.Hosts(1, memory=limit))
    cuts = choice.best.plan.analysis.cuts
    assert choice.best.plan.heaviest_bytes <= limit
    assert cuts != even.analysis.cuts
    choice.set_in(task.model)
    assert step_plan.make_for(task).analysis.cuts == cuts
