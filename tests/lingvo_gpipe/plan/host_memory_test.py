"""A step that does not fit into the memory of this machine is found before it is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.console import units
from lingvo_gpipe.plan import describe, host_memory, machine_memory, step_plan
from lingvo_gpipe.plan.machine_memory import MachineMemory
from lingvo_gpipe.run import loop, process
from tests import tiny_task


def test_nothing_is_said_where_the_memory_is_unknown() -> None:
    assert host_memory.warning(tiny_task.tiny_task(), {}, None, refuse=True) is None


def test_what_does_not_fit_is_said_and_what_cannot_is_refused() -> None:
    task = tiny_task.tiny_task()
    task.name = "lab.Tiny"
    plan = step_plan.make_for(task)
    step = plan.together_bytes
    kept = sum(cell.parameter_bytes + cell.slot_bytes for cell in plan.cells)
    assert 0 < kept < step / 2

    def said(total: int, available: int, *, refuse: bool = True) -> str | None:
        fields, memory = describe.fields_of(task), MachineMemory(total, available)
        return host_memory.warning(task, fields, memory, refuse=refuse)

    assert said(step, step) is None
    assert said(100 * step, 100 * step) is None
    line = said(step, step - 1)
    assert line is not None
    assert line.startswith("a step is planned to need ")
    assert "this machine has " in line
    assert "--mode=plan" in line
    assert "a step is planned" in str(said(step // 2 - 1, 0, refuse=False))
    for total, refuse, match in (
        (step // 2 - 1, True, r"^a step of lab.Tiny is planned to need .*, and this machine has "),
        (kept - 1, False, r"^lab.Tiny needs .* for its variables and optimizer slots alone"),
    ):
        with pytest.raises(errors.DeviceError, match=match):
            said(total, 0, refuse=refuse)


def test_a_weight_that_one_replica_owns_counts_once() -> None:
    """All replicas have a copy of it while a step runs, but one its gradients and slots."""
    task = tiny_task.tiny_task()
    task.model.set(num_replicas=4, num_micro_batches=4)
    task.model.layers[0].units = 4096
    plan = step_plan.make_for(task)
    needed = sum(plan.device_bytes)
    assert needed < 0.8 * 4 * plan.together_bytes
    fields = describe.fields_of(task)
    assert host_memory.warning(task, fields, MachineMemory(needed, needed), refuse=True) is None
    line = host_memory.warning(task, fields, MachineMemory(needed, needed - 1), refuse=True)
    assert str(line).startswith(f"a step is planned to need {units.size(needed)}, ")


def test_a_run_looks_before_it_makes_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    task = tiny_task.tiny_task(max_steps=1)
    step = step_plan.make_for(task).together_bytes
    small = MachineMemory(step * 9 // 20, 0, is_group=True)
    monkeypatch.setattr(machine_memory, "of_this_machine", lambda: small)
    with pytest.raises(errors.DeviceError, match=r"is planned to need .*this control group has"):
        loop.dry_run(task, None, report=lines.append)
    loop.run(task, tmp_path / "run", report=lines.append)
    assert sum("the system ends the run without a message" in line for line in lines) == 1
    task.model.devices = ("CPU:0",) * task.model.num_partitions
    lines.clear()
    source = task.input.instantiate()
    process.check_memory(
        task, source, lines.append, refuse=True
    )  # other devices may have other memory
    assert lines == []
