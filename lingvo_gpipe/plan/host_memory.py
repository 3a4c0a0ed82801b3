"""Whether a step fits into the memory of this machine, which all logical CPU devices share.

The system ends a process that takes more without a message, so a line comes before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from lingvo_gpipe import errors, network, regular_files
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import base
from lingvo_gpipe.nests import SpecNest
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.task import Task, groups_of

_SURELY_TOO_MUCH = 2.0
"""A step that is planned to need this many times the memory does not fit: plans are more exact."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a machine, or of the control group in which a container runs; swap space included.

    Attributes:
        total_bytes: all of it.
        available_bytes: what processes may still take.
        is_group: whether a control group is the limit.
    """

    total_bytes: int
    available_bytes: int
    is_group: bool = False


def of_this_machine(root: Path = Path("/")) -> HostMemory | None:
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
    found = HostMemory(1024 * kib["MemTotal"] + swap, 1024 * kib["MemAvailable"] + free_swap)
    for limit, used in _groups(root):
        room = max(0, limit - used) + free_swap
        if room < found.available_bytes or limit + swap < found.total_bytes:
            total = min(limit + swap, found.total_bytes)
            found = HostMemory(total, min(room, found.available_bytes), is_group=True)
    return found


def warning(
    task: Task.Params, fields: Mapping[str, SpecNest], memory: HostMemory | None, *, refuse: bool
) -> str | None:
    """Return a line for the user where a step may not fit; None: it fits.

    Args:
        task: params of the task.
        fields: fields of its mini-batch, name → nest of `tf.TensorSpec`.
        memory: of the machine; None: unknown, and nothing is said.
        refuse: whether what is planned to need twice the memory is refused; what surely needs more
            always is.

    Raises:
        PlacementError: the step cannot fit.
    """
    if memory is None:
        return None
    groups = groups_of(task, fields)
    analysis = network.analyze(groups.params, groups.fields)
    if _at_most(analysis) <= memory.available_bytes:
        return None
    averages = task.train.average is not None
    plan = step_plan.make(
        groups.params,
        groups.fields,
        optimizer_params=task.train.optimizer,
        averages=averages,
        accumulate=task.train.accumulate * groups.count,
    )
    slots = step_plan.slot_bytes(analysis.variables, task.train.optimizer, averages=averages)
    kept = sum(slots.values()) + sum(spec.size_bytes for spec in analysis.variables.values())
    step = task.model.num_replicas * plan.together_bytes
    there = f"this {'control group' if memory.is_group else 'machine'}"
    way_out = (
        "--mode=plan shows what needs it; a smaller model or input.batch_size, more micro-batches "
        "or --recompute=full need less"
    )
    if kept > memory.total_bytes:
        raise errors.PlacementError(
            f"{task.name or 'the model'} needs {units.size(kept)} for its variables and optimizer "
            f"slots alone, and {there} has {units.size(memory.total_bytes)}. A smaller model needs "
            "less, or workers on more machines"
        )
    has = f"{there} has {units.size(memory.total_bytes)}, {units.size(memory.available_bytes)} free"
    if refuse and step > _SURELY_TOO_MUCH * memory.total_bytes:
        raise errors.PlacementError(
            f"a step of {task.name or 'the model'} is planned to need {units.size(step)}, and {has}"
            f". {way_out[0].upper()}{way_out[1:]}"
        )
    if step > memory.available_bytes:
        return (
            f"a step is planned to need {units.size(step)}, and {has}: if that does not suffice, "
            f"the system ends the run without a message. {way_out}"
        )
    return None


def _at_most(analysis: network.Analysis) -> int:
    """Return a rough bound of the bytes of a step, as if nothing were freed while it lasts."""
    variables = sum(spec.size_bytes for spec in analysis.variables.values())
    kept = sum(
        layer.meta.activation_bytes + 2 * base.spec_bytes(layer.meta.outputs)
        for layer in analysis.layers
    )
    return 8 * variables + 2 * len(analysis.sizes) * kept


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
