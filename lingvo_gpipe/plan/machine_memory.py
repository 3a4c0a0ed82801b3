"""How much memory this machine has, or the control group in which a container runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lingvo_gpipe import regular_files


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
    available = 1024 * kib["MemAvailable"] + free_swap
    found = MachineMemory(1024 * kib["MemTotal"] + swap, available, swap_bytes=swap)
    for limit, used in _groups(root):
        room = max(0, limit - used) + free_swap
        if room < found.available_bytes or limit + swap < found.total_bytes:
            total = min(limit + swap, found.total_bytes)
            available = min(room, found.available_bytes)
            found = MachineMemory(total, available, is_group=True, swap_bytes=swap)
    return found


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each control group of this process that has a limit."""
    try:
        lines = regular_files.read_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        places: tuple[str, ...]
        if not kinds:
            places, files = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), _VERSION_2
        elif "memory" in kinds.split(","):
            places, files = ("sys/fs/cgroup/memory",), _VERSION_1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for place in places:
            # In a container, the path may be that on the host, and only the root is there.
            for folder in dict.fromkeys((inside, *inside.parents, PurePosixPath())):
                found = _limit(root / place / folder, files)
                if found is not None:
                    yield found


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """Names of the files of a control group.

    Attributes:
        limit: with the limit.
        used: with what its processes use, files in memory included.
        freed: key in memory.stat of the bytes that the system frees when it needs memory.
    """

    limit: str
    used: str
    freed: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def _limit(folder: Path, files: _Files) -> tuple[int, int] | None:
    """Return limit and use of a control group; None: it is not there, or has no limit."""
    try:
        limit = float(regular_files.read_text(folder / files.limit).replace("max", "inf"))
        used = int(regular_files.read_text(folder / files.used))
        stat = dict(
            line.split() for line in regular_files.read_text(folder / "memory.stat").splitlines()
        )
    except (OSError, ValueError):
        return None
    if not math.isfinite(limit):
        return None
    return int(limit), max(0, used - int(stat.get(files.freed, 0)))
