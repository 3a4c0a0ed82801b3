"""A step that does not fit into the memory of this machine is found before it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.plan import describe, host_memory, step_plan
from lingvo_gpipe.plan.host_memory import HostMemory
from lingvo_gpipe.run import loop, process
from tests import tiny_task

MACHINE = {
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"
    "SwapTotal: 200 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
}
WHOLE = HostMemory(1200 * 1024, 900 * 1024)
INSIDE = "sys/fs/cgroup/app"


def group(folder: str, limit: object, used: int, freed: int, version: int) -> dict[str, str]:
    names = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("max", "current", "inactive_file"),
    }
    limit_name, used_name, freed_name = names[version]
    return {
        f"{folder}/memory.{limit_name}": f"{limit}\n",
        f"{folder}/memory.{used_name}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\n{freed_name} {freed}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, WHOLE),
        ({"proc/self/cgroup": "0::/app\n"}, WHOLE),
        ({"proc/self/cgroup": "0::/app\n", **group(INSIDE, "max", 9, 0, 2)}, WHOLE),
        (
            {"proc/self/cgroup": "0::/app\n", **group(INSIDE, 512000, 300000, 100000, 2)},
            HostMemory(512000 + 200 * 1024, 312000 + 100 * 1024, is_group=True),
        ),
        (  # the path is that on the host
            {"proc/self/cgroup": "0::/host/x\n", **group("sys/fs/cgroup", 9000, 10000, 0, 2)},
            HostMemory(9000 + 200 * 1024, 100 * 1024, is_group=True),
        ),
        (  # the smaller limit of those around it
            {
                "proc/self/cgroup": "3:cpu:/\n4:memory:/a/b\n0::/\n",
                **group("sys/fs/cgroup/memory/a/b", 400000, 0, 0, 1),
                **group("sys/fs/cgroup/memory/a", 300000, 250000, 0, 1),
                **group("sys/fs/cgroup/memory", 2**63 - 4096, 250000, 0, 1),
            },
            HostMemory(300000 + 200 * 1024, 50000 + 100 * 1024, is_group=True),
        ),
        ({"proc/self/cgroup": "0::/app\n", f"{INSIDE}/memory.max": "many"}, WHOLE),
    ],
)
def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, files: Mapping[str, str], expected: HostMemory
) -> None:
    for name, text in {**MACHINE, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory.of_this_machine(tmp_path) == expected


def test_a_system_that_does_not_say_is_asked_nothing(tmp_path: Path) -> None:
    assert host_memory.of_this_machine(tmp_path) is None
    assert host_memory.warning(tiny_task.tiny_task(), {}, None, refuse=True) is None


def test_what_does_not_fit_is_said_and_what_cannot_is_refused() -> None:
    task = tiny_task.tiny_task()
    task.name = "lab.Tiny"
    plan = step_plan.make_for(task)
    step = plan.together_bytes
    kept = sum(cell.parameter_bytes + cell.slot_bytes for cell in plan.cells)
    assert 0 < kept < step / 2

    def said(total: int, available: int, *, refuse: bool = True) -> str | None:
        fields, memory = describe.fields_of(task), HostMemory(total, available)
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
        with pytest.raises(errors.PlacementError, match=match):
            said(total, 0, refuse=refuse)


def test_a_run_looks_before_it_makes_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    task = tiny_task.tiny_task(max_steps=1)
    step = step_plan.make_for(task).together_bytes
    small = HostMemory(step * 9 // 20, 0, is_group=True)
    monkeypatch.setattr(host_memory, "of_this_machine", lambda: small)
    with pytest.raises(errors.PlacementError, match=r"is planned to need .*this control group has"):
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
