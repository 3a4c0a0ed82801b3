"""Which layers are larger than a device, and in how many slices every device is large enough."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers.sliced import dividing
from lingvo_gpipe.network import wired_layers
from lingvo_gpipe.network.cutting import cuts
from lingvo_gpipe.plan import describe, step_plan
from lingvo_gpipe.task import Task, groups_of

_MOST_SLICES = 256
_SHOWN_LAYERS = 3


def advice(task: Task.Params, limit_bytes: int) -> str | None:
    """Return which layer is larger than a device, and what to set so that it is divided.

    The numbers of slices are the smallest with which a plan with an automatic cut fits.

    Args:
        task: the task, with a named schedule.
        limit_bytes: memory of a device.

    Returns:
        None if every layer alone fits a device.
    """
    task = task.copy()
    task.model.set(device_memory=str(limit_bytes), cuts=None, costs=None)
    needs = layer_bytes(task)
    worst = max(needs, key=needs.__getitem__)
    too_large = {name for name, need in needs.items() if need > limit_bytes}
    if not too_large:
        return None
    start = (
        f"layer {worst} alone needs {units.size(needs[worst])} of a device of "
        f"{units.size(limit_bytes)}. "
    )
    groups = _groups(task.model, too_large)
    by_name = {layer.name: layer for layer, _ in network.divided(task.model)}
    whole = [
        name for names in groups for name in names if not dividing.can_be_divided(by_name[name])
    ]
    if whole:
        return (
            f"{start}{', '.join(whole[:_SHOWN_LAYERS])} cannot be divided into slices. Use fewer "
            "examples, more micro-batches, or larger devices"
        )
    patterns = [_patterns(names, by_name) for names in groups]
    slices = _fewest(task, patterns)
    if slices is None:
        return (
            f"{start}No number of slices was found with which all devices fit. Use more "
            "partitions, more micro-batches, or larger devices"
        )
    return (
        f"{start}In slices every device fits, the heaviest needs "
        f"{units.size(_heaviest(task, slices) or 0)}: "
        f'--params_override="model.slices={slices}" '
        f"--params_override=model.device_memory={limit_bytes}"
    )


def layer_bytes(task: Task.Params) -> dict[str, int]:
    """Return name → what a layer needs of a device of its own, by formula."""
    groups = groups_of(task, describe.fields_of(task))
    wired = wired_layers.wire(groups.params, groups.fields)
    slots = step_plan.slot_bytes(
        wired.variables, task.train.optimizer, averages=task.train.average is not None
    )
    trained = sum(spec.size_bytes for spec in wired.variables.values() if spec.is_trained)
    earlier = trained if task.train.accumulate * groups.count > 1 else 0  # sums of gradients
    exact = groups.params.copy().set(
        slots_per_weight=(sum(slots.values()) + earlier) / (trained or 1)
    )
    needs = cuts.alone_bytes(wired_layers.wire(exact, groups.fields))
    return {layer.name: need for layer, need in zip(wired.layers, needs, strict=True)}


def _fewest(
    task: Task.Params, patterns: Sequence[Sequence[str]]
) -> dict[str, int | tuple[int, ...]] | None:
    """Return the field `model.slices` with the fewest slices that fit; None: none was found.

    Args:
        task: the task, with the memory of a device.
        patterns: of the names of layers that have the same number of slices.
    """

    def slices(numbers: Sequence[int]) -> dict[str, int | tuple[int, ...]]:
        found: dict[str, int | tuple[int, ...]] = {
            pattern: number
            for group, number in zip(patterns, numbers, strict=True)
            for pattern in group
        }
        return found | {p: n for p, n in task.model.slices.items() if p not in found}

    numbers = [2] * len(patterns)
    while _heaviest(task, slices(numbers)) is None:
        numbers = [2 * number for number in numbers]
        if numbers[0] > _MOST_SLICES:
            return None
    for index in range(len(numbers)):
        low = 1  # too few
        while numbers[index] - low > 1:
            tried = list(numbers)
            tried[index] = (low + numbers[index]) // 2
            if _heaviest(task, slices(tried)) is None:
                low = tried[index]
            else:
                numbers = tried
    return slices(numbers)


def _heaviest(task: Task.Params, slices: Mapping[str, int | tuple[int, ...]]) -> int | None:
    """Return the bytes of the heaviest device with these slices; None: they do not fit."""
    sliced = task.copy()
    sliced.model.slices = dict(slices)
    try:
        heaviest = step_plan.make_for(sliced).heaviest_bytes
    except (errors.PartitionError, errors.LayerError):  # no cut fits, or more slices than rows
        return None
    return heaviest if heaviest <= units.parse_size(task.model.device_memory or "") else None


def _groups(model: network.PipelineParams, too_large: set[str]) -> list[list[str]]:
    """Return names of layers that are divided alike, for all layers with a part in `too_large`.

    Tied layers are divided alike, and so are those whose names differ by a number.
    """
    divided = network.divided(model)
    alike = [
        {layer.name, path.partition("/")[0]} for layer, _ in divided for path in layer.tie.values()
    ]
    needed = [layer.name for layer, parts in divided if any(p.name in too_large for p in parts)]
    alike += [{name for name in needed if _stem(name) == _stem(first)} for first in needed]
    groups: list[list[str]] = []
    for name in needed:
        if any(name in group for group in groups):
            continue
        group, size = {name}, 0
        while len(group) > size:
            size = len(group)
            group.update(*(names for names in alike if names & group))
        groups.append([layer.name for layer, _ in divided if layer.name in group])
    return groups


def _stem(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _patterns(names: Sequence[str], layers: Mapping[str, object]) -> list[str]:
    """Return patterns that match all of `names` and no other layer."""
    found = []
    for stem in dict.fromkeys(map(_stem, names)):
        of_stem = [name for name in names if _stem(name) == stem]
        is_exact = set(fnmatch.filter(layers, stem)) <= set(names)
        found += [stem] if len(of_stem) > 1 and is_exact else of_stem
    return found
