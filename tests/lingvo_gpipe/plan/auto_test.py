"""The schedule that `auto` takes is the fastest one that fits, and a run keeps it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lingvo_gpipe import errors, layers, modes, schedule
from lingvo_gpipe.hyperparams import text
from lingvo_gpipe.plan import auto, step_plan
from lingvo_gpipe.run import checkpoints, loop
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


def brute_force(task: Any) -> dict[tuple[str, int, str], step_plan.Plan]:
    """Return the plans of all schedules that can be made."""
    found = {}
    known = step_plan.known_of(auto.unscheduled(task))
    names = [name for name in schedule.SCHEDULES if name != "optimal"]
    for name, cells, recompute in itertools.product(names, (1, 2, 3), auto.POLICIES):
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
    task = deep()
    loop.run(task, tmp_path, report=lines.append)
    (table,) = [line for line in lines if line.startswith("auto ")]
    best = auto.choose(task).best
    assert table.splitlines()[1].startswith(best.name)
    kept = checkpoints.newest_text(str(tmp_path / "checkpoints"))
    assert kept is not None
    values = text.written_values(kept[1])
    assert values["model.schedule"] == repr(best.schedule)
    assert values["model.recompute"] == repr(best.recompute)
    # It goes on with its choice, although another one would be made now.
    monkeypatch.setattr(auto, "POLICIES", ("full",))
    assert auto.choose(task).best.name != best.name
    task.train.max_steps = 3
    lines.clear()
    loop.run(task, tmp_path, report=lines.append)
    assert not [line for line in lines if line.startswith("auto ")]
    assert not [line for line in lines if line.strip().startswith("model.")]
    resolved = modes.with_kept_choice(task, str(tmp_path))
    assert resolved.model.schedule == best.schedule
    # For another number of devices it is made again.
    task.model.set(num_partitions=3)
    again = auto.resolved(task, lines.append, kept={**values, "model.recompute": "'full,never'"})
    assert lines[-1].startswith("auto ")
    assert again.model.recompute == "full"


def test_other_modes_need_a_run_that_has_chosen(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path)):
        with pytest.raises(errors.ParamsError, match="auto is chosen by --mode=train"):
            modes.with_kept_choice(deep(), folder)
    with pytest.raises(errors.ScheduleError, match="'auto' is not chosen yet"):
        schedule.make("auto", 2, 2)


def test_a_named_schedule_stays() -> None:
    task = tiny_task()
    assert auto.resolved(task, lambda _: None) is task
