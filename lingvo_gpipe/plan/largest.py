"""The largest member of a family of models that fits a device's memory.

This is the question of the paper's Table 1: how large can the model be on K devices?
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gpipe import errors
from lingvo_gpipe.plan import step_plan
from lingvo_gpipe.task import Task

PARTITIONS = (1, 2, 4, 8)
# The search ends at this depth, even if deeper members fit.
_MOST_LAYERS = 20_000
_SMALL_VALUES = sorted(factor * 2**power for power in range(14) for factor in (1, 3))

Rebuild: TypeAlias = Callable[[str, int], Task.Params]
"""(name, value) → task whose recipe has another value of an integer, such as a number of layers."""


def with_partitions(task: Task.Params, partitions: int | None) -> Task.Params:
    """Return the task with another number of partitions, without what was set for the old one.

    Raises:
        ParamsError: the task has a recompute policy for each cell.
    """
    if partitions is None or partitions == task.model.num_partitions:
        return task
    copy = task.copy()
    copy.model.set(num_partitions=partitions, cuts=None, devices=None, device_speeds=())
    if "," in copy.model.recompute:
        raise errors.ParamsError(
            f"model.recompute={copy.model.recompute!r} is for the cells of "
            f"num_partitions={task.model.num_partitions}, not of {partitions}. Set one policy for "
            "all, such as full"
        )
    return copy


@dataclasses.dataclass(frozen=True, slots=True)
class LargestMember:
    """The largest member of a family that fits.

    Attributes:
        num_partitions: K.
        value: value of the field that grows; None: not even the smallest member fits.
        plan: plan of that member, or of the smallest one if none fits; None: the model accepts no
            value.
        is_largest: False if the search ended before a member did not fit.
        refusal: why the model accepts no value; else empty.
    """

    num_partitions: int
    value: int | None
    plan: step_plan.Plan | None
    is_largest: bool = True
    refusal: str = ""


def family(
    task: Task.Params, grow: str, rebuild: Rebuild | None = None
) -> Callable[[int], Task.Params]:
    """Return a function from an integer to the task with that value.

    Args:
        task: a member.
        grow: dotted path of an integer field of the task, or a name that `rebuild` accepts.
        rebuild: None: only fields of the task can grow.

    Raises:
        ParamsError: `grow` is neither, or the field is not an integer.
    """
    try:
        value = task.get(grow)
    except errors.ParamsError:
        if rebuild is None:
            raise
        return functools.partial(rebuild, grow)
    if isinstance(value, bool) or not isinstance(value, int):
        raise errors.ParamsError(f"--grow={grow}: its value {value!r} is not an integer")

    def member(value: int) -> Task.Params:
        copy = task.copy()
        copy.set_path(grow, value)
        return copy

    return member


def find(
    member: Callable[[int], Task.Params],
    partitions: int,
    limit_bytes: int,
    *,
    together: bool = False,
) -> LargestMember:
    """Find the largest value with which every device stays within `limit_bytes`.

    Doubles the value while it fits, then adds ever smaller steps. Values that the model refuses
    (not a multiple of its heads, fewer layers than partitions) count as too large.

    Args:
        member: value → task.
        partitions: K.
        limit_bytes: memory of a device.
        together: the limit is that of all devices together, which share one memory.
    """

    def planned(value: int) -> step_plan.Plan:
        task = with_partitions(member(value), partitions).copy()
        task.model.device_memory = None  # the limit is `limit_bytes`
        return step_plan.make_for(task)

    def fits(plan: step_plan.Plan) -> bool:
        return (plan.together_bytes if together else plan.heaviest_bytes) <= limit_bytes

    value, plan, refusal = 0, None, ""
    for value in _SMALL_VALUES:  # the model may accept only some
        try:
            plan = planned(value)
            break
        except errors.UserError as error:
            refusal = str(error)
    if plan is None:
        return LargestMember(partitions, None, None, refusal=refusal)
    if not fits(plan):
        return LargestMember(partitions, None, plan)
    step, grows = value, True
    while step:
        if len(plan.analysis.layers) > _MOST_LAYERS or value > 2**40:
            return LargestMember(partitions, value, plan, is_largest=False)
        larger = None
        with contextlib.suppress(errors.UserError):
            larger = planned(value + step)
        if larger is not None and fits(larger):
            value, plan = value + step, larger
            step = value if grows else step
        else:
            grows = False
            step //= 2
    return LargestMember(partitions, value, plan)
