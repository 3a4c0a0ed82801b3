"""Which layers are larger than a device, and in how many slices every device is large enough."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

from lingvo_gpipe import errors, network
from lingvo_gpipe.console import units
from lingvo_gpipe.layers import slices
from lingvo_gpipe.network import capacity, wired_layers
from lingvo_gpipe.plan import describe, step_plan
from lingvo_gpipe.task import Task, groups_of

_MOST_SLICES = 256
_MOST_PLANS = 4  # of ever more slices that all fit a device alone
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
    divided = {layer.name: (layer, parts) for layer, parts in network.divided(task.model)}
    whole = [
        name
        for names in groups
        for name in names
        if not isinstance(divided[name][0], slices.SlicedParams)
    ]
    if whole:
        return (
            f"{start}{', '.join(whole[:_SHOWN_LAYERS])} cannot be divided into slices. Use fewer "
            "examples, more micro-batches, or larger devices"
        )
    needed = {
        name: sum(needs[part.name] for part in parts if part.name in too_large)
        for name, (_, parts) in divided.items()
    }
    least = [max(2, *(math.ceil(needed[name] / limit_bytes) for name in names)) for names in groups]
    plan = _fewest(task, [_patterns(names, divided) for names in groups], least, limit_bytes)
    if plan is None:
        return (
            f"{start}No number of slices was found with which all devices fit. Use more "
            "partitions, more micro-batches, or larger devices"
        )
    return (
        f"{start}In slices every device fits, the heaviest needs "
        f"{units.size(plan.heaviest_bytes)}: "
        f'--params_override="model.slices={plan.analysis.params.slices}" '
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
    wired = wired_layers.wire(exact, groups.fields)
    within = capacity.of_network(wired, [capacity.ALONE], limit_bytes=0)
    return {layer.name: within.need_bytes(0, n, n + 1) for n, layer in enumerate(wired.layers)}


def _fewest(
    task: Task.Params,
    patterns: Sequence[Sequence[str]],
    least: Sequence[int],
    limit_bytes: int,
) -> step_plan.Plan | None:
    """Return the plan with the fewest slices that fit; None: none were found.

    Args:
        task: the task, with the memory of a device.
        patterns: of the names of layers that have the same number of slices.
        least: the fewest slices that may fit, for each.
        limit_bytes: that memory.
    """

    def sliced(numbers: Sequence[int]) -> Task.Params:
        of_pattern = zip(patterns, numbers, strict=True)
        slices = {pattern: number for group, number in of_pattern for pattern in group}
        others = {p: n for p, n in task.model.slices.items() if p not in slices}
        result = task.copy()
        result.model.slices = {**slices, **others}
        return result

    numbers, num_plans = list(least), 0
    while True:
        tried = sliced(numbers)
        try:
            fits_alone = max(layer_bytes(tried).values()) <= limit_bytes
        except errors.LayerError:  # more slices than rows
            return None
        plan = _fitting(tried, limit_bytes) if fits_alone else None
        if plan is not None:
            break
        num_plans += fits_alone
        if num_plans == _MOST_PLANS or max(numbers) > _MOST_SLICES:
            return None
        numbers = [number + max(1, number // 4) for number in numbers]
    for index in range(len(numbers)):
        while numbers[index] > least[index]:
            fewer = [number - (n == index) for n, number in enumerate(numbers)]
            lower = _fitting(sliced(fewer), limit_bytes)
            if lower is None:
                break
            numbers, plan = fewer, lower
    return plan


def _fitting(task: Task.Params, limit_bytes: int) -> step_plan.Plan | None:
    """Return the plan of a task; None: it needs more than a device has."""
    try:
        plan = step_plan.make_for(task)
    except errors.PartitionError:  # no cut fits
        return None
    return plan if plan.heaviest_bytes <= limit_bytes else None


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
    patterns: list[str] = []
    for stem in dict.fromkeys(map(_stem, names)):
        of_stem = [name for name in names if _stem(name) == stem]
        is_exact = set(fnmatch.filter(layers, stem)) <= set(names)
        patterns += [stem] if len(of_stem) > 1 and is_exact else of_stem
    return patterns
