"""How much memory this machine has, or the control group in which a container runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lingvo_gpipe import regular_files

# Names of the files of a control group with its limit, with what its processes use, and the key in
# memory.stat of the bytes that the system frees when it needs memory; of both versions.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of a machine, or of the control group in which a container runs; swap space included.

    Attributes:
        total_bytes: all of it.
        available_bytes: what processes may still take.
        is_group: whether a control group is the limit.
        swap_bytes: swap space in `total_bytes`.
    """

    total_bytes: int
    available_bytes: int
    is_group: bool = False
    swap_bytes: int = 0


def of_this_machine(root: Path = Path("/")) -> MachineMemory | None:
    """Return the memory of this machine; None: the system does not say.

    Args:
        root: where `proc` and `sys` are.
    """
    try:
        lines = regular_files.read_text(root / "proc/meminfo").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if not {"MemTotal", "MemAvailable"} <= kib.keys():
        return None
    swap, free_swap = 1024 * kib.get("SwapTotal", 0), 1024 * kib.get("SwapFree", 0)
    total, available = 1024 * kib["MemTotal"] + swap, 1024 * kib["MemAvailable"] + free_swap
    is_group = False
    for limit, used in _groups(root):
        room = max(0, limit - used) + free_swap
        is_group |= room < available or limit + swap < total
        total, available = min(total, limit + swap), min(available, room)
    return MachineMemory(total, available, is_group, swap)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each control group of this process that has a limit."""
    try:
        lines = regular_files.read_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place = root / ("sys/fs/cgroup/memory" if kinds else "sys/fs/cgroup")
        inside = PurePosixPath(path.lstrip("/"))
        # In a container, the path may be that on the host, and only the root is there.
        for folder in (inside, *inside.parents):
            for limit, used, freed in _FILES:
                limit_and_use = _limit(place / folder, limit, used, freed)
                if limit_and_use is not None:
                    yield limit_and_use


def _limit(folder: Path, limit_name: str, used_name: str, freed: str) -> tuple[int, int] | None:
    """Return limit and use of a control group; None: it is not there, or has no limit."""
    try:
        limit = float(regular_files.read_text(folder / limit_name).replace("max", "inf"))
        used = int(regular_files.read_text(folder / used_name))
        stat = regular_files.read_text(folder / "memory.stat").splitlines()
        freed_bytes = int(dict(line.split() for line in stat).get(freed, 0))
    except (OSError, ValueError):
        return None
    return (int(limit), max(0, used - freed_bytes)) if math.isfinite(limit) else None
