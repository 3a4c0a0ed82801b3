"""How much memory a machine has, or the control group of a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lingvo_gpipe.plan import machine_memory
from lingvo_gpipe.plan.machine_memory import MachineMemory

MACHINE = {
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"
    "SwapTotal: 200 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
}
WHOLE = MachineMemory(1200 * 1024, 900 * 1024, swap_bytes=200 * 1024)
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
            MachineMemory(
                512000 + 200 * 1024, 312000 + 100 * 1024, is_group=True, swap_bytes=200 * 1024
            ),
        ),
        (  # the path is that on the host
            {"proc/self/cgroup": "0::/host/x\n", **group("sys/fs/cgroup", 9000, 10000, 0, 2)},
            MachineMemory(9000 + 200 * 1024, 100 * 1024, is_group=True, swap_bytes=200 * 1024),
        ),
        (  # the smaller limit of those around it
            {
                "proc/self/cgroup": "3:cpu:/\n4:memory:/a/b\n0::/\n",
                **group("sys/fs/cgroup/memory/a/b", 400000, 0, 0, 1),
                **group("sys/fs/cgroup/memory/a", 300000, 250000, 0, 1),
                **group("sys/fs/cgroup/memory", 2**63 - 4096, 250000, 0, 1),
            },
            MachineMemory(
                300000 + 200 * 1024, 50000 + 100 * 1024, is_group=True, swap_bytes=200 * 1024
            ),
        ),
        ({"proc/self/cgroup": "0::/app\n", f"{INSIDE}/memory.max": "many"}, WHOLE),
    ],
)
def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, files: Mapping[str, str], expected: MachineMemory
) -> None:
    for name, text in {**MACHINE, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_memory.of_this_machine(tmp_path) == expected


def test_a_system_that_does_not_say_is_asked_nothing(tmp_path: Path) -> None:
    assert machine_memory.of_this_machine(tmp_path) is None
