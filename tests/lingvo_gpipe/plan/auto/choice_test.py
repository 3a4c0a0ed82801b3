"""The schedule that `auto` takes is the fastest one that fits, and a run keeps it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from lingvo_gpipe import errors, layers, modes, registry, schedule
from lingvo_gpipe.console import units
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.network import micro_batches
from lingvo_gpipe.plan import auto, describe, hosts, report, step_plan
from lingvo_gpipe.plan.auto import search
from lingvo_gpipe.plan.auto.candidate import Candidate
from lingvo_gpipe.plan.auto.choice import Choice
from lingvo_gpipe.plan.auto.search import Search
from lingvo_gpipe.plan.measured import cell_times, profiling
from lingvo_gpipe.run import checkpoints, loop
from lingvo_gpipe.run.profiles.steps import Profiles
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


def shortest_s(task: Any, count: int, limit: float = float("inf")) -> float:
    """Return the time of the shortest step with M micro-batches that fits."""
    tried = task.copy()
    tried.model.set(num_micro_batches=count)
    fitting = [plan for plan in brute_force(tried).values() if plan.heaviest_bytes <= limit]
    return min((plan.step_s for plan in fitting), default=float("inf"))


def brute_force(task: Any) -> dict[tuple[str, int, str], step_plan.Plan]:
    """Return the plans of all schedules that can be made."""
    found = {}
    known = step_plan.known_of(search.unscheduled(task))
    names = [name for name in schedule.SCHEDULES if name != "optimal"]
    for name, cells, recompute in itertools.product(names, (1, 2, 3), search.POLICIES):
        tried = task.copy()
        tried.model.set(schedule=name, cells_per_device=cells, recompute=recompute)
        try:
            found[name, cells, recompute] = step_plan.make_for(tried, known=known)
        except errors.UserError:
            continue
    return found


def test_the_fastest_is_taken() -> None:
    task = deep()
    choice = auto.choose(task)
    plans = brute_force(task)
    assert len(choice.fitting) > 20
    shortest_s = min(plan.step_s for plan in plans.values())
    assert choice.best.plan is not None
    assert choice.best.plan.step_s <= 1.005 * shortest_s
    equal = [plan for plan in plans.values() if plan.step_s <= 1.005 * shortest_s]
    assert choice.best.plan.heaviest_bytes == min(plan.heaviest_bytes for plan in equal)
    steps = [one.plan.step_s for one in choice.fitting if one.plan is not None]
    assert all(a <= 1.005 * b for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_what_does_not_fit_is_not_taken(share: float) -> None:
    needs = sorted(plan.heaviest_bytes for plan in brute_force(deep()).values())
    limit = int(needs[0] + share * (needs[-1] - needs[0]))
    choice = auto.choose(deep(device_memory=f"{limit}B"))
    assert choice.best.plan is not None
    assert all(one.plan is not None and one.plan.heaviest_bytes <= limit for one in choice.fitting)
    capped = brute_force(deep(device_memory=f"{limit}B")).values()
    shortest_s = min(plan.step_s for plan in capped if plan.heaviest_bytes <= limit)
    assert choice.best.plan.step_s <= 1.005 * shortest_s
    lines = "\n".join(choice.lines())
    assert choice.best.name in lines
    assert "no cut fits" in lines or "on a device, at least" in lines


def test_cells_keep_their_forwards_where_memory_is_left() -> None:
    plans = brute_force(deep(num_partitions=4))
    full, never = (plans["1f1b", 1, one].heaviest_bytes for one in ("full", "never"))
    choices = [
        auto.choose(deep(num_partitions=4, device_memory=f"{limit}B"))
        for limit in range(full, never, (never - full) // 4)
    ]
    mixed = [one for choice in choices for one in choice.fitting if "," in one.recompute]
    assert mixed
    for one in mixed:
        assert "never" in one.recompute.split(",")
        assert one.plan is not None
        assert one.plan.step_s < plans[one.schedule, one.cells_per_device, "full"].step_s


def test_the_last_forward_is_kept_where_not_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(policies: tuple[str, ...], **model: Any) -> auto.Choice:
        monkeypatch.setattr(search, "POLICIES", policies)
        task = deep(num_partitions=4, cells_per_device=2, **model)
        task.input.batch_size = 2048
        return auto.choose(task)

    def planned(choice: auto.Choice) -> set[tuple[str, int, str]]:
        found = (*choice.fitting, *choice.too_large)
        return {(one.schedule, one.cells_per_device, one.recompute) for one in found}

    others, policies = ("full", "early", "never"), search.POLICIES
    capped = choice(policies, device_memory="542KiB")
    assert "except_last" in capped.best.recompute
    assert capped.best.step_s < 0.98 * choice(others, device_memory="542KiB").best.step_s
    # `never` is as fast or faster, so where it fits, nothing is planned twice.
    assert planned(choice(policies)) == planned(choice(others))


def test_cells_are_tried_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Candidate(
        "1f1b", 1, "full", plan=step_plan.make_for(deep(num_partitions=4, schedule="1f1b"))
    )
    slow = {2}  # these cells need more memory than there is
    tried: list[set[int]] = []

    def attempt(_: Search, candidate: Candidate) -> Candidate:
        kept = {k for k, each in enumerate(candidate.recompute.split(",")) if each == "never"}
        tried.append(kept)
        step_s = start.step_s * (1 - len(kept) / 100)
        plan = dataclasses.replace(start.planned, step_s=step_s)
        return dataclasses.replace(candidate, plan=None if kept & slow else plan)

    monkeypatch.setattr(Search, "attempt", attempt)
    found = Search(deep())._kept_where_it_fits(start)
    assert found is not None
    assert found.recompute == "never,never,full,never"
    assert tried[0] == {0, 1, 2, 3}
    assert len(tried) <= 5
    slow |= {0, 1, 3}
    assert Search(deep())._kept_where_it_fits(start) is None


def test_what_is_set_is_kept() -> None:
    choice = auto.choose(deep(cells_per_device=2, recompute="early"))
    assert {one.cells_per_device for one in choice.fitting} == {2}
    assert {one.recompute for one in choice.fitting} == {"early"}
    assert len({one.schedule for one in choice.fitting}) > 3
    with pytest.raises(errors.ScheduleError, match="cells_per_device=7, but --schedule=auto tries"):
        auto.choose(deep(cells_per_device=7))


def test_memory_that_nothing_fits_is_reported() -> None:
    with pytest.raises(errors.PartitionError, match=r"^no schedule (fits|can be planned)"):
        auto.choose(deep(device_memory="3KiB"))


def test_a_run_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    task = open_task()
    task.input.batch_size = 4
    loop.run(task, tmp_path, report=lines.append)
    (table,) = [line for line in lines if line.startswith("auto ")]
    best = auto.choose(task).best
    assert table.splitlines()[1].startswith(best.name)
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    values = text.written_values(kept[1])
    assert values["model.schedule"] == repr(best.schedule)
    assert values["model.recompute"] == repr(best.recompute)
    assert values["model.num_micro_batches"] == repr(best.num_micro_batches) != "1"
    # It goes on with its choice, although another one would be made now.
    monkeypatch.setattr(search, "POLICIES", ("full",))
    assert auto.choose(task).best.name != best.name
    task.train.max_steps = 3
    lines.clear()
    loop.run(task, tmp_path, report=lines.append)
    assert not [line for line in lines if line.startswith("auto ")]
    assert not [line for line in lines if line.strip().startswith("model.")]
    resolved = modes.with_kept_choice(task, str(tmp_path))
    assert resolved.model.schedule == best.schedule
    assert resolved.model.num_micro_batches == best.num_micro_batches
    assert f"in {best.num_micro_batches} micro-batches" in describe.describe(resolved)
    set_here = task.copy()
    set_here.model.set(num_micro_batches=5)
    assert modes.with_kept_choice(set_here, str(tmp_path)).model.num_micro_batches == 5
    # For another number of devices it is made again.
    task.model.set(num_partitions=3)
    again = auto.resolved(task, lines.append, kept={**values, "model.recompute": "'full,never'"})
    assert lines[-1].startswith("auto ")
    assert again.model.recompute == "full"
    assert again.model.num_micro_batches == best.num_micro_batches
    assert "M=" not in lines[-1]
    began_with_one = {**values, "model.num_micro_batches": "1"}
    again = auto.resolved(task, lines.append, kept=began_with_one)
    assert again.model.num_micro_batches == 1
    assert "\nM stays 1: the run began so. --num_micro_batches sets it\n" in lines[-1]


def test_a_run_keeps_a_choice_by_measured_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    task = deep(cells_per_device=1, recompute="early")
    long, short = profiling.LayerTime(5.0, 10.0, 15.0), profiling.LayerTime(1.0, 2.0, 3.0)
    calls = []

    def measured(*_: object) -> tuple[profiling.LayerTime, ...]:
        calls.append(1)
        return (long, *[short] * 7)

    monkeypatch.setattr(profiling, "layer_times", measured)
    loop.run(task, tmp_path, report=lines.append, profiles=Profiles(layers=True))
    assert [line for line in lines if line.startswith("auto ")]
    num_calls = len(calls)
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    cuts = text.written_values(kept[1])["model.cuts"]
    assert cuts in ("(1, 7)", "(2, 6)")  # by FLOPs they are even
    # It goes on without measuring again.
    lines.clear()
    task.train.max_steps = 3
    loop.run(task, tmp_path, report=lines.append, profiles=Profiles(layers=True))
    assert not [line for line in lines if line.startswith("auto ") or "model." in line]
    assert len(calls) == num_calls
    assert repr(modes.with_kept_choice(task, str(tmp_path)).model.cuts) == cuts
    # Cuts that are set now are taken.
    task.model.cuts = (4, 4)
    assert modes.with_kept_choice(task, str(tmp_path)).model.cuts == (4, 4)


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
    assert lines[0].startswith("auto ")
    assert resolved(cells_per_device=2, cuts=None).cells_per_device == 2
    assert lines[0].startswith("auto ")
    with pytest.raises(errors.PartitionError, match="device_memory=64B, but layer"):
        resolved(device_memory="64B")
    kept_anyway = resolved(recompute="never", device_memory="64B", trains=False)
    assert (kept_anyway.schedule, kept_anyway.recompute) == ("1f1b", "early")


def test_cuts_of_a_run_go_with_its_devices() -> None:
    kept = {"model.num_partitions": "2", "model.cuts": "(4, 4)", "model.schedule": "'1f1b'"}
    for cuts in ((4, 4), None):
        model = auto.resolved(deep(num_partitions=4, cuts=cuts), lambda _: None, kept=kept).model
        assert model.cuts is None
        assert model.schedule != schedule.AUTO


def test_other_modes_need_a_run_that_has_chosen(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path)):
        with pytest.raises(errors.ParamsError, match="auto is chosen by --mode=train"):
            modes.with_kept_choice(deep(), folder)
    with pytest.raises(errors.ScheduleError, match="'auto' is not chosen yet"):
        schedule.make("auto", 2, 2)


def test_a_named_schedule_stays() -> None:
    task = tiny_task()
    assert auto.resolved(task, lambda _: None) is task


def test_the_smallest_m_is_taken_whose_step_is_nearly_the_shortest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "POLICIES", ("full", "never"))
    task = open_task()
    choice = auto.choose(task)
    steps_s = {count: shortest_s(task, count) for count in micro_batches.counts(16, 2)}
    assert list(steps_s) == [2, 4, 8, 16]
    near = [m for m, step_s in steps_s.items() if step_s <= 1.03 * min(steps_s.values())]
    assert choice.best.num_micro_batches == near[0] not in (2, 16)
    assert choice.best.plan is not None
    assert choice.best.plan.step_s <= 1.005 * steps_s[near[0]]
    assert {one.num_micro_batches for one in choice.fitting} == {near[0]}
    others = {one.num_micro_batches: one for one in choice.other_counts}
    assert sorted([near[0], *filter(None, others)]) == list(steps_s)
    assert all(one.plan and one.plan.step_s == steps_s[m or 0] for m, one in others.items())
    lines = choice.lines()
    assert lines[1].startswith(choice.best.name)
    assert f" M={near[0]} " in choice.best.name
    assert f"M={near[0]} of 2, 4, 8, 16: the smallest M whose step is at most 3% longer" in "".join(
        lines
    )
    chosen = task.copy()
    choice.best.set_in(chosen)
    assert f"model.num_micro_batches: {near[0]}\n" in chosen.to_text()
    text = report.plan(task)
    assert text.startswith(lines[0])
    assert f", {near[0]} micro-batches of" in text


def test_memory_requires_more_micro_batches() -> None:
    task = open_task()
    task.input.batch_size = 64
    free = auto.choose(task).best
    assert free.num_micro_batches != 16
    tried = task.copy()
    free.set_in(tried)
    smallest = min(plan.heaviest_bytes for plan in brute_force(tried).values())
    limit = smallest - 1
    task.model.device_memory = f"{limit}B"
    choice = auto.choose(task)
    assert (choice.best.num_micro_batches or 0) > (free.num_micro_batches or 0)
    assert choice.best.plan is not None
    assert choice.best.plan.heaviest_bytes <= limit
    (note,) = [line for line in choice.lines() if line.startswith("M=")]
    assert f"none can run with 2, 4, {free.num_micro_batches}" in note


def test_a_layer_that_fits_no_device_is_reported() -> None:
    with pytest.raises(errors.PartitionError, match=r"^layer .* alone needs .* of a device of 3"):
        report.plan(open_task(device_memory="3KiB"))


def test_m_stays_where_results_depend_on_it() -> None:
    choice = auto.choose(open_task(layers.Dropout.Params(name="drop", rate=0.2)))
    assert {one.num_micro_batches for one in choice.fitting} == {None}
    assert {len(one.plan.analysis.sizes) for one in choice.fitting if one.plan} == {1}
    assert not choice.other_counts
    assert [line for line in choice.lines() if "M" in line and "memory" not in line] == [
        "M stays 1: drop draws random numbers for each micro-batch. --num_micro_batches sets it"
    ]


@pytest.mark.parametrize(
    ("model", "count", "note"),
    [
        ({"num_micro_batches": 4}, 4, ""),
        ({"micro_batch_size": 8}, 2, ""),
        ({"num_partitions": 1, "cells_per_device": 1}, 1, ""),
        ({"costs": (1.0,) * 8}, 1, "M stays 1: costs are stated for micro-batches of one size"),
    ],
)
def test_m_that_is_set_stays(model: dict[str, Any], count: int, note: str) -> None:
    choice = auto.choose(open_task(recompute="full", **model))
    assert {len(one.plan.analysis.sizes) for one in choice.fitting if one.plan} == {count}
    assert choice.best.num_micro_batches is None
    assert choice.note.startswith(note)
    assert bool(choice.note) == bool(note)


def test_replicas_and_few_examples() -> None:
    task = open_task(num_replicas=2, cells_per_device=1)
    choice = auto.choose(task)
    assert (choice.best.num_micro_batches or 1) % 2 == 0
    task.input.batch_size = 3
    choice = auto.choose(task)
    assert choice.best.num_micro_batches == 3
    assert not choice.note


@pytest.mark.parametrize(("call_s", "count"), [(6.0, 2), (0.5, 4)])
def test_measured_times_count_what_a_call_costs(
    monkeypatch: pytest.MonkeyPatch, call_s: float, count: int
) -> None:
    measured = []

    def layer_times(params: Any, fields: Any) -> tuple[profiling.LayerTime, ...]:
        size = max(micro_batches.sizes_of(params, fields))
        measured.append(size)
        forward_s = call_s + size
        return (profiling.LayerTime(forward_s, 2 * forward_s, 3 * forward_s),) * 8

    monkeypatch.setattr(profiling, "layer_times", layer_times)
    monkeypatch.setattr(cell_times, "measure", lambda *_: None)
    task = open_task(cells_per_device=1)
    choice = auto.choose(task, profile=True)
    assert sorted(measured) == [1, 2, 4, 8]
    assert choice.best.plan is not None
    times_s = [one.plan.step_s for one in choice.other_counts if one.plan]
    assert choice.best.plan.step_s < min(times_s)
    assert choice.best.num_micro_batches == count  # although 2 is nearly as short as 4
    assert choice.note == f"M={count} of 2, 4, 8, 16: the shortest step"


@pytest.mark.parametrize(
    ("factor", "is_measured", "wanted"),
    [
        (
            0.98,
            True,
            [
                "measured steps that differ by at most 3% count as equal: the fewest cells are "
                "taken, then the fewest programs"
            ],
        ),
        (0.998, False, ["steps that differ by at most 0.5% count as equal: least memory"]),
        (1.0, True, []),
    ],
)
def test_what_is_taken_of_equally_short_steps_is_printed(
    factor: float, is_measured: bool, wanted: list[str]
) -> None:
    plan = auto.choose(deep(cells_per_device=1)).best.planned
    one = Candidate("1f1b", 1, "full", plan=plan)
    other = Candidate("zb_h1", 2, "full", plan=plan, correction=factor)
    lines = Choice((one, other), (), (), None, is_measured=is_measured).lines()
    assert [line for line in lines if "count as equal" in line] == wanted


def test_measured_programs_decide_how_many_cells_a_device_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layer_times(*_: Any) -> tuple[profiling.LayerTime, ...]:
        return (profiling.LayerTime(1.0, 2.0, 3.0),) * 8

    def measured_s(_: Search, one: Candidate) -> float:
        assert one.correction == 1.0
        return (1.5 if one.cells_per_device > 1 else 1.0) * one.step_s

    monkeypatch.setattr(profiling, "layer_times", layer_times)
    assert auto.choose(deep()).best.cells_per_device > 1
    monkeypatch.setattr(Search, "measured_s", measured_s)
    choice = auto.choose(open_task(), profile=True)
    assert choice.best.cells_per_device == 1
    assert choice.other_counts
    for one in (*choice.fitting, *choice.other_counts):
        factor = 1.5 if one.cells_per_device > 1 else 1.0
        assert one.step_s == factor * one.planned.mini_batch_s
    shares = [one.step_s / choice.best.step_s for one in choice.fitting]
    rows = choice.lines()
    assert " 100.0 % " in rows[1]
    assert any(f"of {min(shares[5:]):.0%} to {max(shares):.0%}" in row for row in rows)
    for one in choice.other_counts:
        share = units.percent(one.step_s / choice.best.step_s)
        assert any(row.startswith(one.name) and f" {share} " in row for row in rows)


@pytest.mark.parametrize("exhausted", [False, True])
def test_where_programs_cannot_be_measured_times_of_layers_count(
    monkeypatch: pytest.MonkeyPatch, exhausted: bool
) -> None:
    def measure(*_: Any) -> None:
        if exhausted:
            raise tf.errors.ResourceExhaustedError(None, None, "memory")

    monkeypatch.setattr(
        profiling, "layer_times", lambda *_: (profiling.LayerTime(1.0, 2.0, 3.0),) * 8
    )
    monkeypatch.setattr(cell_times, "measure", measure)
    choice = auto.choose(deep(), profile=True)
    assert {one.correction for one in choice.fitting} == {1.0}


def run_mode(task: Any, mode: str, lines: list[str], **options: Any) -> None:
    """Run a mode of the trainer on a task."""
    job = registry.Job(
        model="tiny",
        task=task.copy(),
        logdir=None,
        checkpoint=None,
        report=lines.append,
        should_stop=lambda: False,
        rebuild=lambda *_: task,
        options=registry.Options(**options),
    )
    modes.MODES[mode](job)


def test_plan_and_training_choose_by_the_same_hosts() -> None:
    task = deep(num_partitions=3)
    task.input.batch_size = 4

    def table(mode: str, shape: str | None, **options: Any) -> list[str]:
        lines: list[str] = []
        run_mode(task, mode, lines, hosts=shape, **options)
        (text,) = [line for line in lines if line.startswith("auto ")]
        return list(itertools.takewhile(bool, text.splitlines()))

    free = auto.choose(task, cluster=hosts.Hosts(3))
    slow = "3x1,between=10kB,flops=1M"
    planned = table("plan", slow)
    assert table("train", slow, dry_run=True) == planned
    assert not planned[1].startswith(free.best.name)
    assert "links count at the speeds of --hosts" in planned
    # Their memory limits training, too.
    least = min(one.planned.heaviest_bytes for one in free.fitting)
    capped = f"3x1,memory={least}B,between=10kB"
    planned = table("plan", capped)
    assert table("train_eval", capped, dry_run=True) == planned
    assert free.best.planned.heaviest_bytes > least
    assert not planned[1].startswith(f"{free.best.name} ")
    assert any(line.startswith("links are taken as free: they count") for line in planned)
    with pytest.raises(errors.PartitionError, match=r"3 devices are needed, but --hosts has 2 x 1"):
        table("train", "2x1", dry_run=True)


def test_hosts_change_nothing_of_a_choice_that_is_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    task = deep()
    task.input.batch_size = 4
    slow = hosts.parse("2x1,between=1kB,flops=1M")
    loop.run(task, tmp_path, report=lines.append, profiles=Profiles(hosts=slow))
    best = auto.choose(task, cluster=slow).best
    assert best.name != auto.choose(task).best.name
    for cluster in (slow, None, hosts.Hosts(2)):
        task.train.max_steps += 1
        lines.clear()
        loop.run(task, tmp_path, report=lines.append, profiles=Profiles(hosts=cluster))
        assert not [line for line in lines if line.startswith("auto ")]
        notes = [line for line in lines if "--hosts" in line]
        wanted = f"the run keeps its schedule, {best.schedule}: --hosts changes it no more"
        assert notes == ([wanted] if cluster is slow else [])
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    assert text.written_values(kept[1])["model.schedule"] == repr(best.schedule)
